"""Which NeoX models Hugging Face's GPT-NeoX can express; every reason against is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neox.errors import ConversionError

_POSITIONS = "Hugging Face GPT-NeoX has rotary positions only"
_NORMS = "Hugging Face GPT-NeoX has LayerNorm with weight and bias only"
_ATTENTION_KINDS = ("global", "flash")


def refuse_inexpressible(flat: Mapping[str, Any]) -> None:
    """Raise ConversionError with every reason why a model of these flat keys cannot be a Hugging Face GPT-NeoX."""
    if reasons := inexpressible(flat):
        raise ConversionError("this model cannot be expressed as Hugging Face GPT-NeoX:\n  " + "\n  ".join(reasons))


def inexpressible(flat: Mapping[str, Any]) -> list[str]:
    """One sentence per setting that Hugging Face's GPT-NeoX lacks, naming key and value; empty if there is none.

    flat: NeoX's flat keys; absent ones have gpt-neox's defaults (so an absent `pos_emb` is `learned`).
    """
    flat = {key.replace("-", "_"): None if value == "None" else value for key, value in flat.items()}
    reasons = []
    pos_emb = flat.get("pos_emb") or "learned"
    if pos_emb != "rotary":
        given = "" if flat.get("pos_emb") else " (gpt-neox's default)"
        reasons.append(f"pos_emb: {pos_emb}{given}: {_POSITIONS}")
    norm = flat.get("norm") or "layernorm"
    if norm != "layernorm":
        reasons.append(f"norm: {norm}: {_NORMS}")
    if flat.get("gpt_j_tied"):
        reasons.append("gpt_j_tied: true: one norm for attention and MLP does not exist there")
    activation = flat.get("activation") or "gelu"
    if activation != "gelu":
        reasons.append(f"activation: {activation}: only gelu (erf or tanh) is exported")
    if kinds := _other_attention(flat.get("attention_config")):
        reasons.append(f"attention_config: {', '.join(kinds)}: only dense causal attention exists there")
    reasons += _later_architecture(flat)
    return reasons


def _other_attention(config: Any) -> list[str]:
    """Attention kinds in NeoX's `[[["global", "sparse_fixed"], 12]]` other than dense causal ones."""
    found: list[str] = []
    for entry in config if isinstance(config, Sequence) and not isinstance(config, str) else ():
        kinds = entry[0] if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) else entry
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if isinstance(kind, str) and kind not in _ATTENTION_KINDS and kind not in found:
                found.append(kind)
    return found


def _later_architecture(flat: Mapping[str, Any]) -> list[str]:
    """Settings of later NeoX versions that change the function."""
    reasons = []
    if flat.get("num_kv_heads") not in (None, flat.get("num_attention_heads")):
        reasons.append(f"num_kv_heads: {flat['num_kv_heads']}: grouped-query attention does not exist there")
    if flat.get("sliding_window_width"):
        reasons.append(f"sliding_window_width: {flat['sliding_window_width']}: windows do not exist there")
    if flat.get("rotary_interleaved"):
        reasons.append("rotary_interleaved: true: only half-split rotary exists there")
    for key in ("use_bias_in_norms", "use_bias_in_mlp", "use_bias_in_attn_linear"):
        if flat.get(key) is False:
            reasons.append(f"{key}: false: every linear and norm has a bias there")
    if (flat.get("moe_num_experts") or 1) > 1:
        reasons.append(f"moe_num_experts: {flat['moe_num_experts']}: experts do not exist there")
    return reasons
