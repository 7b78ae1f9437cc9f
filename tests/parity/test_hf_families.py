"""Families: our network computes what transformers does with random weights, whose files come back bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from neox.checkpoint import CheckpointReader
from neox.convert import from_hf, to_hf
from neox.convert.verification import hf_logits, load_reference_model, single_rank_plan
from neox.errors import ConfigError
from neox.families import FAMILIES, ModelSettings
from neox.plan import architecture_of, config_from_files
from neox.plan.rules import notes_without_effect
from tests.errors import raises_naming

CONFIGS = Path(__file__).parents[2] / "configs"
TOKENS = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(1))
COMMON = {"vocab_size": 90, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "max_position_embeddings": 32,
}
GPT2 = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
PARTIAL = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "gpt_neox": {**NEOX, "rope_parameters": {"rope_type": "default", **PARTIAL}, "attention_bias": False},
    "gpt_neox-scaled": {**NEOX, "rope_parameters": {"rope_type": "linear", "factor": 2.0, **PARTIAL}},
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 6},
    "llama": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "llama-scaled": {**LLAMA, "tie_word_embeddings": True, "rope_parameters": SCALED},
    "mistral": {**LLAMA, "sliding_window": 5, "hidden_size": 36, "head_dim": 8},
    "qwen2": {
        **LLAMA,
        "intermediate_size": 128,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3": {**LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "olmo2": {**LLAMA, "num_key_value_heads": 4},
}


@st.composite
def llama_sizes(draw: st.DrawFn, *, free_width: bool = False, free_heads: bool = True) -> dict[str, Any]:
    """Sizes of a model like Llama: any number of heads that share keys, any widths."""
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 9))
    heads = kv_heads * group
    config = {
        **COMMON,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": draw(st.integers(2, 60)) if free_width else heads * head_dim,
        "intermediate_size": draw(st.integers(1, 90)),
        "max_position_embeddings": draw(st.integers(24, 100)),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "relu", "sigmoid"])),
        "rope_parameters": draw(rotary()),
    }
    if free_width:
        config["head_dim"] = head_dim
    elif free_heads and draw(st.booleans()):
        config["head_dim"] = 2 * draw(st.integers(1, 9))
    return config


@st.composite
def rotary(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "llama3"]))
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": float(draw(st.integers(100, 1_000_000)))}
    if kind != "default":
        settings["factor"] = draw(st.sampled_from([1.5, 4.0]))
    return {**SCALED, **settings} if kind == "llama3" else settings


@st.composite
def gpt2_sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a GPT-2, or of a GPT-J."""
    heads, head_dim = draw(st.integers(1, 5)), 2 * draw(st.integers(1, 8))
    return {
        **COMMON,
        "n_embd": heads * head_dim,
        "n_layer": draw(st.integers(1, 3)),
        "n_head": heads,
        "n_positions": draw(st.integers(24, 120)),
        "n_inner": draw(st.none() | st.integers(1, 90)),
        "activation_function": draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu", "mish"])),
        "tie_word_embeddings": draw(st.booleans()),
        "rotary_dim": 2 * draw(st.integers(1, head_dim // 2)),
    }


def with_booleans(sizes: st.SearchStrategy[dict[str, Any]], *keys: str) -> st.SearchStrategy[dict[str, Any]]:
    choices = st.fixed_dictionaries({key: st.booleans() for key in keys})
    return st.builds(lambda config, chosen: {**config, **chosen}, sizes, choices)


def windowed(sizes: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    windows = {"sliding_window": st.integers(1, 30), "max_window_layers": st.integers(0, 3)}
    chosen = st.fixed_dictionaries(windows)
    return st.builds(lambda config, window: {**config, **window}, with_booleans(sizes, "use_sliding_window"), chosen)


def untied(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "tie_word_embeddings": False}


SIZES = {
    "gpt2": gpt2_sizes(),
    "gptj": gpt2_sizes().map(untied),
    "llama": with_booleans(llama_sizes(), "attention_bias", "mlp_bias"),
    "mistral": windowed(llama_sizes(free_width=True)),
    "qwen2": windowed(llama_sizes()),
    "qwen3": windowed(with_booleans(llama_sizes(free_width=True), "attention_bias")),
    "olmo2": with_booleans(llama_sizes(free_heads=False), "attention_bias"),
}


def transformers_model(model_type: str, **config: Any) -> Any:
    """A model of transformers with random weights, biases and scales."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def check_both_ways(directory: Path, model_type: str, tp_size: int = 1, **config: Any) -> None:
    """Save a model, import it, compare logits, export it again, and compare logits and tensors."""
    theirs = transformers_model(model_type, **config)
    theirs.save_pretrained(directory / "hf", max_shard_size="20KB")
    with torch.inference_mode():
        wanted = theirs(TOKENS).logits
    imported = from_hf(directory / "hf", directory / "neox", model_parallel_size=tp_size)
    loaded = config_from_files([imported.config_file])
    reader = CheckpointReader(imported.checkpoint, single_rank_plan(loaded, COMMON["vocab_size"]).layers)
    assert imported.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert loaded.tokenizer.padded_vocab_size == COMMON["vocab_size"]
    assert notes_without_effect(loaded) == []
    with torch.inference_mode():
        ours = load_reference_model(reader, loaded)(TOKENS)
    bound = 1e-5 * max(1.0, wanted.abs().max().item())
    assert (ours - wanted).abs().max() < bound
    assert wanted.std() > 0.05  # logits that say something
    to_hf(imported.checkpoint, loaded, directory / "out", verify=False, hf_architecture=model_type)
    assert (hf_logits(directory / "out", TOKENS) - wanted).abs().max() < bound
    before, after = weights_of(directory / "hf"), weights_of(directory / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers_comes_in_and_goes_out(tmp_path, name):
    check_both_ways(tmp_path, name.partition("-")[0], tp_size=2, **CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SIZES)
def test_models_of_any_sizes_come_in_and_go_out(tmp_path, model_type):
    attempts = iter(range(1_000))

    @given(config=SIZES[model_type])
    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    def check(config: dict[str, Any]) -> None:
        check_both_ways(tmp_path / str(next(attempts)), model_type, **config)

    check()


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    """An export of each case, in the family that is chosen for its architecture."""
    made = {}
    for name, config in CASES.items():
        directory = tmp_path_factory.mktemp(name)
        transformers_model(name.partition("-")[0], **config).save_pretrained(directory / "hf")
        imported = from_hf(directory / "hf", directory / "neox")
        loaded = config_from_files([imported.config_file])
        made[name] = to_hf(imported.checkpoint, loaded, directory / "out", verify=False).output
    return made


@pytest.mark.slow
def test_the_family_of_an_architecture_is_found(exports):
    found = {name: json.loads((path / "config.json").read_text())["model_type"] for name, path in exports.items()}
    assert found == {name: name.partition("-")[0] for name in exports}


@pytest.mark.slow
def test_transformers_4_computes_the_same_logits(exports, tmp_path):
    """`make test-all` installs it beside the environment; the script runs with it in front of the other version."""
    packages = Path(sys.prefix) / "transformers-4"
    if not (packages / "transformers").is_dir():
        pytest.skip("transformers 4 is not installed (`make transformers-4`)")
    torch.save(TOKENS, tmp_path / "tokens.pt")
    script = f"""
import torch, transformers
assert transformers.__version__.startswith("4.57"), transformers.__version__
tokens, found = torch.load({str(tmp_path / "tokens.pt")!r}), {{}}
for name, path in {[(name, str(path)) for name, path in exports.items()]!r}:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], (name, info)
    with torch.inference_mode():
        found[name] = model.eval()(tokens).logits
torch.save(found, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(packages)})
    found = torch.load(tmp_path / "logits.pt")
    for name, path in exports.items():
        assert (found[name] - hf_logits(path, TOKENS)).abs().max() < 1e-5, name


def test_a_family_that_is_forced_refuses_what_it_cannot_express(tmp_path):
    transformers_model("qwen3", **CASES["qwen3"]).save_pretrained(tmp_path / "hf")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox")
    with raises_naming(ConfigError, "llama", "qk_norm: head", lines=2):
        to_hf(imported.checkpoint, config_from_files([imported.config_file]), tmp_path / "out", hf_architecture="llama")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model_type"), [("qwen/2.5-0.5B", "qwen2"), ("qwen/3-0.6B", "qwen3")])
def test_random_weights_of_a_published_shape_come_in(tmp_path, name, model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    published = config_from_files([name], conf_dir=CONFIGS)
    rows = published.tokenizer.padded_vocab_size
    assert rows is not None
    architecture = architecture_of(published)
    hf = FAMILIES[model_type].config_json(architecture, ModelSettings("bf16", 0.02, 0.0, 0.0, rows, 2, 1))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size="300MB")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox", model_parallel_size=2)
    assert imported.parameters == single_rank_plan(published, rows).layers.numel == model.num_parameters()
    loaded = config_from_files([imported.config_file])
    assert architecture_of(loaded) == architecture
    reader = CheckpointReader(imported.checkpoint, single_rank_plan(loaded, rows).layers)
    up, gate = reader.full(2, "mlp.dense_h_to_4h.weight").chunk(2)
    assert torch.equal(up, model.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(gate, model.model.layers[0].mlp.gate_proj.weight)
