"""Exports give our network's logits in transformers, for every layout and architecture; and come back bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from neox.checkpoint import CheckpointReader, find_checkpoint
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf
from neox.convert.verification import hf_logits, load_reference_model, single_rank_plan
from neox.plan import config_from_files
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = ("v2_pp1_mp1_dp1_fp32", "v2_pp2_mp1_dp1_fp32", "v2_pp2_mp2_dp1_fp32")
CASES = list(itertools.product((1, 2), (1, 2), (True, False), (True, False), (True, False)))


def small_config(**changes):
    flat = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 32,
        "pos_emb": "rotary",
        "rotary_pct": 0.5,
        "rotary_emb_base": 5000,
        "output_layer_parallelism": "column",
    }
    return NeoXConfig.from_flat({**flat, **changes})


@pytest.mark.parametrize(("mp", "pp", "parallel_residual", "untied", "tanh_gelu"), CASES)
def test_logits_of_an_export(tmp_path, mp, pp, parallel_residual, untied, tanh_gelu):
    config = small_config(
        gpt_j_residual=parallel_residual,
        no_weight_tying=untied,
        bias_gelu_fusion=tanh_gelu,
        model_parallel_size=mp,
        pipe_parallel_size=pp,
        output_layer_parallelism="row" if pp == 2 else "column",
    )
    layers = single_rank_plan(config, 96).layers
    weights = seeded_weights(layers, seed=mp + 2 * pp)
    directory = write_checkpoint(tmp_path / "global_step3", layers, weights, tp_size=mp, pp_size=pp)
    to_hf(directory, config, tmp_path / "hf", verify=False, max_shard_bytes=30_000)
    tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = load_reference_model(CheckpointReader(directory, layers), config)(tokens)
    theirs = hf_logits(tmp_path / "hf", tokens)
    assert (ours - theirs).abs().max() < 1e-5
    assert ours.std() > 0.05  # logits that say something

    back = from_hf(tmp_path / "hf", tmp_path / "back", model_parallel_size=3 - mp)
    reader = CheckpointReader(back.checkpoint, single_rank_plan(config_from_files([back.config_file]), 96).layers)
    assert set(reader.items()) == set(weights)
    for (index, name), value in weights.items():
        assert torch.equal(reader.full(index, name), value), name


@pytest.mark.parametrize("run", RUNS)
def test_exports_of_gpt_neox_checkpoints_give_its_logits(tmp_path, run):
    config = config_from_files([GOLDEN / run / f"{run}.yml"])
    result = to_hf(
        find_checkpoint(GOLDEN / run),
        config,
        tmp_path / "hf",
        tokenizer_file=GOLDEN / "data" / "tokenizer.json",
    )
    assert result.check is not None
    assert result.check.difference < 1e-5
    assert "built-in text" in (tmp_path / "hf" / "README.md").read_text()
    golden = np.load(GOLDEN / run / "logits_step30.npz")
    logits = hf_logits(tmp_path / "hf", torch.from_numpy(golden["tokens"]).long())
    assert (logits - torch.from_numpy(golden["logits"])).abs().max() < 1e-5


def test_an_export_of_two_ranks_with_trained_row_biases_is_verified(tmp_path):
    """gpt-neox's tensor ranks own different row biases under parallel residual: their sum is the model's."""
    config = small_config(gpt_j_residual=True, no_weight_tying=True)
    layers = single_rank_plan(config, 96).layers
    directory = write_checkpoint(tmp_path / "global_step3", layers, seeded_weights(layers), tp_size=2)
    for rank in range(2):
        path = directory / f"layer_02-model_{rank:02d}-model_states.pt"
        state = {k: v.clone() for k, v in torch.load(path, weights_only=True).items()}
        state["attention.dense.bias"] = torch.full((32,), 0.25 + rank)
        torch.save(state, path)
    check = to_hf(directory, config, tmp_path / "hf").check
    assert check is not None
    assert check.difference < 1e-5
    reader = CheckpointReader(from_hf(tmp_path / "hf", tmp_path / "back").checkpoint, layers)
    assert torch.equal(reader.full(2, "attention.dense.bias"), torch.full((32,), 1.5))


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_saves_itself_comes_in(tmp_path, tied):
    """A model saved by `save_pretrained`, in shards: its logits are our network's."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(5)
    theirs = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=32,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            use_parallel_residual=not tied,
            hidden_act="gelu_fast" if tied else "gelu",
        )
    ).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    result = from_hf(tmp_path / "hf", tmp_path / "neox", model_parallel_size=2)
    config = config_from_files([result.config_file])
    reader = CheckpointReader(result.checkpoint, single_rank_plan(config, 100).layers)
    tokens = torch.randint(0, 100, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        difference = (load_reference_model(reader, config)(tokens) - theirs(tokens).logits).abs().max()
    assert difference < 2e-5
