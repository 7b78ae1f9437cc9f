"""Every key of transformers' and peft's configuration classes: it is read, refused by name, or known to have no effect.

A key is read if another value gives another network, another setting or another file. A version of transformers or peft
with a further key fails here until somebody has decided what it means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neox.architecture.rope_scaling import ROPE_SCALINGS, rope_scaling_problem
from neox.config import NeoXConfig
from neox.convert.hf_directory import ADAPTER_CONFIG
from neox.convert.peft_adapters import WITHOUT_EFFECT, read_peft_adapter
from neox.convert.verification import single_rank_plan
from neox.errors import ConversionError
from neox.families import FAMILIES, Family
from neox.plan import yaml_keys
from tests.field.hf_models import write_adapter, write_llama
from tests.transformers_versions import of_the_locked_version

pytestmark = of_the_locked_version

_TRAINING = "only in training, where the YAML's keys decide"
_DERIVED = "transformers computes it from other keys, whatever the file says"
_OUTPUTS = "what a call of the model returns"
_INITIAL = "initial weights"
_INITIAL_STEPS = ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")
_LABELS = "names of labels; with architectures of ...ForSequenceClassification their number is read"
NO_EFFECT: Mapping[str, str] = {
    "_name_or_path": "where the file came from",
    "transformers_version": "who wrote the file",
    "model_type": "chooses the family, whose keys these are",
    "id2label": _LABELS,
    "label2id": _LABELS,
    "problem_type": _LABELS,
    "output_attentions": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "output_router_logits": _OUTPUTS,
    "return_dict": _OUTPUTS,
    "use_cache": "speed of generation",
    "pad_token_id": "padding of batches, which attention does not see; imports carry it in generation_config.json",
    "chunk_size_feed_forward": "memory of BERT's MLP, which it computes in pieces",
    "pretraining_tp": "order of sums",
    "slow_but_exact": "order of sums",
    "reorder_and_upcast_attn": "precision of sums",
    "router_aux_loss_coef": _TRAINING,
    "classifier_dropout": _TRAINING,
    "embd_pdrop": _TRAINING,
    "embedding_dropout": _TRAINING,
    "qk_head_dim": _DERIVED,
    "num_nextn_predict_layers": "modules behind the network, for training only",
}
"""Key of any family -> why it cannot change the function of a causal network or an encoder."""
NO_EFFECT_IN: Mapping[str, Mapping[str, str]] = {
    "gpt_neox": {"is_decoder": "GPT-NeoX is causal with both values"},
    "cohere2": {"head_dim": _DERIVED},
    "deepseek_v2": {"head_dim": "width of the rotary part, which qk_rope_head_dim gives"},
    "deepseek_v3": {"head_dim": "width of the rotary part, which qk_rope_head_dim gives"},
    "qwen2_moe": dict.fromkeys(("sliding_window", "max_window_layers"), "use_sliding_window must be off"),
    "qwen3_moe": {"sliding_window": "use_sliding_window must be off"},
    "gemma3_text": {"_sliding_window_pattern": "transformers reads sliding_window_pattern, which is refused or read"},
    "mamba": {
        **dict.fromkeys((*_INITIAL_STEPS, "time_step_scale", "time_step_init_scheme"), _INITIAL),
        **dict.fromkeys(("use_mambapy", "use_associative_scan"), "how the recurrence is computed"),
        "residual_in_fp32": "precision of sums",
        "intermediate_size": _DERIVED,
    },
    "mamba2": {
        **dict.fromkeys(_INITIAL_STEPS, _INITIAL),
        "chunk_size": "how the recurrence is computed",
        "residual_in_fp32": "precision of sums",
        "time_step_rank": "kept by transformers, and used by nothing",
    },
    "olmo_hybrid": dict.fromkeys(
        [f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")], _INITIAL
    ),
    "bamba": {
        "mamba_chunk_size": "how the recurrence is computed",
        "num_logits_to_keep": _OUTPUTS,
        "z_loss_coefficient": _TRAINING,
    },
    "gpt2": dict.fromkeys(
        (
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ),
        "a head of GPT2DoubleHeadsModel only",
    ),
}
"""Family -> key -> why it has no effect there."""

_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
CONTEXTS: Mapping[str, list[dict[str, Any]]] = {
    "bamba": [{"attn_layer_indices": [1, 3]}],
    "deepseek_v2": [{"num_experts_per_tok": 2}],
    "falcon": [{"new_decoder_architecture": True}],
    "gemma3_text": [{"layer_types": None}],
    "glm4_moe": [{"n_group": 4, "topk_group": 2}],
    "phi3": [{"max_position_embeddings": 8192, "rope_parameters": _LONGROPE}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 64, "layer_types": None, "max_window_layers": 3}],
    "qwen3": [{"use_sliding_window": True, "sliding_window": 64, "layer_types": None, "max_window_layers": 3}],
    "smollm3": [{"no_rope_layers": None}, {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}],
}
"""Family -> values of further keys, in which another key has an effect. None removes a key."""


def defaults_of(model_type: str) -> dict[str, Any]:
    """Return the `config.json` of transformers' defaults."""
    config = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    if model_type == "deepseek_v2":
        config["num_experts_per_tok"] = 2  # has no default
    return config


def bases_of(model_type: str) -> Iterator[dict[str, Any]]:
    """Yield `config.json`s in which some key has an effect."""
    yield defaults_of(model_type)
    for context in CONTEXTS.get(model_type, []):
        merged = {**defaults_of(model_type), **context}
        yield {key: value for key, value in merged.items() if value is not None or key not in context}


def others(value: Any) -> list[Any]:
    """Return further values of a key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2 or 2, value + 1, 1]
    if isinstance(value, float):
        return [value * 2 or 0.5, value / 2 + 0.01]
    if isinstance(value, str):
        return ["other", "relu", "silu", "float16"]
    if isinstance(value, list):
        return [value[::-1], value[:-1], [1]]
    if isinstance(value, dict):
        nested = [{**value, key: other} for key, item in value.items() for other in others(item)]
        return [*nested, {}]
    return [True, 2, 0.5, "float16", ["LlamaForSequenceClassification"], {"a": 1}]


def outcome(family: Family, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what is read from a `config.json`, or why it is refused."""
    try:
        return family.read_config(deepcopy(config))
    except ConversionError as error:
        return (str(error),)


def is_read(family: Family, base: Mapping[str, Any], key: str) -> bool:
    """Return whether another value of a key changes what is read, or is refused by name."""
    before = outcome(family, base)
    for value in others(base.get(key)):
        after = outcome(family, {**base, key: value})
        if after != before and (len(after) == 2 or key in after[0]):
            return True
    return False


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_a_family(model_type):
    family = FAMILIES[model_type]
    bases = list(bases_of(model_type))
    for base in bases:
        assert len(outcome(family, base)) == 2, outcome(family, base)
    without = {**NO_EFFECT, **NO_EFFECT_IN.get(model_type, {})}
    keys = set(defaults_of(model_type))
    unread = [key for key in keys - without.keys() if not any(is_read(family, base, key) for base in bases)]
    assert unread == []


@pytest.mark.parametrize("model_type", FAMILIES)
def test_further_names_of_keys(model_type):
    """`attribute_map` of transformers' class: a file with the other name means the same, or is refused."""
    family = FAMILIES[model_type]
    config = defaults_of(model_type)
    for name, key in CONFIG_MAPPING[model_type].attribute_map.items():
        if isinstance(getattr(CONFIG_MAPPING[model_type], key, None), property):
            continue  # computed from other keys: transformers refuses a file that gives it
        value = others(config[key])[0]
        without = {other: item for other, item in config.items() if other != key}
        found = outcome(family, {**without, name: value})
        assert len(found) == 1 or found == outcome(family, {**config, key: value}), name
        if len(found) == 2 and key not in NO_EFFECT:
            assert len(outcome(family, {**config, name: value})) == 1, f"{name} contradicts {key}"


def test_no_reason_without_a_key():
    """A reason for a key that no class has any more can go."""
    known = {key for model_type in FAMILIES for key in defaults_of(model_type)}
    assert NO_EFFECT.keys() <= known
    for model_type, reasons in NO_EFFECT_IN.items():
        assert reasons.keys() <= defaults_of(model_type).keys()


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "longrope", "llama3"])
def test_every_setting_of_rotary_scaling(kind):
    """A setting of transformers' is known for its type, or refused by name if it is none of that type."""
    from transformers.modeling_rope_utils import RopeParameters

    scaling = ROPE_SCALINGS[kind]
    settings: dict[str, Any] = dict.fromkeys(scaling.required, 2.0)
    settings |= {name: [1.0] * 4 for name in ("short_factor", "long_factor") if name in settings}
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for name in RopeParameters.__annotations__.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"}:
        if name in scaling.required or name in scaling.optional:
            continue
        problem = rope_scaling_problem({"rope_type": kind, **settings, name: 3.0})
        assert problem is not None, name
        assert name in problem


def test_every_key_of_an_adapter(tmp_path):
    """peft's LoraConfig: a key changes the adapter, is refused by name, or has no effect, for a reason."""
    from peft import LoraConfig

    architecture = write_llama(tmp_path / "hf", 257)
    family = FAMILIES["llama"]
    network, _ = family.read_config(json.loads((architecture / "config.json").read_text()))
    layers = single_rank_plan(NeoXConfig.from_flat(yaml_keys(network)), 257).layers
    defaults = json.loads(json.dumps(LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]).to_dict(), default=list))
    defaults["peft_type"] = "LORA"

    def read(**changes):
        directory = write_adapter(tmp_path / "adapter", **{**defaults, **changes})
        try:
            adapter = read_peft_adapter(directory, layers, family)
        except ConversionError as error:
            return str(error)
        tensors = [part for state in adapter.tensors.values() for part in state.values()]
        return adapter.lora, adapter.dropout, [part.tolist() for part in tensors]

    plain = read()
    assert not isinstance(plain, str), plain
    special = {"rank_pattern": [{"q_proj": 1}], "alpha_pattern": [{"q_proj": 1}], "init_lora_weights": ["pissa"]}
    unread = []
    for key in defaults.keys() - WITHOUT_EFFECT.keys():
        found = [read(**{key: value}) for value in special.get(key, others(defaults[key]))]
        named = [item for item in found if not isinstance(item, str) or key in item or ADAPTER_CONFIG in item]
        if all(item == plain for item in named):
            unread.append(key)
    assert unread == []
    assert WITHOUT_EFFECT.keys() - {"runtime_config"} <= defaults.keys()
