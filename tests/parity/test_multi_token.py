"""Multi-token prediction of DeepSeek-V3 and GLM-4.5 against transformers: import, training, export bit for bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf, write_peft_adapter
from neox.convert.verification import load_reference_model, single_rank_plan
from neox.errors import ConversionError
from neox.model import Context
from neox.objectives import build_objective, evaluated_objective, with_tokens_ahead
from tests.errors import raises_naming
from tests.losses import score_rows
from tests.transformers_versions import needs_mtp_model

pytestmark = needs_mtp_model

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 72,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 2,
    "topk_group": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "torch_dtype": "float32",
}
FAMILIES = {
    "deepseek_v3": {
        "kv_lora_rank": 12,
        "q_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
}
TOKENS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
LABELS = torch.cat((TOKENS[:, 1:], torch.tensor([[5], [7]])), 1)


def published(directory: Path, model_type: str, depths: int) -> tuple[Any, Any]:
    """Write a random model in the form of the published ones; return transformers' network and modules."""
    import transformers
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, **{**SIZES, **FAMILIES[model_type], "num_nextn_predict_layers": depths}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    modules = MtpModel(model, depths)
    for network in (model, modules):
        network.set_experts_implementation("eager")
        for name, parameter in network.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
            elif parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.2)
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, 0.0, 0.1)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for depth, module in enumerate(modules.layers):
        prefix = f"model.layers.{config.num_hidden_layers + depth}."
        tensors |= {f"{prefix}{ours}": tensor for ours, tensor in as_published(module).items()}
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return model, modules


def as_published(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of one of transformers' modules under the names of DeepSeek's files."""
    tensors = {}
    for name, tensor in module.state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"mlp.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"mlp.experts.{expert}.up_proj.weight"] = up.contiguous()
        elif name == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                tensors[f"mlp.experts.{expert}.down_proj.weight"] = down.contiguous()
        else:
            tensors[name] = tensor.contiguous()
    return tensors


def theirs(model: Any, modules: Any, depths: int) -> list[Tensor]:
    """Return the sum of cross entropies of each depth over all positions with a label, divided by all positions.

    Position i of depth k gets the vectors of token i + k, as in transformers' drafts.
    """
    hidden = model.model(TOKENS).last_hidden_state
    losses = []
    for depth in range(1, depths + 1):
        kept = TOKENS.shape[1] - depth
        positions = torch.arange(kept).expand(len(TOKENS), -1)
        hidden = modules.forward_layer(depth - 1, hidden[:, :kept], positions, None, input_ids=TOKENS[:, depth:])
        logits = modules._project_to_logits(hidden)
        losses.append(F.cross_entropy(logits.flatten(0, 1), LABELS[:, depth:].flatten(), reduction="sum") / 24)
    return losses


@pytest.mark.parametrize("model_type", FAMILIES)
def test_imported_modules_are_those_of_transformers_and_go_out_bit_for_bit(tmp_path: Path, model_type: str) -> None:
    depths = 2
    source = tmp_path / "hf"
    model, modules = published(source, model_type, depths)
    result = from_hf(source, tmp_path / "ours", mtp_num_layers=depths)
    keys = yaml.safe_load(result.config_file.read_text())
    assert keys["mtp_num_layers"] == depths
    config = NeoXConfig.from_flat(keys)
    plan = single_rank_plan(config, 90)
    ours = load_reference_model(CheckpointReader(result.checkpoint, plan.layers), config)
    objective = build_objective(plan)
    weights = torch.ones(TOKENS.shape) / TOKENS.numel()
    batch = with_tokens_ahead({"tokens": TOKENS, "labels": LABELS, "loss_mask": weights}, depths, "loss_mask")
    ours.requires_grad_(True)
    network_alone = evaluated_objective(objective)
    # in one forward pass, so that the network's own gradients cancel exactly in the difference below
    scores, of_network = ours(
        TOKENS,
        Context(),
        lambda output: [one.scores(output, one.targets(batch)) for one in (objective, network_alone)],
    )
    expected = torch.stack(theirs(model, modules, depths)).mean()
    assert score_rows(objective, scores)["mtp_loss"] == pytest.approx(expected.item(), rel=1e-5)

    # Gradients: the embedding's, which is used by the network and each module, and of the first projection.
    (ours_words, ours_projection) = torch.autograd.grad(
        scores[0] - of_network[0],
        [ours.stage.layers[0].word_embeddings.weight, ours.stage.layers[7].eh_proj.weight],
    )
    factor = plan.config.training.mtp_loss_scaling_factor
    (words, projection) = torch.autograd.grad(
        factor * expected, [model.model.embed_tokens.weight, modules.layers[0].eh_proj.weight]
    )
    for got, wanted in ((ours_words, words), (ours_projection, projection)):
        assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()

    exported = tmp_path / "again"
    written = to_hf(tmp_path / "ours", config, exported, verify=True)
    assert written.check is not None
    before = load_file(source / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((exported / "config.json").read_text())["num_nextn_predict_layers"] == depths


def our_scores(checkpoint: Path, config: NeoXConfig) -> dict[str, float | None]:
    """Return the scores of a checkpoint of ours on the tokens."""
    plan = single_rank_plan(config, 90)
    ours = load_reference_model(CheckpointReader(checkpoint, plan.layers), config)
    objective = build_objective(plan)
    batch = {"tokens": TOKENS, "labels": LABELS, "loss_mask": torch.ones(TOKENS.shape) / TOKENS.numel()}
    if config.model.mtp_num_layers:
        batch = with_tokens_ahead(batch, config.model.mtp_num_layers, "loss_mask")
    with torch.no_grad():
        scores = ours(TOKENS, Context(), lambda output: objective.scores(output, objective.targets(batch)))
    return score_rows(objective, scores)


ADAPTED = {
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "glm4_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_of_modules_come_in_and_go_out_next_to_those_of_peft(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str
) -> None:
    """peft's models lack the modules and pass over their tensors; here they are read, trained, written and merged."""
    peft = pytest.importorskip("peft", reason="peft (requirements/requirements-dev.txt) is not installed")
    source = tmp_path / "hf"
    model, modules = published(source, model_type, 1)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=ADAPTED[model_type], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    of_network = load_file(weights)
    without = from_hf(source, tmp_path / "fresh", adapter_dir=tmp_path / "adapter", mtp_num_layers=1)
    with torch.no_grad():
        expected = torch.stack(theirs(model, modules, 1)).mean()
    config = NeoXConfig.from_flat(yaml.safe_load(without.config_file.read_text()))
    assert our_scores(without.checkpoint, config)["mtp_loss"] == pytest.approx(expected.item(), rel=1e-5)

    peft.inject_adapter_in_model(settings, modules.layers[0])
    of_module = {}
    for name, tensor in modules.layers[0].state_dict().items():
        if ".lora_" in name:
            name = name.removeprefix("mtp_block.").replace(".default", "")
            of_module[f"base_model.model.model.layers.2.{name}"] = tensor.contiguous()
    assert len(of_module) == 2 * len(ADAPTED[model_type])
    save_file({**of_network, **of_module}, weights, metadata={"format": "pt"})
    with torch.no_grad():
        expected = torch.stack(theirs(model, modules, 1)).mean()
    imported = from_hf(source, tmp_path / "ours", adapter_dir=tmp_path / "adapter", mtp_num_layers=1)
    config = NeoXConfig.from_flat(yaml.safe_load(imported.config_file.read_text()))
    found = our_scores(imported.checkpoint, config)
    assert found["mtp_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert found["mtp_loss"] != pytest.approx(our_scores(without.checkpoint, config)["mtp_loss"], rel=1e-3)

    # Out again: as an adapter that peft loads, and merged into the weights of both.
    write_peft_adapter(imported.checkpoint, config, tmp_path / "again", base=str(source))
    assert load_file(tmp_path / "again" / "adapter_model.safetensors").keys() == {**of_network, **of_module}.keys()
    again = from_hf(source, tmp_path / "third", adapter_dir=tmp_path / "again", mtp_num_layers=1)
    assert our_scores(again.checkpoint, config) == pytest.approx(found, rel=1e-6)
    with torch.no_grad():
        wanted = model(TOKENS).logits
        base = type(model).from_pretrained(source, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "again")
        assert (loaded(TOKENS).logits - wanted).abs().max() < 1e-5 * wanted.abs().max()
    to_hf(imported.checkpoint, config, tmp_path / "merged", verify=False)
    module = "model.layers.2.self_attn.o_proj"
    a, b = (of_module[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    plain = load_file(source / "model.safetensors")[f"{module}.weight"]
    merged = load_file(tmp_path / "merged" / "model.safetensors")[f"{module}.weight"]
    torch.testing.assert_close(merged, plain + 5 / 3 * b @ a)

    with caplog.at_level(logging.WARNING):
        left_out = from_hf(source, tmp_path / "network", adapter_dir=tmp_path / "again")
    assert "adapters of multi-token prediction" in caplog.text
    config = NeoXConfig.from_flat(yaml.safe_load(left_out.config_file.read_text()))
    assert our_scores(left_out.checkpoint, config)["lm_loss"] == pytest.approx(found["lm_loss"], rel=1e-6)


def test_modules_stay_out_unless_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "hf"
    published(source, "glm4_moe", 1)
    with caplog.at_level(logging.WARNING):
        result = from_hf(source, tmp_path / "ours")
    assert "--mtp-num-layers 1" in caplog.text
    config = NeoXConfig.from_flat(yaml.safe_load(result.config_file.read_text()))
    to_hf(tmp_path / "ours", config, tmp_path / "again", verify=False)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not any(".layers.2." in key for key in load_file(tmp_path / "again" / "model.safetensors"))

    with raises_naming(ConversionError, "num_nextn_predict_layers: 1"):
        from_hf(source, tmp_path / "two", mtp_num_layers=2)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.embed_tokens.weight"][3, 4] += 1.0
    save_file(tensors, source / "model.safetensors")
    with raises_naming(ConversionError, "model.layers.2.embed_tokens.weight", "model.embed_tokens.weight"):
        from_hf(source, tmp_path / "two", mtp_num_layers=1)
