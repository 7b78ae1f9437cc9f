"""Table of the YAML keys that each field of `Architecture` is read from, and written as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from neox.architecture import (
    ACTIVATIONS,
    BLOCKS,
    WITHOUT_ATTENTION,
    WITHOUT_LOGITS,
    WITHOUT_MLP,
    Architecture,
    BlockKind,
    Pairs,
    rope_scaling_of,
    rope_scaling_settings,
    sparsity_of,
)
from neox.config.sections.model import SoftPromptSettings
from neox.plan.network.attention_config import SLIDING_WINDOW, attention_kinds, paper_kinds
from neox.plan.network.expert_keys import EXPERT_FIELDS
from neox.plan.network.field_keys import FieldKeys, Keys, copied, keys_if, later_key, read_if, same, unless_default
from neox.plan.network.mlp_width import MLP_SIZES, mlp_width
from neox.plan.network.norm_keys import EPSILONS, RESIDUAL_OF_PLACEMENT, epsilon_key, plain_norm, read_epsilon
from neox.plan.network.recurrent_keys import RECURRENT_FIELDS


def _is_rotary(positions: str) -> bool:
    return positions == "rotary"


def _is_learned(positions: str) -> bool:
    return positions == "learned"


def _is_relative(positions: str) -> bool:
    return positions == "rpe"


def _is_masked(objective: str) -> bool:
    return objective == "masked_lm"


# Widths.


def size_of_head(hidden_size: int, heads: int, head_dim: int | None) -> int:
    """Return the width of an attention head."""
    return head_dim or hidden_size // heads


def _value_head_dim(given: int | None, *sizes: Any) -> int:
    return given or size_of_head(*sizes)


def _write_head_dim(network: Architecture) -> Keys:
    return unless_default("head_dim", network.head_dim, network.hidden_size // network.num_attention_heads)


def _write_mlp_width(network: Architecture) -> Keys:
    if ACTIVATIONS[network.activation].width_factor > 1:
        return {"mlp_width": network.mlp_width}  # what a gated width follows from depends on other keys
    return unless_default("mlp_width", network.mlp_width, 4 * network.hidden_size)


# Activation and norms.


def _read_activation(name: str, fused: bool) -> str:
    if fused and name == "gelu":
        return "gelu_tanh"
    return name


def _write_activation(network: Architecture) -> Keys:
    if network.activation == "gelu_tanh":
        return {"activation": "gelu", "bias_gelu_fusion": True}
    return {"activation": network.activation, "bias_gelu_fusion": False}


def _write_epsilon(network: Architecture) -> Keys:
    key = epsilon_key(network.norm)
    return {} if key is None else {key: network.norm_epsilon}


def _read_qk_norm(is_neox: bool, name: str) -> str:
    if is_neox:
        return "neox"
    return name


def _write_qk_norm(network: Architecture) -> Keys:
    if network.qk_norm == "neox":
        return {"use_qk_layernorm": True}
    return unless_default("qk_norm", network.qk_norm, "none")


# Biases.


def _read_qkv_bias(of_attention: bool, of_qkv: bool | None) -> bool:
    if of_qkv is None:
        return of_attention
    return of_qkv


def _write_qkv_bias(network: Architecture) -> Keys:
    return unless_default("use_bias_in_qkv", network.qkv_bias, network.attention_output_bias)


# Positions.


def rotated_dimensions(rotary_pct: float, hidden_size: int, heads: int, head_dim: int | None) -> int:
    """Return the dimensions of each head that rotary positions rotate."""
    return int(size_of_head(hidden_size, heads, head_dim) * rotary_pct)


def _write_rotary_fraction(network: Architecture) -> Keys:
    return keys_if(_is_rotary(network.positions), rotary_pct=network.rotary_fraction)


def _whole(number: float) -> int | float:
    """Return a number as a whole one, if it is one."""
    return int(number) if number.is_integer() else number


def _write_rotary_base(network: Architecture) -> Keys:
    return keys_if(_is_rotary(network.positions), rotary_emb_base=_whole(network.rotary_base))


def _read_max_positions(longest: int | None, seq_length: int) -> int:
    return longest or seq_length


def _write_max_positions(network: Architecture) -> Keys:
    return {"seq_length": network.max_length, "max_position_embeddings": network.max_positions}


# Attention.


def _write_attention(network: Architecture) -> Keys:
    return keys_if(set(network.attention) != {"global"}, attention_config=list(network.attention))


def _read_window(attention_config: Sequence[Any] | None, num_layers: int, width: int | None) -> int:
    if width is None or SLIDING_WINDOW not in paper_kinds(attention_config, num_layers, width):
        return 0
    return width


def _read_sparsity(given: Keys | None, attention_config: Sequence[Any] | None, num_layers: int) -> Pairs:
    return sparsity_of(set(attention_kinds(attention_config, num_layers)), given or {})


def _write_sparsity(network: Architecture) -> Keys:
    settings = {}
    for name, value in network.sparsity:
        setting = name.partition(".")[2]  # KIND.SETTING
        settings[setting] = value
    return unless_default("sparsity_config", settings, {})


def _read_gmlp_width(width: int, attention_config: Sequence[Any] | None, num_layers: int) -> int:
    has_attention = "amlp" in attention_kinds(attention_config, num_layers)
    return width if has_attention else 0


# Factors: those of muP with `use_mup`, else the keys of their own, as which they are written.


def _attention_scale(
    multiplier: float | None,
    has_mup: bool,
    temperature: float,
    hidden_size: int,
    heads: int,
    head_dim: int | None,
) -> float:
    if has_mup:
        return 1.0 / (size_of_head(hidden_size, heads, head_dim) * temperature)
    return multiplier or 0.0


def _logit_multiplier(
    multiplier: float, has_mup: bool, temperature: float, base_hidden_size: int, hidden_size: int
) -> float:
    if has_mup:
        return base_hidden_size / hidden_size / temperature
    return multiplier


def _embedding_multiplier(multiplier: float, has_mup: bool, of_mup: float) -> float:
    return of_mup if has_mup else multiplier


# Residuals.


def _read_residual(is_parallel: bool, has_one_norm: bool, placement: str) -> str:
    if placement != "input" or not is_parallel:
        return RESIDUAL_OF_PLACEMENT[placement]
    return "parallel_one_norm" if has_one_norm else "parallel"


def _write_residual(network: Architecture) -> Keys:
    keys: dict[str, Any] = {"gpt_j_residual": network.parallel_residual}
    if network.residual == "parallel_one_norm":
        keys["gpt_j_tied"] = True
    for placement, residual in RESIDUAL_OF_PLACEMENT.items():
        if network.residual == residual and placement != "input":
            keys["norm_placement"] = placement
    return keys


# Bidirectional networks.


def _write_bidirectional(network: Architecture) -> Keys:
    return keys_if(network.bidirectional, objective="masked_lm")


def _default_token_types(sentence_head: bool) -> int:
    return 2 if sentence_head else 0


def _token_types(rows: int | None, sentence_head: bool) -> int:
    if rows is None:
        return _default_token_types(sentence_head)
    return rows


def _write_token_types(network: Architecture) -> Keys:
    return unless_default("num_tokentypes", network.token_types, _default_token_types(network.sentence_head))


def _write_sentence_head(network: Architecture) -> Keys:
    return keys_if(network.bidirectional and not network.sentence_head, bert_binary_head=False)


# Prompt.


def _read_prompt_tokens(given: SoftPromptSettings | Keys | None) -> int:
    settings = SoftPromptSettings.model_validate(given or {"enabled": False})
    if not settings.enabled:
        return 0
    return settings.num_tokens


def _write_prompt_tokens(network: Architecture) -> Keys:
    settings = {"enabled": True, "num_tokens": network.soft_prompt_tokens}
    return keys_if(network.soft_prompt_tokens > 0, soft_prompt_tuning=settings)


# Score head.

REWARD_MODEL: Final = "rm"
"""Value of `train_impl` for a network with a score head instead of a language model head."""


def _is_reward_model(train_impl: str) -> bool:
    return train_impl == REWARD_MODEL


def _of_logits(field: str, row: FieldKeys) -> FieldKeys:
    """Return the row of a field that has no effect in a network with a score head.

    Args:
        field: The field.
        row: Its row in other networks.
    """

    def read(train_impl: str, *values: Any) -> Any:
        if _is_reward_model(train_impl):
            return WITHOUT_LOGITS[field]
        return row.read(*values)

    return FieldKeys(("train_impl", *row.keys), read, row.write, ("train_impl", *row.later))


def _of_sublayer(field: str, row: FieldKeys) -> FieldKeys:
    """Return the row of a field that has no effect in a network whose blocks are all recurrent.

    Args:
        field: The field: one of attention, which no recurrent block has, or of the MLP, which some have.
        row: Its row in other networks.
    """
    is_of_mlp = field in WITHOUT_MLP
    neutral = (WITHOUT_MLP if is_of_mlp else WITHOUT_ATTENTION)[field]
    pattern = ("attention_config", "num_layers", "sliding_window_width")

    def has_effect(kinds: Iterable[str]) -> bool:
        return any(kind not in BLOCKS or BLOCKS[kind].keeps != "state" or uses(BLOCKS[kind]) for kind in kinds)

    def uses(kind: BlockKind) -> bool:
        return is_of_mlp and kind.two_sublayers

    def read(*values: Any) -> Any:
        *own, attention_config, num_layers, width = values
        if num_layers and not has_effect(paper_kinds(attention_config, num_layers, width)):
            return neutral
        return row.read(*own)

    def write(network: Architecture) -> Keys:
        return row.write(network) if has_effect(network.attention) else {}

    return FieldKeys((*row.keys, *pattern), read, write, (*row.later, *pattern))


_FIELDS_OF_LOGITS: Mapping[str, FieldKeys] = MappingProxyType(
    {
        "head_bias": FieldKeys(
            ("no_weight_tying", "use_bias_in_lm_head"),
            lambda untied, bias: untied and bias,
            lambda network: unless_default("use_bias_in_lm_head", network.head_bias, False),
        ),
        "tie_word_embeddings": FieldKeys(
            ("no_weight_tying",),
            lambda untied: not untied,
            lambda network: {"no_weight_tying": not network.tie_word_embeddings},
        ),
        "logit_multiplier": FieldKeys(
            ("logit_multiplier", "use_mup", "mup_output_temp", "mup_base_hidden_size", "hidden_size"),
            _logit_multiplier,
            lambda network: unless_default("logit_multiplier", network.logit_multiplier, 1.0),
            later=("logit_multiplier",),
        ),
        "logit_softcap": later_key("logit_softcap", 0.0),
    }
)

_FIELDS: Mapping[str, FieldKeys] = MappingProxyType(
    {
        "num_layers": copied("num_layers"),
        "hidden_size": copied("hidden_size"),
        "num_attention_heads": copied("num_attention_heads"),
        "num_kv_heads": FieldKeys(
            ("num_attention_heads", "num_kv_heads"),
            lambda heads, kv_heads: kv_heads or heads,
            lambda network: unless_default("num_kv_heads", network.num_kv_heads, network.num_attention_heads),
        ),
        "head_dim": FieldKeys(("hidden_size", "num_attention_heads", "head_dim"), size_of_head, _write_head_dim),
        "mlp_width": FieldKeys(("hidden_size", "activation", *MLP_SIZES), mlp_width, _write_mlp_width, MLP_SIZES),
        "activation": FieldKeys(("activation", "bias_gelu_fusion"), _read_activation, _write_activation),
        "norm": FieldKeys(("norm",), plain_norm, lambda network: {"norm": network.norm}),
        "norm_epsilon": FieldKeys(("norm", *EPSILONS), read_epsilon, _write_epsilon, EPSILONS[1:]),
        "qkv_bias": FieldKeys(("use_bias_in_attn_linear", "use_bias_in_qkv"), _read_qkv_bias, _write_qkv_bias),
        "attention_output_bias": FieldKeys(
            ("use_bias_in_attn_linear",),
            same,
            lambda network: unless_default("use_bias_in_attn_linear", network.attention_output_bias, True),
        ),
        "mlp_bias": FieldKeys(
            ("use_bias_in_mlp",),
            same,
            lambda network: unless_default("use_bias_in_mlp", network.mlp_bias, True),
        ),
        "qk_norm": FieldKeys(("use_qk_layernorm", "qk_norm"), _read_qk_norm, _write_qk_norm),
        "residual": FieldKeys(
            ("gpt_j_residual", "gpt_j_tied", "norm_placement"),
            _read_residual,
            _write_residual,
            later=("gpt_j_tied", "norm_placement"),
        ),
        "positions": FieldKeys(("pos_emb",), same, lambda network: {"pos_emb": network.positions}),
        "rotary_ndims": FieldKeys(
            ("pos_emb", "rotary_pct", "hidden_size", "num_attention_heads", "head_dim"),
            read_if(_is_rotary, 0, rotated_dimensions),
            _write_rotary_fraction,
            later=("head_dim",),
        ),
        "rotary_base": FieldKeys(("pos_emb", "rotary_emb_base"), read_if(_is_rotary, 0.0, float), _write_rotary_base),
        "rope_scaling": FieldKeys(
            ("pos_emb", "rope_scaling"),
            read_if(_is_rotary, (), rope_scaling_of),
            lambda network: unless_default("rope_scaling", rope_scaling_settings(network.rope_scaling), {}),
        ),
        "local_rotary_base": FieldKeys(
            ("rotary_emb_base_local",),
            lambda base: float(base or 0),
            lambda network: unless_default("rotary_emb_base_local", _whole(network.local_rotary_base), 0),
            later=("rotary_emb_base_local",),
        ),
        "unrotated_blocks": FieldKeys(
            ("no_rotary_layers",),
            lambda blocks: tuple(sorted(blocks)),
            lambda network: unless_default("no_rotary_layers", list(network.unrotated_blocks), []),
            later=("no_rotary_layers",),
        ),
        "learned_offset": FieldKeys(
            ("pos_emb", "opt_pos_emb_offset"),
            read_if(_is_learned, 0),
            lambda network: unless_default("opt_pos_emb_offset", network.learned_offset, 0),
        ),
        "rpe_buckets": FieldKeys(
            ("pos_emb", "rpe_num_buckets"),
            read_if(_is_relative, 0),
            lambda network: unless_default("rpe_num_buckets", network.rpe_buckets, 0),
        ),
        "rpe_max_distance": FieldKeys(
            ("pos_emb", "rpe_max_distance"),
            read_if(_is_relative, 0),
            lambda network: unless_default("rpe_max_distance", network.rpe_max_distance, 0),
        ),
        "max_positions": FieldKeys(
            ("max_position_embeddings", "seq_length"), _read_max_positions, _write_max_positions
        ),
        "attention": FieldKeys(
            ("attention_config", "num_layers", "sliding_window_width"),
            paper_kinds,
            _write_attention,
            later=("sliding_window_width",),
        ),
        "window": FieldKeys(
            ("attention_config", "num_layers", "sliding_window_width"),
            _read_window,
            lambda network: unless_default("sliding_window_width", network.window, 0),
        ),
        "latent_width": FieldKeys(
            ("kv_lora_rank",),
            lambda width: width or 0,
            lambda network: unless_default("kv_lora_rank", network.latent_width, 0),
            later=("kv_lora_rank",),
        ),
        "query_latent_width": FieldKeys(
            ("q_lora_rank",),
            lambda width: width or 0,
            lambda network: unless_default("q_lora_rank", network.query_latent_width, 0),
            later=("q_lora_rank",),
        ),
        "value_head_dim": FieldKeys(
            ("kv_lora_rank", "v_head_dim", "hidden_size", "num_attention_heads", "head_dim"),
            read_if(bool, 0, _value_head_dim),
            lambda network: unless_default("v_head_dim", network.value_head_dim, 0),
            later=("kv_lora_rank", "v_head_dim", "head_dim"),
        ),
        "sparsity": FieldKeys(("sparsity_config", "attention_config", "num_layers"), _read_sparsity, _write_sparsity),
        "gmlp_width": FieldKeys(
            ("gmlp_attn_dim", "attention_config", "num_layers"),
            _read_gmlp_width,
            lambda network: unless_default("gmlp_attn_dim", network.gmlp_width, 0),
        ),
        "soft_prompt_tokens": FieldKeys(("soft_prompt_tuning",), _read_prompt_tokens, _write_prompt_tokens),
        "attention_scale": FieldKeys(
            ("attention_multiplier", "use_mup", "mup_attn_temp", "hidden_size", "num_attention_heads", "head_dim"),
            _attention_scale,
            lambda network: unless_default("attention_multiplier", network.attention_scale, 0.0),
            later=("attention_multiplier", "head_dim"),
        ),
        "attention_softcap": later_key("attention_softcap", 0.0),
        "attention_sinks": later_key("attention_sinks", False),
        "attention_output_gate": later_key("attention_output_gate", False),
        "residual_multiplier": later_key("residual_multiplier", 1.0),
        "embedding_multiplier": FieldKeys(
            ("embedding_multiplier", "use_mup", "mup_embedding_mult"),
            _embedding_multiplier,
            lambda network: unless_default("embedding_multiplier", network.embedding_multiplier, 1.0),
            later=("embedding_multiplier",),
        ),
        "position_multiplier": FieldKeys(("use_mup", "mup_rp_embedding_mult"), read_if(bool, 1.0)),
        "bidirectional": FieldKeys(("objective",), _is_masked, _write_bidirectional, later=("objective",)),
        "token_types": FieldKeys(
            ("objective", "num_tokentypes", "bert_binary_head"),
            read_if(_is_masked, 0, _token_types),
            _write_token_types,
            later=("objective", "num_tokentypes", "bert_binary_head"),
        ),
        "embedding_norm": FieldKeys(
            ("embed_layernorm",),
            same,
            lambda network: unless_default("embed_layernorm", network.embedding_norm, False),
            later=("embed_layernorm",),
        ),
        "sentence_head": FieldKeys(
            ("objective", "bert_binary_head"),
            read_if(_is_masked, False),
            _write_sentence_head,
            later=("objective", "bert_binary_head"),
        ),
        "score_head": FieldKeys(
            ("train_impl",),
            _is_reward_model,
            lambda network: keys_if(network.score_head, train_impl=REWARD_MODEL),
            later=("train_impl",),
        ),
        "mtp_num_layers": later_key("mtp_num_layers", 0),
        **{name: _of_logits(name, row) for name, row in _FIELDS_OF_LOGITS.items()},
        **EXPERT_FIELDS,
        **RECURRENT_FIELDS,
    }
)
FIELD_KEYS: Mapping[str, FieldKeys] = MappingProxyType(
    {
        name: _of_sublayer(name, row) if name in WITHOUT_ATTENTION or name in WITHOUT_MLP else row
        for name, row in _FIELDS.items()
    }
)
"""Field of `Architecture` -> its keys. A field that is missing here keeps its default."""

ARCHITECTURE_KEYS: tuple[str, ...] = tuple(dict.fromkeys(key for row in FIELD_KEYS.values() for key in row.keys))
"""The YAML keys that decide an architecture; checkpoints store them."""
