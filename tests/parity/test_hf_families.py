"""Families: our network computes what transformers does with random weights, whose files come back bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from safetensors.torch import load_file

from neox.architecture import LayerPlan
from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert import choose_family, from_hf, to_hf
from neox.convert.hf_weights import HFWeights
from neox.convert.layouts import from_hf_layout
from neox.convert.verification import hf_logits, load_reference_model, single_rank_plan
from neox.errors import ConfigError
from neox.families import FAMILIES, Family, ModelSettings
from neox.model import GPT, Context
from neox.ops import ACTIVATIONS
from neox.plan import architecture_of, config_from_files
from neox.plan.rules import notes_without_effect
from tests.double_precision import DoublePrecision
from tests.errors import raises_naming
from tests.parity.family_configs import COMMON, SCALED, TEXT_FAMILIES, configs
from tests.transformers_versions import IS_4, compared_with_later, of_the_locked_version
from tests.unwritten import UnwrittenIsNaN

CONFIGS = Path(__file__).parents[2] / "configs"
TOKENS = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(1))
NEW = 6
PROMPTS = ([5, 17, 3, 44], [9, 61], [30, 8, 77, 12, 6, 41, 2])
LLAMA = {
    **COMMON,
    "initializer_range": 0.1,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "max_position_embeddings": 32,
}
GPT2 = {**COMMON, "initializer_range": 0.1, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
PARTIAL = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 12.0, 40.0],
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}
MAMBA2 = {
    **COMMON,
    "initializer_range": 0.1,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 6,
    "chunk_size": 8,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt_neox": {**NEOX, "rope_parameters": {"rope_type": "default", **PARTIAL}, "attention_bias": False},
    "gpt_neox-scaled": {**NEOX, "rope_parameters": {"rope_type": "linear", "factor": 2.0, **PARTIAL}},
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 6},
    "llama": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "llama-scaled": {**LLAMA, "tie_word_embeddings": True, "rope_parameters": SCALED},
    # `TOKENS` are longer than the length in training, the texts are shorter
    "llama-longrope": {**LLAMA, "rope_parameters": LONGROPE},
    "llama-dynamic": {
        **LLAMA,
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    },
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
    "mixtral": {**LLAMA, "num_local_experts": 4, "sliding_window": 5},
    "qwen2_moe": {
        **LLAMA,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 12,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        **LLAMA,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "olmoe": {**LLAMA, "num_experts": 6, "num_experts_per_tok": 3},
    "deepseek_v3": {
        **LLAMA,
        **DEEPSEEK,
        "q_lora_rank": 20,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": YARN,
    },
    "deepseek_v2": {**LLAMA, **DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "gpt_oss": {**LLAMA, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5},
}


WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FURTHER_CASES: dict[str, dict[str, Any]] = {
    "bloom": {**COMMON, "initializer_range": 0.1, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "bamba": {**LLAMA, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_chunk_size": 8},
    "cohere": {**LLAMA, "logit_scale": 0.5},
    "cohere2": {**LLAMA, **WINDOWS, "logit_scale": 0.5},
    "ernie4_5": {**LLAMA, "head_dim": 16, "use_bias": True},
    "falcon": {**LLAMA, "num_kv_heads": 2, "new_decoder_architecture": True},
    "gemma": {**LLAMA, "head_dim": 16},
    "gemma2": {**LLAMA, **WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24},
    "gemma3_text": {**LLAMA, **WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24},
    "glm": {**LLAMA, "head_dim": 16},
    "glm4": {**LLAMA, "head_dim": 16},
    "glm4_moe": {
        **LLAMA,
        "head_dim": 16,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
    },
    "granite": {**LLAMA, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.25},
    "mamba": {**COMMON, "initializer_range": 0.1, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6},
    "mamba2": MAMBA2,
    "olmo": LLAMA,
    "olmo3": {**LLAMA, **WINDOWS},
    "olmo_hybrid": {**LLAMA, **LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "opt": {**LLAMA, "ffn_dim": 72},
    "phi": LLAMA,
    "phi3": {**LLAMA, "sliding_window": 5},
    "qwen3_5_text": {**LLAMA, **LINEAR, "head_dim": 16},
    "qwen3_next": {
        **LLAMA,
        **LINEAR,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 12,
    },
    "smollm3": {**LLAMA, "no_rope_layer_interval": 2},
    "stablelm": LLAMA,
    "starcoder2": {**LLAMA, "sliding_window": 5},
}
"""Models of families that the fast tests draw at random."""


def transformers_model(model_type: str, **config: Any) -> Any:
    """A model of transformers with random weights, biases and scales."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).eval()
    if hasattr(model, "set_experts_implementation"):  # of transformers 5
        model.set_experts_implementation("eager")  # the default multiplies no matrices of odd widths
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def by_names_of_modules(weights: dict[str, torch.Tensor], family: Family) -> dict[str, torch.Tensor]:
    """Return weights by names without aliases, and OLMo Hybrid's convolutions whole: transformers cuts equal thirds."""
    found: dict[str, torch.Tensor] = {}
    for key, tensor in weights.items():
        for alias, ending in family.key_aliases.items():
            if key.endswith(alias):
                key = key.removesuffix(alias) + ending
        part = re.search(r"[qkv]_conv1d", key)
        if part is None:
            found[key] = tensor
        elif part[0] == "q_conv1d":
            names = (key.replace("q_conv1d", f"{name}_conv1d") for name in "qkv")
            found[key] = torch.cat([weights[name] for name in names])
    return found


def check_both_ways(
    directory: Path, model_type: str, tp_size: int = 1, *, fp32_gradients: bool = False, **config: Any
) -> None:
    """Save a model, import it, compare logits and gradients, export it again, and compare logits and tensors."""
    theirs = transformers_model(model_type, **config)
    theirs.save_pretrained(directory / "hf", max_shard_size="20KB")
    with torch.inference_mode():
        wanted = theirs(TOKENS).logits
    with UnwrittenIsNaN(), reads_of_tensors() as reads:
        imported = from_hf(directory / "hf", directory / "neox", model_parallel_size=tp_size)
    loaded = config_from_files([imported.config_file])
    layers = single_rank_plan(loaded, COMMON["vocab_size"]).layers
    reader = CheckpointReader(imported.checkpoint, layers)
    stored = weights_of(directory / "hf")
    check_each_element_once(stored, reads, reader)
    assert imported.parameters == sum(tensor.numel() for tensor in stored.values())
    assert loaded.tokenizer.padded_vocab_size == COMMON["vocab_size"]
    assert notes_without_effect(loaded) == []
    model = load_reference_model(reader, loaded)
    with torch.inference_mode():
        ours = model(TOKENS)
    bound = 1e-5 * max(1.0, wanted.abs().max().item())
    assert (ours - wanted).abs().max() < bound
    assert wanted.std() > 0.002  # logits that say something, with a factor of the logits, too
    assert our_texts(model) == their_texts(theirs)
    if fp32_gradients:
        check_gradients(model, theirs, FAMILIES[model_type], layers, 1e-5)
    # In fp32 a norm of numbers near 0 turns rounding into more: transformers' own gradients differ by 2e-4 from fp64.
    # A recomputation in a backward pass would be outside of it.
    model.double()
    theirs.double()
    with DoublePrecision(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("neox.parallel.rng.torch_checkpoint", lambda function, *args, **_: function(*args))
        check_gradients(model, theirs, FAMILIES[model_type], layers, 1e-6)
    with UnwrittenIsNaN():
        to_hf(imported.checkpoint, loaded, directory / "out", verify=False, hf_architecture=model_type)
    assert (hf_logits(directory / "out", TOKENS) - wanted).abs().max() < bound
    stored = by_names_of_modules(stored, FAMILIES[model_type])
    written = by_names_of_modules(weights_of(directory / "out"), FAMILIES[model_type])
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[key], written[key]) for key in stored)


@contextmanager
def reads_of_tensors() -> Iterator[Counter[str]]:
    """Count how often each tensor of a Hugging Face directory is read."""
    reads: Counter[str] = Counter()
    get = HFWeights.get

    def counted(self: HFWeights, key: str) -> torch.Tensor:
        reads[key] += 1
        return get(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFWeights, "get", counted)
        yield reads


def check_each_element_once(stored: dict[str, torch.Tensor], reads: Counter[str], reader: CheckpointReader) -> None:
    """Check that each tensor was read once, the embedding's shape before, and each of its elements written once."""
    assert reads.keys() == stored.keys()
    assert [key for key, number in reads.items() if number > 1] in ([], [next(iter(reads))])
    theirs = torch.cat([tensor.flatten() for tensor in stored.values()]).sort().values
    ours = torch.cat([reader.full(*place).flatten() for place in reader.items()]).sort().values
    assert torch.equal(ours, theirs)  # NaN equals nothing


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left, and which tokens are no padding."""
    width = max(map(len, PROMPTS))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    return tokens, mask


def our_texts(model: GPT) -> list[list[int]]:
    """Greedy continuations with a cache: the first pass takes the prompts, each further one a token."""
    tokens, mask = left_padded()
    cache = model.new_cache(len(PROMPTS), tokens.shape[1] + NEW)
    cache.reset(mask.shape[1] - mask.sum(1))
    found = []
    with torch.inference_mode():
        for _ in range(NEW):
            tokens = model(tokens, Context(cache=cache))[:, -1:].argmax(-1)
            found.append(tokens)
    return torch.cat(found, 1).tolist()


def their_texts(model: Any) -> list[list[int]]:
    """Return their greedy continuations of a left-padded batch.

    Their Mamba-2 mixers set padding to zero before the input projection, whose bias then enters the convolution: with
    biases what they write depends on the padding. There each text is continued by itself.
    """
    tokens, mask = left_padded()
    settings = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "eos_token_id": None}
    biased = {"mamba2": "use_bias", "bamba": "mamba_proj_bias"}.get(model.config.model_type, "")
    if getattr(model.config, biased, False):
        texts = []
        for row, counts in zip(tokens, mask, strict=True):
            own = row[counts.bool()].unsqueeze(0)
            texts += model.generate(own, pad_token_id=0, **settings)[:, own.shape[1] :].tolist()
        return texts
    made = model.generate(tokens, attention_mask=mask, pad_token_id=0, **settings)
    return made[:, tokens.shape[1] :].tolist()


def gradients_in_files(name: str, grad: torch.Tensor, family: Family) -> dict[str, torch.Tensor]:
    """Return a gradient by the names in files, where each expert has weights of its own."""
    if family.model_type == "olmo_hybrid" and name.endswith(".conv1d.weight"):
        parts = zip("qkv", grad.tensor_split(3), strict=True)  # which are joined again, wherever they were cut
        return {name.replace("conv1d", f"{part}_conv1d"): of_part for part, of_part in parts}
    module, _, kind = name.rpartition(".experts.")
    if not module or family.model_type == "gpt_oss":  # whose files hold stacks, too
        is_router = family.model_type == "mixtral" and name.endswith("mlp.gate.weight")
        return {name.replace("mlp.gate", "block_sparse_moe.gate") if is_router else name: grad}
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    if family.model_type == "mixtral":
        module = module.replace("mlp", "block_sparse_moe")
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[kind]
    found = {}
    for expert, stacked in enumerate(grad):
        for part, of_part in zip(names, stacked.chunk(len(names)), strict=True):
            found[f"{module}.experts.{expert}.{part}.weight"] = of_part
    return found


def check_gradients(model: GPT, theirs: Any, family: Family, layers: LayerPlan, bound: float) -> None:
    """Compare the gradients of one batch's mean loss with those of transformers, relative to each tensor's largest."""
    model.zero_grad()
    theirs.zero_grad()
    labels = TOKENS.roll(-1, 1)
    torch.nn.functional.cross_entropy(theirs(TOKENS).logits.flatten(0, 1), labels.flatten()).backward()
    weights = torch.full(labels.shape, 1 / labels.numel())
    model(TOKENS, loss=lambda output: output.head.cross_entropy(output.hidden, labels, weights)).backward()
    found = {}
    for name, parameter in theirs.named_parameters():
        found |= gradients_in_files(name, parameter.grad, family)
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    for alias, key in family.key_aliases.items():  # files have other keys than modules
        if alias in found:
            found[key] = found[alias]
    for mapping in family.mappings(layers):
        if mapping.name.endswith("selection_bias"):  # which no gradient changes
            continue
        parts = []
        for key in mapping.keys:
            grad = found[key]
            assert grad is not None, key
            parts.append(grad)
        wanted = from_hf_layout(parts, mapping.source, model.architecture)
        grad = ours[f"sequential.{mapping.layer}.{mapping.name}"]
        assert grad is not None, mapping
        assert grad.dtype == wanted.dtype
        assert (grad - wanted).abs().max() < bound * max(1.0, wanted.abs().max().item()), mapping


ROPE_PARAMETERS = ("gpt_neox", "gpt_neox-scaled", "llama-scaled", "llama-longrope", "llama-dynamic", "deepseek_v3")
STACKED_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2")


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers_comes_in_and_goes_out(tmp_path, name):
    if IS_4 and name in (*ROPE_PARAMETERS, *STACKED_EXPERTS):
        pytest.skip("transformers 4 does not read `rope_parameters`, and has a module for each expert")
    check_both_ways(tmp_path, name.partition("-")[0], tp_size=2, fp32_gradients=True, **CASES[name])


@pytest.mark.parametrize("name", ["mamba", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_networks_without_heads_of_attention_come_in_on_two_ranks(tmp_path, name):
    check_both_ways(tmp_path, name, tp_size=2, **FURTHER_CASES[name])


def check_random_models(directory: Path, model_type: str, examples: int) -> None:
    attempts = iter(range(1_000))

    @given(config=configs(model_type))
    @settings(
        max_examples=examples,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],  # a smaller example costs minutes
    )
    def check(config: dict[str, Any]) -> None:
        check_both_ways(directory / str(next(attempts)), model_type, **config)

    check()


@compared_with_later
@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_two_random_models_come_in_and_go_out(tmp_path, model_type):
    check_random_models(tmp_path, model_type, 2)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_models_of_any_sizes_come_in_and_go_out(tmp_path, model_type):
    check_random_models(tmp_path, model_type, 30)


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    """An export of each case, in the family that is chosen for its architecture."""
    made = {}
    for name, config in {**CASES, **FURTHER_CASES}.items():
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
    settings = {{"attn_implementation": "eager"}}  # its other kernels leave out Gemma 2's bound of scores
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **settings)
    assert not info["missing_keys"] and not info["unexpected_keys"], (name, info)
    with torch.inference_mode():
        found[name] = model.eval()(tokens).logits
torch.save(found, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(packages)})
    found = torch.load(tmp_path / "logits.pt")
    differences = {}
    for name, path in exports.items():
        difference = (found[name] - hf_logits(path, TOKENS)).abs().max().item()
        if not difference < 1e-5:
            differences[name] = difference
    assert differences == {}


@of_the_locked_version
def test_the_clamped_activation_is_that_of_gpt_oss():
    from transformers import AutoConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = {"num_local_experts": 2, "hidden_size": 4, "intermediate_size": 64}
    experts = GptOssExperts(AutoConfig.for_model("gpt_oss", **sizes))
    x = 10 * torch.randn(3, 128, generator=torch.Generator().manual_seed(1))  # many beyond both limits
    value, gate = x.chunk(2, dim=-1)
    wanted = experts._apply_gate(torch.stack((gate, value), dim=-1).flatten(1))
    assert torch.equal(ACTIVATIONS["clamped_swiglu"](x), wanted)
    assert (value.abs() > 7).any()
    assert (gate > 7).any()


def test_a_family_that_is_forced_refuses_what_it_cannot_express(tmp_path):
    transformers_model("qwen3", **CASES["qwen3"]).save_pretrained(tmp_path / "hf")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox")
    with raises_naming(ConfigError, "llama", "qk_norm: head", lines=2):
        to_hf(imported.checkpoint, config_from_files([imported.config_file]), tmp_path / "out", hf_architecture="llama")


def test_a_model_goes_out_as_what_it_came_in_as(tmp_path):
    transformers_model("mistral", **{**LLAMA, "sliding_window": None}).save_pretrained(tmp_path / "hf")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox")
    config = config_from_files([imported.config_file])
    assert choose_family(config) is FAMILIES["mistral"]
    assert choose_family(config, "llama") is FAMILIES["llama"]
    flat = config.to_flat()
    del flat["hf_architecture"]
    assert choose_family(NeoXConfig.from_flat(flat)) is FAMILIES["llama"]
    with raises_naming(ConfigError, "mistral", "qk_norm: head", lines=3):
        choose_family(NeoXConfig.from_flat({**flat, "hf_architecture": "mistral", "qk_norm": "head"}))
    with raises_naming(ConfigError, "hf_architecture", "mistrall"):
        choose_family(NeoXConfig.from_flat({**flat, "hf_architecture": "mistrall"}))


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
