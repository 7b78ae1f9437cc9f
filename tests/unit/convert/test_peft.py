"""LoRA adapters and the package peft: the same logits merged, as an adapter, and imported."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from neox.architecture import Lora, add_adapters
from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf, write_peft_adapter
from neox.convert.verification import load_reference_model, single_rank_plan
from neox.errors import ConversionError
from neox.plan import config_from_files
from neox.tokenizer import build_tokenizer, identify, train_tokenizer, write_tokenizer_identity
from tests.errors import raises_naming
from tests.parity.test_hf_families import CASES, transformers_model
from tests.transformers_versions import loads_adapters_of_experts, needs_rope_parameters, needs_stacked_experts
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint
from tests.unit.convert.test_to_hf import SIZES

ALL = ("dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value")
CONFIG = NeoXConfig.from_flat({**SIZES, "gpt_j_residual": True})
TOKENS = torch.arange(20).view(1, 20) * 3 % 90


@pytest.fixture(scope="module", autouse=True)
def peft():
    """The package, which takes seconds to import: only in the process that runs these tests."""
    return pytest.importorskip("peft", reason="peft (requirements/requirements-dev.txt) is not installed")


@pytest.fixture
def base(tmp_path):
    """The Hugging Face directory of a model without adapters."""
    layers = single_rank_plan(CONFIG, 96).layers
    directory = write_checkpoint(tmp_path / "plain" / "global_step3", layers, seeded_weights(layers))
    to_hf(directory, CONFIG, tmp_path / "base", verify=False)
    return tmp_path / "base"


def logits_of(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def our_logits(checkpoint):
    layers = single_rank_plan(CONFIG, 96).layers
    with torch.no_grad():
        return load_reference_model(CheckpointReader(checkpoint, layers), CONFIG)(TOKENS)


@pytest.mark.parametrize(("targets", "tp_size"), [(ALL, 2), (("query_key_value",), 1)])
def test_a_trained_adapter_loads_in_peft_as_the_merged_export(peft, tmp_path, base, targets, tp_size):
    from transformers import AutoModelForCausalLM

    plain, lora = single_rank_plan(CONFIG, 96).layers, Lora(4, 8.0, targets)
    weights = {**seeded_weights(add_adapters(plain, lora), 1), **seeded_weights(plain)}
    state = {"model_identity": {"lora": asdict(lora)}}
    checkpoint = write_checkpoint(
        tmp_path / "tuned" / "global_step3", add_adapters(plain, lora), weights, tp_size=tp_size, client_state=state
    )
    config = CONFIG.updated({"lora": {"r": 4, "alpha": 8.0, "target": list(targets)}})
    write_peft_adapter(checkpoint, config, tmp_path / "adapter", base=str(base))
    result = to_hf(checkpoint, config, tmp_path / "merged", verify=True)
    assert result.check.difference < 1e-5
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    alone = AutoModelForCausalLM.from_pretrained(base)
    assert (logits_of(alone) - merged).abs().max() > 0.01
    adapted = logits_of(peft.PeftModel.from_pretrained(alone, tmp_path / "adapter"))
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_logits(checkpoint), merged, rtol=0, atol=1e-5)

    back = from_hf(base, tmp_path / "back", adapter_dir=tmp_path / "adapter", model_parallel_size=2)
    torch.testing.assert_close(our_logits(back.checkpoint), merged, rtol=0, atol=1e-5)


def families_model(name, directory):
    """Save a tiny model of a family with random weights, and return it."""
    model_type = name.partition("-")[0]
    if name in ("bert", "megatron-bert"):
        model = bert_model(name)
    else:
        model = transformers_model(model_type, **CASES[name])
    model.save_pretrained(directory)
    return model


def adapted_logits(model, tokens):
    with torch.no_grad():
        result = model.eval()(tokens)
    return result.prediction_logits if "prediction_logits" in result else result.logits


def bert_model(model_type):
    from transformers import AutoConfig, AutoModelForPreTraining

    torch.manual_seed(5)
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(model_type, **sizes, intermediate_size=72, max_position_embeddings=32)
    return AutoModelForPreTraining.from_config(config).eval()


BLOCK_MODULES = {
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gpt2": ["c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"],
    "bert": r".*layer\.\d+\..*(query|key|value|dense)",
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
    "latent": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
ADAPTED = [
    pytest.param("gpt_neox", BLOCK_MODULES["gpt_neox"], marks=needs_rope_parameters),
    *((name, BLOCK_MODULES[name]) for name in ("gpt2", "gptj", "bert", "llama")),
    ("megatron-bert", BLOCK_MODULES["bert"]),
    pytest.param("llama-scaled", BLOCK_MODULES["llama"], marks=needs_rope_parameters),
    *((name, BLOCK_MODULES["llama"]) for name in ("mistral", "qwen2", "qwen3", "olmo2")),
    ("llama", ["q_proj", "v_proj"]),  # peft's default
    ("gpt2", ["attn.c_proj"]),
    ("gptj", ["k_proj", "fc_out"]),
    ("bert", ["intermediate.dense"]),
    pytest.param("deepseek_v3", BLOCK_MODULES["latent"], marks=needs_rope_parameters),
    pytest.param("deepseek_v2", ["q_proj", *BLOCK_MODULES["latent"][2:]], marks=needs_stacked_experts),
]
SETTINGS = {"use_rslora": True, "rank_pattern": {"v_proj": 2, "c_proj": 5}, "alpha_pattern": {"q_proj": 3}}


ATTENTION_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTED_EXPERTS = [
    ("mixtral", ATTENTION_MODULES, STACKS),
    ("mixtral", None, STACKS[:1]),
    ("qwen2_moe", ["o_proj", "shared_expert.down_proj"], STACKS[1:]),
    ("gpt_oss", ["v_proj"], STACKS),
]


@needs_stacked_experts
@loads_adapters_of_experts
@pytest.mark.parametrize(("name", "modules", "parameters"), ADAPTED_EXPERTS, ids=str)
def test_adapters_of_experts_come_in_and_go_out(peft, tmp_path, name, modules, parameters):
    """Each expert has the adapter that peft means by the order of its rows and columns (peft#3009)."""
    check_round_trip(peft, tmp_path, name, modules, target_parameters=parameters)


@pytest.mark.parametrize(("name", "modules"), ADAPTED, ids=str)
def test_adapters_of_every_family_come_in_and_go_out(peft, tmp_path, name, modules):
    check_round_trip(peft, tmp_path, name, modules, **(SETTINGS if isinstance(modules, list) else {}))


def check_round_trip(peft, tmp_path, name, modules, **more):
    """Logits with peft's adapters, with ours, and with the adapters that we write are the same."""
    model = families_model(name, tmp_path / "base")
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=modules, init_lora_weights=False, **more)
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    with adapted.disable_adapter():
        plain = adapted_logits(adapted, TOKENS)
    wanted = adapted_logits(adapted, TOKENS)
    assert (wanted - plain).abs().max() > 0.01
    bound = 1e-5 * max(1.0, wanted.abs().max().item())

    imported = from_hf(tmp_path / "base", tmp_path / "here", adapter_dir=tmp_path / "adapter", model_parallel_size=2)
    config = config_from_files([imported.config_file])
    assert config.training.lora is not None
    plan = single_rank_plan(config, 90)
    with torch.no_grad():
        ours = load_reference_model(CheckpointReader(imported.checkpoint, plan.layers), config)(TOKENS)
    assert (ours - wanted).abs().max() < bound

    model_type = name if name.endswith("bert") else name.partition("-")[0]
    write_peft_adapter(
        imported.checkpoint, config, tmp_path / "again", base=str(tmp_path / "base"), hf_architecture=model_type
    )
    fresh = families_model(name, tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "again")
    assert (adapted_logits(loaded, TOKENS) - wanted).abs().max() < bound

    again = from_hf(tmp_path / "base", tmp_path / "third", adapter_dir=tmp_path / "again", model_parallel_size=2)
    assert config_from_files([again.config_file]).training.lora == config.training.lora  # the rank does not grow


_MAMBA = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": None}
MIXERS = {"mamba": _MAMBA, "mamba2": {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2}}


@pytest.mark.parametrize(
    ("name", "targets", "refused"),
    [
        ("mamba", ["in_proj", "x_proj"], None),
        ("mamba", ["dt_proj", "in_proj"], "dt_proj"),
        ("mamba2", ["in_proj", "out_proj"], "out_proj"),
    ],
)
def test_adapters_that_have_no_effect_in_peft_are_not_written(peft, tmp_path, name, targets, refused):
    """transformers#30316: Mamba's code reads these layers' weights and passes their adapters by."""
    base = transformers_model(name, **MIXERS[name])
    base.save_pretrained(tmp_path / "base")
    imported = from_hf(tmp_path / "base", tmp_path / "here")
    config = config_from_files([imported.config_file])
    plain, lora = single_rank_plan(config, 90).layers, Lora(2, 4.0, tuple(targets))
    adapters = seeded_weights(add_adapters(plain, lora), 1)
    reader = CheckpointReader(imported.checkpoint, plain)
    weights = {**adapters, **{key: reader.full(*key) for key in seeded_weights(plain)}}
    checkpoint = write_checkpoint(
        tmp_path / "tuned" / "global_step3",
        add_adapters(plain, lora),
        weights,
        client_state={"model_identity": {"lora": asdict(lora)}},
    )
    config = config.updated({"lora": {"r": 2, "alpha": 4.0, "target": targets}})
    if refused is not None:
        with raises_naming(ConversionError, refused):
            write_peft_adapter(checkpoint, config, tmp_path / "adapter", base="base")
        return
    write_peft_adapter(checkpoint, config, tmp_path / "adapter", base="base")
    with torch.no_grad():
        merged = load_reference_model(CheckpointReader(checkpoint, single_rank_plan(config, 90).layers), config)(TOKENS)
    adapted = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)


def test_queries_and_values_with_different_a_become_one_product_of_their_ranks(peft, tmp_path):
    model = families_model("llama", tmp_path / "base")
    settings = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    imported = from_hf(tmp_path / "base", tmp_path / "here", adapter_dir=tmp_path / "adapter")
    lora = config_from_files([imported.config_file]).training.lora
    assert (lora.r, lora.alpha, lora.target) == (6, 16.0, ("dense", "query_key_value"))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"modules_to_save": ["embed_in"]}, "modules_to_save"),
        ({"target_modules": ["embed_in"]}, "embed_in"),
        ({"r": 5}, "rank"),
        ({"rank_pattern": {"query_key_value": 2}}, "rank"),
    ],
)
def test_other_adapters_are_refused_by_name(peft, tmp_path, base, change, name):
    from transformers import AutoModelForCausalLM

    settings = peft.LoraConfig(r=3, target_modules=["query_key_value"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with raises_naming(ConversionError, tmp_path / "adapter", name):
        from_hf(base, tmp_path / "imported", adapter_dir=tmp_path / "adapter")


def test_missing_and_unknown_tensors_are_named(peft, tmp_path, base):
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    settings = peft.LoraConfig(r=3, target_modules=["query_key_value"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)
    last = [key for key in whole if ".layers.1." in key]
    assert len(last) == 2
    for left_out in (last, last[:1]):
        save_file({key: value for key, value in whole.items() if key not in left_out}, file)
        with raises_naming(ConversionError, file, "layers.1.attention.query_key_value.lora_"):
            from_hf(base, tmp_path / "imported", adapter_dir=tmp_path / "adapter")
    other = "base_model.model.embed_out.lora_A.weight"
    save_file({**whole, other: torch.zeros(3, 32)}, file)
    with raises_naming(ConversionError, file, other):
        from_hf(base, tmp_path / "imported", adapter_dir=tmp_path / "adapter")
    narrow = {key: value[:, :4].contiguous() if "lora_A" in key else value for key, value in whole.items()}
    save_file(narrow, file)
    with raises_naming(ConversionError, file, [96, 4], [96, 32]):
        from_hf(base, tmp_path / "imported", adapter_dir=tmp_path / "adapter")


def test_an_adapter_of_another_tokenizer_is_refused(tmp_path):
    files = []
    for name in "ab":
        files.append(train_tokenizer([f"{name}x {name}{name}y " * 9], 264, tmp_path / f"{name}.json")[0])
    own = build_tokenizer("HFTokenizer", files[0])
    lora = Lora(4, 8.0, ("dense",))
    layers = add_adapters(single_rank_plan(CONFIG, 96).layers, lora)
    state = {"model_identity": {"lora": asdict(lora)}}
    checkpoint = write_checkpoint(tmp_path / "tuned", layers, seeded_weights(layers), client_state=state)
    write_tokenizer_identity(checkpoint, identify(own, files[0]))
    keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(files[1]), "lora": {"r": 4, "alpha": 8.0}}
    other = CONFIG.updated(keys)
    with raises_naming(ConversionError, *files):
        write_peft_adapter(checkpoint, other, tmp_path / "adapter", base="x")
    write_peft_adapter(checkpoint, other.updated({"allow_other_tokenizer": True}), tmp_path / "adapter", base="x")


def test_a_checkpoint_without_adapters_has_none_to_write(tmp_path, base):
    with raises_naming(ConversionError, tmp_path / "plain", "lora"):
        write_peft_adapter(tmp_path / "plain", CONFIG, tmp_path / "adapter", base="x")
