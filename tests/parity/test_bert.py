"""BERT and Megatron-LM's BERT compute and learn what transformers' do from the same random weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from neox.architecture import LayerPlan
from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf
from neox.convert.layouts import from_hf_layout
from neox.convert.verification import load_reference_model, single_rank_plan
from neox.data.masked.masked_batch import MaskedLMBatch
from neox.errors import ConversionError
from neox.families import FAMILIES, Family
from neox.model import GPT, Context
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, yaml_keys
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming
from tests.losses import masked_lm_loss
from tests.masked_batches import masked_batch
from tests.parity.test_hf_families import weights_of
from tests.plans import ENCODERS, small_plan

SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
}
LENGTH, PREDICTED = 20, 5


def theirs_with(model_type: str, **changes: Any) -> Any:
    from transformers import BertConfig, BertForPreTraining, MegatronBertConfig, MegatronBertForPreTraining

    classes = {
        "bert": (BertConfig, BertForPreTraining),
        "megatron-bert": (MegatronBertConfig, MegatronBertForPreTraining),
    }
    config, network = classes[model_type]
    torch.manual_seed(0)
    model = network(config(**{**SIZES, **changes}, attn_implementation="eager"))
    with torch.no_grad():  # biases and norms of a new model say nothing about where they are read
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


def ours_of(theirs: Any, impl: str = "eager") -> tuple[GPT, Family, LayerPlan]:
    family = FAMILIES[theirs.config.model_type]
    architecture, settings = family.read_config(theirs.config.to_dict())
    keys = {**yaml_keys(architecture), "seq_length": LENGTH, "max_preds_per_seq": PREDICTED}
    if impl == "flash":
        keys["attention_config"] = [[["flash"], "all"]]
    plan = single_rank_plan(NeoXConfig.from_flat(keys), settings.vocab_size)
    if impl == "flash":
        from dataclasses import replace

        plan = replace(plan, attention=("flash",) * architecture.num_layers)
    model = GPT(plan, ParallelGrid.single())
    values = in_our_layout(dict(theirs.state_dict()), family, plan.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values.pop(name))
    assert not values
    return model.train(), family, plan.layers


def in_our_layout(tensors: dict[str, Tensor], family: Family, layers: LayerPlan) -> dict[str, Tensor]:
    return {
        f"sequential.{mapping.layer}.{mapping.name}": from_hf_layout(
            [tensors[key] for key in mapping.keys], mapping.source, layers.architecture
        )
        for mapping in family.mappings(layers)
    }


def their_loss(theirs: Any, batch: MaskedLMBatch) -> Tensor:
    labels = torch.full_like(batch.tokens, -100)
    for row in range(len(labels)):
        for position, token, weight in zip(
            batch.masked_positions[row], batch.masked_ids[row], batch.masked_weights[row], strict=True
        ):
            if weight:
                labels[row, position] = token
    mask = torch.arange(batch.tokens.shape[1]) < batch.lengths.unsqueeze(1)
    # Ids of the padding are 2: its row of the embedding gets no gradient in transformers.
    return theirs(
        input_ids=batch.tokens,
        attention_mask=mask.long(),
        token_type_ids=batch.token_types,
        labels=labels,
        next_sentence_label=batch.next_sentence,
    ).loss


@pytest.mark.parametrize(
    ("model_type", "impl"),
    [
        ("bert", "eager"),
        ("megatron-bert", "flash"),
        pytest.param("bert", "flash", marks=pytest.mark.slow),
        pytest.param("megatron-bert", "eager", marks=pytest.mark.slow),
    ],
)
def test_loss_gradients_and_thirty_steps_are_those_of_transformers(model_type: str, impl: str):
    theirs = theirs_with(model_type)
    ours, family, layers = ours_of(theirs, impl)
    batch = masked_batch(4, LENGTH, PREDICTED, 90)
    batch = batch._replace(tokens=batch.tokens.masked_fill(batch.tokens == 0, 2))
    expected, found = their_loss(theirs, batch), masked_lm_loss(ours, batch)
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    expected.backward()
    found.backward()
    gradients = in_our_layout(
        {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, family, layers
    )
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=1e-6, rtol=0.0, msg=lambda m, n=name: f"{n} {m}"
        )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (theirs, ours)]
    curves: list[list[float]] = [[], []]
    for step in range(30):
        batch = masked_batch(4, LENGTH, PREDICTED, 90, seed=step)
        batch = batch._replace(tokens=batch.tokens.masked_fill(batch.tokens == 0, 2))
        for optimizer, loss, curve in zip(
            optimizers, (their_loss(theirs, batch), masked_lm_loss(ours, batch)), curves, strict=True
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)


def test_recomputation_and_the_masked_tokens_alone_change_nothing():
    theirs = theirs_with("bert")
    ours, _, _ = ours_of(theirs)
    batch = masked_batch(3, LENGTH, PREDICTED, 90)
    whole = masked_lm_loss(ours, batch)
    whole.backward()
    gradients = [p.grad.clone() for p in ours.parameters()]
    ours.zero_grad()
    ours.recompute_chunk = 1
    masked_lm_loss(ours, batch).backward()
    for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=0.0, rtol=0.0)
    unused = batch._replace(masked_ids=torch.where(batch.masked_weights > 0, batch.masked_ids, 3))
    assert masked_lm_loss(ours, unused).item() == whole.item()


@pytest.mark.parametrize("model_type", ["bert", pytest.param("megatron-bert", marks=pytest.mark.slow)])
def test_a_model_of_transformers_comes_in_and_goes_out(tmp_path, model_type: str):
    theirs = theirs_with(model_type).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox", model_parallel_size=2)
    loaded = config_from_files([imported.config_file])
    reader = CheckpointReader(imported.checkpoint, single_rank_plan(loaded, SIZES["vocab_size"]).layers)
    assert imported.parameters == theirs.num_parameters()
    ours = load_reference_model(reader, loaded)
    batch = masked_batch(3, LENGTH, PREDICTED, 90)
    kept = torch.arange(LENGTH) < batch.lengths.unsqueeze(1)
    with torch.inference_mode():
        wanted = theirs(batch.tokens, attention_mask=kept.long(), token_type_ids=batch.token_types)
        hidden = ours.hidden(batch.tokens, Context(token_types=batch.token_types, lengths=batch.lengths))
        assert ours.head.sentences is not None
        assert (ours.logits(hidden) - wanted.prediction_logits)[kept].abs().max() < 1e-5
        assert (ours.head.sentences(hidden) - wanted.seq_relationship_logits).abs().max() < 1e-5
    assert wanted.prediction_logits.std() > 0.05
    result = to_hf(imported.checkpoint, loaded, tmp_path / "out", verify=True)
    assert result.check is not None
    assert result.check.difference < 1e-5
    before, after = weights_of(tmp_path / "hf"), weights_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["architectures"] == [type(theirs).__name__]
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_the_oldest_names_of_norms_and_copies_of_the_head_are_read(tmp_path):
    theirs = theirs_with("bert").eval()
    theirs.save_pretrained(tmp_path / "hf")
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value.clone()
        for key, value in theirs.state_dict().items()
    }
    assert {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} <= old.keys()
    save_file({**old, "bert.embeddings.position_ids": torch.arange(24)}, tmp_path / "hf" / "model.safetensors")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox")
    assert imported.parameters == theirs.num_parameters()


def test_what_has_no_form_here_is_refused_by_name():
    with raises_naming(ConversionError, "is_decoder", lines=2):
        FAMILIES["bert"].read_config({**SIZES, "is_decoder": True})
    causal = small_plan().architecture
    assert "bidirectional" in FAMILIES["bert"].inexpressible_fields(causal)
    for model_type, family in FAMILIES.items():
        if not family.is_encoder:
            assert "bidirectional" in family.inexpressible_fields(small_plan(**ENCODERS["bert"]).architecture), (
                model_type
            )


def test_a_vocabulary_of_words_alone_is_imported(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "some", "word", "##s"]
    theirs = theirs_with("bert", vocab_size=len(words))
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "vocab.txt").write_text("\n".join(words) + "\n")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox")
    settings = config_from_files([imported.config_file]).tokenizer
    assert settings.vocab_file is not None
    found = build_tokenizer(settings.tokenizer_type, settings.vocab_file, None)
    assert found.encode("some words") == [5, 6, 7]
