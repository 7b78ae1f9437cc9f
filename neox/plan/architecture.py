"""Derivation of the `Architecture`, its layer plan and attention kernels from the YAML's keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from neox.architecture import (
    ACTIVATIONS,
    ATTENTION,
    NORMS,
    Architecture,
    AttentionImpl,
    LayerPlan,
    Lora,
    add_adapters,
    build_layer_plan,
    rope_scaling_of,
    sparsity_of,
)
from neox.architecture.choices import TRANSFORMER_ENGINE_NORMS
from neox.config.neox_config import NeoXConfig
from neox.config.sections.base import Section
from neox.config.sections.model import ModelConfig, SoftPromptSettings
from neox.errors import ConfigError
from neox.plan.mlp_width import mlp_width

_SHAPE = '`attention_config` should be a list such as [[["flash"], "all"]] or [[["global", "flash"], 6]]'
FLASH: Final = "flash"
"""The attention kind that names a kernel: on paper it is `global`, or `sliding_window` with a window."""
SLIDING_WINDOW: Final = "sliding_window"


class _Field(NamedTuple):
    """How one field of `Architecture` follows from keys of the YAML.

    Attributes:
        needed: Keys without which a checkpoint says nothing about the field.
        derive: Values of `needed` and `later` -> the field's value.
        later: Keys that did not exist yet when older checkpoints were written, which all have their defaults.
    """

    needed: tuple[str, ...]
    derive: Callable[..., Any]
    later: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, in the order in which `derive` takes them."""
        return (*self.needed, *self.later)


def attention_kinds(attention_config: Sequence[Any] | None, num_layers: int) -> tuple[str, ...]:
    """Return NeoX's attention kind of each block, with `attention_config` expanded as gpt-neox does.

    If it describes more blocks than there are, all of one kind, the rest is left out: so `num_layers` alone shortens a
    published file.

    Raises:
        ConfigError: It has another shape.
    """
    kinds = described_kinds(attention_config, num_layers)
    return kinds[:num_layers] if len(set(kinds)) == 1 else kinds


def described_kinds(attention_config: Sequence[Any] | None, num_layers: int) -> tuple[str, ...]:
    """Return the kinds that `attention_config` lists, which may be more or fewer than there are blocks.

    Raises:
        ConfigError: It has another shape.
    """
    if attention_config is None:
        return ("global",) * num_layers
    if all(isinstance(kind, str) for kind in attention_config):
        return tuple(attention_config)
    kinds: list[str] = []
    for item in attention_config:
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise ConfigError(_SHAPE)
        pattern, times = item
        if not isinstance(pattern, (list, tuple)) or not pattern or not all(isinstance(k, str) for k in pattern):
            raise ConfigError(_SHAPE)
        if times == "all":
            if num_layers % len(pattern):
                raise ConfigError(
                    f"`attention_config` repeats {len(pattern)} kinds over {num_layers} layers: no multiple"
                )
            times = num_layers // len(pattern)
        if not isinstance(times, int) or isinstance(times, bool) or times < 1:
            raise ConfigError(_SHAPE)
        kinds += list(pattern) * min(times, 10_000)
    return tuple(kinds)


def _attention(attention_config: Sequence[Any] | None, num_layers: int, width: int | None) -> tuple[str, ...]:
    """Return the kinds on paper. As in gpt-neox a window applies to `flash` blocks; without a list, to all."""
    flash = SLIDING_WINDOW if width else "global"
    if attention_config is None:
        return (flash,) * num_layers
    return tuple(flash if kind == FLASH else kind for kind in attention_kinds(attention_config, num_layers))


def _sparsity(given: Mapping[str, Any] | None, attention_config: Sequence[Any] | None, num_layers: int) -> Any:
    return sparsity_of(set(attention_kinds(attention_config, num_layers)), given or {})


def _window(attention_config: Sequence[Any] | None, num_layers: int, width: int | None) -> int:
    return width or 0 if SLIDING_WINDOW in _attention(attention_config, num_layers, width) else 0


def size_of_head(hidden_size: int, heads: int, head_dim: int | None) -> int:
    """Return the width of an attention head."""
    return head_dim or hidden_size // heads


def rotated_dimensions(positions: str, rotary_pct: float, hidden_size: int, heads: int, head_dim: int | None) -> int:
    """Return the dimensions of each head that are rotated: 0 without rotary positions."""
    return int(size_of_head(hidden_size, heads, head_dim) * rotary_pct) if positions == "rotary" else 0


def _residual(parallel: bool, tied: bool, placement: str) -> str:
    if placement != "input":
        return next(residual for residual, name in _PLACEMENTS.items() if name == placement)
    return ("parallel_one_norm" if tied else "parallel") if parallel else "sequential"


def _is_masked(objective: str) -> bool:
    return objective == "masked_lm"


def _if_masked(_: int, objective: str, value: bool) -> bool:
    return value and _is_masked(objective)


def _token_types(_: int, objective: str, rows: int | None, binary_head: bool) -> int:
    return (2 * binary_head if rows is None else rows) if _is_masked(objective) else 0


def _prompt_tokens(given: SoftPromptSettings | Mapping[str, Any] | None) -> int:
    settings = SoftPromptSettings.model_validate(given or {"enabled": False})
    return settings.num_tokens if settings.enabled else 0


def _if_mup(mup: bool, multiplier: float) -> float:
    return multiplier if mup else 1.0


def _same(value: Any) -> Any:
    return value


def _plain_norm(name: str) -> str:
    """Return the norm that Transformer Engine's computes."""
    return TRANSFORMER_ENGINE_NORMS.get(name, name)


_EPSILONS: Final = ("layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon")


def _epsilon_key(norm: str) -> str:
    return NORMS[_plain_norm(norm)].epsilon_key


_PLACEMENTS: Mapping[str, str] = MappingProxyType({"sublayer_output_norm": "output", "post_norm": "post"})
_MLP_SIZES: Final = ("intermediate_size", "expansion_factor", "mlp_multiple_of", "mlp_width")

_FIELDS: Mapping[str, _Field] = MappingProxyType(
    {
        "num_layers": _Field(("num_layers",), _same),
        "hidden_size": _Field(("hidden_size",), _same),
        "num_attention_heads": _Field(("num_attention_heads",), _same),
        "num_kv_heads": _Field(("num_attention_heads", "num_kv_heads"), lambda heads, kv_heads: kv_heads or heads),
        "head_dim": _Field(("hidden_size", "num_attention_heads", "head_dim"), size_of_head),
        "mlp_width": _Field(("hidden_size", "activation"), mlp_width, later=_MLP_SIZES),
        "activation": _Field(
            ("activation", "bias_gelu_fusion"), lambda name, fused: "gelu_tanh" if fused and name == "gelu" else name
        ),
        "norm": _Field(("norm",), _plain_norm),
        "norm_epsilon": _Field(
            ("norm", _EPSILONS[0]),
            lambda norm, *epsilons: dict(zip(_EPSILONS, epsilons, strict=True))[_epsilon_key(norm)],
            later=_EPSILONS[1:],
        ),
        "qkv_bias": _Field(
            ("use_bias_in_attn_linear", "use_bias_in_qkv"), lambda both, own: both if own is None else own
        ),
        "attention_output_bias": _Field(("use_bias_in_attn_linear",), _same),
        "mlp_bias": _Field(("use_bias_in_mlp",), _same),
        "head_bias": _Field(("no_weight_tying", "use_bias_in_lm_head"), lambda untied, bias: untied and bias),
        "qk_norm": _Field(("use_qk_layernorm", "qk_norm"), lambda neox, own: "neox" if neox else own),
        "positions": _Field(("pos_emb",), _same),
        "rotary_ndims": _Field(
            ("pos_emb", "rotary_pct", "hidden_size", "num_attention_heads"), rotated_dimensions, later=("head_dim",)
        ),
        "rotary_base": _Field(
            ("pos_emb", "rotary_emb_base"), lambda positions, base: float(base) if positions == "rotary" else 0.0
        ),
        "rope_scaling": _Field(
            ("pos_emb", "rope_scaling"),
            lambda positions, scaling: rope_scaling_of(scaling if positions == "rotary" else None),
        ),
        "learned_offset": _Field(
            ("pos_emb", "opt_pos_emb_offset"), lambda positions, offset: offset if positions == "learned" else 0
        ),
        "rpe_buckets": _Field(
            ("pos_emb", "rpe_num_buckets"), lambda positions, number: number if positions == "rpe" else 0
        ),
        "rpe_max_distance": _Field(
            ("pos_emb", "rpe_max_distance"), lambda positions, longest: longest if positions == "rpe" else 0
        ),
        "max_positions": _Field(("max_position_embeddings", "seq_length"), lambda longest, length: longest or length),
        "attention": _Field(("attention_config", "num_layers"), _attention, later=("sliding_window_width",)),
        "window": _Field(("attention_config", "num_layers", "sliding_window_width"), _window),
        "sparsity": _Field(("sparsity_config", "attention_config", "num_layers"), _sparsity),
        "attention_scale": _Field(
            ("use_mup", "mup_attn_temp", "hidden_size", "num_attention_heads"),
            lambda mup, temperature, *head: 1.0 / (size_of_head(*head) * temperature) if mup else 0.0,
            later=("head_dim",),
        ),
        "logit_multiplier": _Field(
            ("use_mup", "mup_output_temp", "mup_base_hidden_size", "hidden_size"),
            lambda mup, temperature, base, hidden: base / hidden / temperature if mup else 1.0,
        ),
        "embedding_multiplier": _Field(("use_mup", "mup_embedding_mult"), _if_mup),
        "position_multiplier": _Field(("use_mup", "mup_rp_embedding_mult"), _if_mup),
        "gmlp_width": _Field(
            ("gmlp_attn_dim", "attention_config", "num_layers"),
            lambda width, kinds, layers: width if "amlp" in attention_kinds(kinds, layers) else 0,
        ),
        "soft_prompt_tokens": _Field(("soft_prompt_tuning",), _prompt_tokens),
        "residual": _Field(("gpt_j_residual",), _residual, later=("gpt_j_tied", "norm_placement")),
        "tie_word_embeddings": _Field(("no_weight_tying",), lambda untied: not untied),
        # A checkpoint that stores a size was written by a program that trains causal networks alone, or says otherwise.
        "bidirectional": _Field(("hidden_size",), lambda _, objective: _is_masked(objective), later=("objective",)),
        "token_types": _Field(
            ("hidden_size",), _token_types, later=("objective", "num_tokentypes", "bert_binary_head")
        ),
        "embedding_norm": _Field(("hidden_size",), _if_masked, later=("objective", "embed_layernorm")),
        "sentence_head": _Field(("hidden_size",), _if_masked, later=("objective", "bert_binary_head")),
    }
)
ARCHITECTURE_KEYS = tuple(dict.fromkeys(key for field in _FIELDS.values() for key in field.keys))
"""The YAML keys that decide an architecture; checkpoints store them."""


def architecture_keys(field: str) -> tuple[str, ...]:
    """Return the YAML keys that a field of `Architecture` follows from; none for one that no key decides."""
    return _FIELDS[field].keys if field in _FIELDS else ()


def architecture_settings(config: NeoXConfig) -> dict[str, Any]:
    """Return `ARCHITECTURE_KEYS` with their values, as checkpoints store them."""
    values = {key: config.value(key) for key in ARCHITECTURE_KEYS}
    return {k: v.model_dump(exclude_none=True) if isinstance(v, Section) else v for k, v in values.items()}


def architecture_of(config: NeoXConfig) -> Architecture:
    """Return the architecture of a configuration that `static_problems` finds nothing wrong with."""
    settings = architecture_settings(config)
    return Architecture(
        **{name: field.derive(*(settings[key] for key in field.keys)) for name, field in _FIELDS.items()}
    )


def yaml_keys(architecture: Architecture) -> dict[str, Any]:
    """Return the YAML keys of an architecture: `architecture_of` is the inverse, as far as keys can express it."""
    keys: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "seq_length": architecture.max_length,
        "max_position_embeddings": architecture.max_positions,
        "norm": architecture.norm,
        _epsilon_key(architecture.norm): architecture.norm_epsilon,
        "pos_emb": architecture.positions,
        "no_weight_tying": not architecture.tie_word_embeddings,
        "gpt_j_residual": architecture.parallel_residual,
        "activation": "gelu" if architecture.activation == "gelu_tanh" else architecture.activation,
        "bias_gelu_fusion": architecture.activation == "gelu_tanh",
    }
    if architecture.positions == "rotary":
        keys |= {"rotary_pct": architecture.rotary_fraction, "rotary_emb_base": int(architecture.rotary_base)}
    if architecture.rope_scaling:
        keys["rope_scaling"] = dict(architecture.rope_scaling)
    if architecture.positions == "rpe":
        keys |= {"rpe_num_buckets": architecture.rpe_buckets, "rpe_max_distance": architecture.rpe_max_distance}
    if architecture.learned_offset:
        keys["opt_pos_emb_offset"] = architecture.learned_offset
    if set(architecture.attention) != {"global"}:
        keys["attention_config"] = list(architecture.attention)
    if architecture.gmlp_width:
        keys["gmlp_attn_dim"] = architecture.gmlp_width
    if architecture.sparsity:
        keys["sparsity_config"] = {key.partition(".")[2]: value for key, value in architecture.sparsity}
    gated = ACTIVATIONS[architecture.activation].width_factor > 1
    optional = {
        "num_kv_heads": (architecture.num_kv_heads, architecture.num_attention_heads),
        "head_dim": (architecture.head_dim, architecture.hidden_size // architecture.num_attention_heads),
        # What a gated width follows from depends on other keys, so it is always written.
        "mlp_width": (architecture.mlp_width, None if gated else 4 * architecture.hidden_size),
        "gpt_j_tied": (architecture.residual == "parallel_one_norm", False),
        "norm_placement": (_PLACEMENTS.get(architecture.residual, "input"), "input"),
        "objective": ("masked_lm" if architecture.bidirectional else "causal_lm", "causal_lm"),
        "bert_binary_head": (architecture.sentence_head or not architecture.bidirectional, True),
        "num_tokentypes": (architecture.token_types, 2 * architecture.sentence_head),
        "embed_layernorm": (architecture.embedding_norm, False),
        "use_bias_in_attn_linear": (architecture.attention_output_bias, True),
        "use_bias_in_qkv": (architecture.qkv_bias, architecture.attention_output_bias),
        "use_bias_in_mlp": (architecture.mlp_bias, True),
        "use_bias_in_lm_head": (architecture.head_bias, False),
        "use_qk_layernorm": (architecture.qk_norm == "neox", False),
        "qk_norm": (architecture.qk_norm, "neox" if architecture.qk_norm == "neox" else "none"),
        "sliding_window_width": (architecture.window, 0),
    }
    return keys | {key: value for key, (value, default) in optional.items() if value != default}


def saved_architecture(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint's settings tell about its architecture.

    Args:
        settings: YAML key -> value, as far as a checkpoint (gpt-neox's, too) stores them; other keys are ignored.

    Returns:
        Field of `Architecture` -> value, without the fields that need a key which is missing or not understood.
    """
    found = {}
    for name, field in _FIELDS.items():
        if all(key in settings for key in field.needed):
            with suppress(ConfigError, TypeError, ValueError, ZeroDivisionError, KeyError):
                found[name] = field.derive(*(_saved(settings, key) for key in field.keys))
    return found


def _saved(settings: Mapping[str, Any], key: str) -> Any:
    """Return a checkpoint's value of a key; the default of one that did not exist yet when it was written."""
    return settings[key] if key in settings else ModelConfig.model_fields[key].default


def setting_differences(
    saved: Mapping[str, Any], config: NeoXConfig, *, finetune: bool | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which a checkpoint's network is another one.

    Args:
        saved: YAML key -> value, as far as the checkpoint stores them; only these are compared.
        config: The configuration that loads it.
        finetune: True for settings that may differ in fine-tuning, False for those that may not, None for both.

    Returns:
        Key -> (the checkpoint's value, this configuration's).
    """
    wanted, settings = architecture_of(config), architecture_settings(config)
    return {
        key: (_saved(saved, key), settings[key])
        for difference in wanted.differences(saved_architecture(saved), finetune=finetune)
        for key in _FIELDS[difference.field].keys
        if _saved(saved, key) != settings[key]
    }


def attention_impls(config: NeoXConfig) -> tuple[AttentionImpl, ...]:
    """Return the kernel of each block's attention: flash (which takes masks), or a softmax, fused or not."""
    model = config.model
    fusion = (
        "scaled_masked_softmax_fusion" if _is_masked(model.objective) else "scaled_upper_triang_masked_softmax_fusion"
    )
    plain: AttentionImpl = "fused" if config.value(fusion) else "eager"
    given = attention_kinds(model.attention_config, model.num_layers or 0)
    on_paper = _attention(model.attention_config, model.num_layers or 0, model.sliding_window_width)
    masked = ATTENTION.keys() - {"global"}  # a mask is a tensor, which the fused softmax does not take
    return tuple(
        FLASH if kind == FLASH or paper in masked else plain for kind, paper in zip(given, on_paper, strict=True)
    )


def layer_plan(config: NeoXConfig, padded_vocab_size: int) -> LayerPlan:
    """Return the layer plan of a configuration that `static_problems` finds nothing wrong with."""
    layers = build_layer_plan(
        architecture_of(config), padded_vocab_size, head_parallelism=config.model.output_layer_parallelism
    )
    return with_adapters(layers, config)


def with_adapters(layers: LayerPlan, config: NeoXConfig) -> LayerPlan:
    """Return the layers with the adapters that `lora` asks for."""
    keys = config.training.lora
    return layers if keys is None else add_adapters(layers, Lora(keys.r, keys.alpha, keys.target))


def padded_vocabulary(config: NeoXConfig, vocab_size: int, tp_size: int) -> int:
    """Return the rows of the embedding over `tp_size` tensor ranks: vocab_size rounded up, or padded_vocab_size."""
    multiple = config.model.make_vocab_size_divisible_by * tp_size
    return config.tokenizer.padded_vocab_size or -(-vocab_size // multiple) * multiple
