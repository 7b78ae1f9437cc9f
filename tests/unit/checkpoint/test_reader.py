"""Reading weights at any tensor degree, from every layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from neox.checkpoint import CheckpointReader, layer_file, mp_rank_file, save_file, write_layer
from neox.errors import CheckpointError
from neox.parallel import shard
from tests.errors import raises_naming
from tests.plans import NETWORKS
from tests.plans import small_plan as plan_of_network
from tests.unit.checkpoint.synthetic import seeded_weights, small_plan, write_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("output_layer_parallelism", ["row", "column"])
@pytest.mark.parametrize("gpt_j_residual", [True, False])
@pytest.mark.parametrize("saved", [1, 2, 4])
def test_any_degree_gives_the_same_tensors(tmp_path, saved, gpt_j_residual, output_layer_parallelism):
    layers = small_plan(gpt_j_residual=gpt_j_residual, output_layer_parallelism=output_layer_parallelism)
    weights = seeded_weights(layers)
    reader = CheckpointReader(write_checkpoint(tmp_path, layers, weights, tp_size=saved, pp_size=2), layers)
    assert (reader.tp_size, reader.pp_size, reader.iteration) == (saved, 2, 3)
    assert set(reader.items()) == set(weights)
    for (index, name), value in weights.items():
        assert torch.equal(reader.full(index, name), value)
        assert torch.equal(torch.cat(list(reader.row_blocks(index, name, max_bytes=200))), value)
        spec = reader.spec(index, name)
        for tp_size in (1, 2, 4):
            shards = [reader.shard(index, name, rank, tp_size) for rank in range(tp_size)]
            assert all(tuple(shard.shape) == spec.shard_shape(tp_size) for shard in shards)
            if spec.partition_dim is None:
                assert all(torch.equal(shard, value) for shard in shards)
            else:
                assert torch.equal(torch.cat(shards, spec.partition_dim), value)


@pytest.mark.parametrize("run", ["v2_pp1_mp1_dp1_fp32", "v2_pp2_mp1_dp1_fp32", "v2_pp2_mp2_dp1_fp32"])
def test_reads_gpt_neox_directories(run):
    pp, mp = int(run[5]), int(run[9])
    layers = small_plan(num_layers=4, hidden_size=64, padded_vocab_size=1024, gpt_j_residual=mp == 1)
    reader = CheckpointReader(GOLDEN / run / "global_step30", layers)
    assert (reader.iteration, reader.tp_size, reader.pp_size) == (30, mp, pp)
    assert reader.args["hidden_size"] == 64
    assert reader.client_state["np_rng_state"][0] == "MT19937"
    for layer in layers.weight_layers:
        state = reader.layer_shard(layer.index, 0, 1)
        assert {name: tuple(t.shape) for name, t in state.items()} == {p.name: p.shape for p in layer.parameters}


def test_row_biases_of_two_ranks_are_summed_under_parallel_residual_only(tmp_path):
    layers = small_plan()
    weights = seeded_weights(layers)
    write_checkpoint(tmp_path, layers, weights, tp_size=2)
    reader = CheckpointReader(tmp_path, layers)
    for rank in (0, 1):  # as gpt-neox trains them: every rank owns a part
        state = {p.name: reader.parts(2, p.name)[rank].clone() for p in layers[2].parameters}
        state["attention.dense.bias"] = torch.full((16,), 1.0 + rank)
        write_layer(tmp_path, 2, rank, state)
    assert torch.equal(CheckpointReader(tmp_path, layers).full(2, "attention.dense.bias"), torch.full((16,), 3.0))
    averaged = CheckpointReader(tmp_path, small_plan(gpt_j_residual=False))
    assert torch.equal(averaged.full(2, "attention.dense.bias"), torch.full((16,), 1.5))
    with raises_naming(CheckpointError, "attention.dense.bias"):
        CheckpointReader(tmp_path).full(2, "attention.dense.bias")


def test_later_names_of_the_mlp_and_old_buffers(tmp_path):
    layers = small_plan()
    weights = seeded_weights(layers)
    write_checkpoint(tmp_path, layers, weights)
    state = {p.name: weights[2, p.name] for p in layers[2].parameters}
    renamed = {
        k.replace("mlp.dense_h_to_4h", "mlp.linear1").replace("mlp.dense_4h_to_h", "mlp.linear2"): v
        for k, v in state.items()
    }
    write_layer(tmp_path, 2, 0, {**renamed, "attention.rotary_emb.inv_freq": torch.ones(2)})
    reader = CheckpointReader(tmp_path, layers)
    assert set(reader.names(2)) == set(state)
    assert torch.equal(reader.full(2, "mlp.dense_4h_to_h.weight"), weights[2, "mlp.dense_4h_to_h.weight"])


def test_one_stage_files_of_two_tensor_ranks(tmp_path):
    layers = small_plan()
    weights = seeded_weights(layers)
    write_checkpoint(tmp_path / "layers", layers, weights, tp_size=2)
    reader = CheckpointReader(tmp_path / "layers", layers)
    for rank in range(2):
        module = {f"sequential.{index}.{name}": reader.parts(index, name)[rank].clone() for index, name in weights}
        save_file(tmp_path / mp_rank_file(rank), {"module": module, "iteration": 7})
    one_stage = CheckpointReader(tmp_path, layers)
    assert (one_stage.tp_size, one_stage.pp_size, one_stage.iteration) == (2, 1, 7)
    for (index, name), value in weights.items():
        assert torch.equal(one_stage.full(index, name), value)


@pytest.mark.parametrize(("rows", "vocab_size"), [(64, 50), (96, 50), (96, None), (52, 50)])
def test_vocabulary_padding_adapts(tmp_path, rows, vocab_size):
    saved = small_plan()
    weights = seeded_weights(saved)
    state = {} if vocab_size is None else {"model_identity": {"vocab_size": vocab_size}}
    for parallelism in ("column", "row"):
        saved = small_plan(output_layer_parallelism=parallelism)
        write_checkpoint(tmp_path, saved, weights, tp_size=2, client_state=state)
        layers = small_plan(padded_vocab_size=rows, output_layer_parallelism=parallelism)
        reader = CheckpointReader(tmp_path, layers)
        for index, name in ((0, "word_embeddings.weight"), (6, "final_linear.weight")):
            full = reader.full(index, name)
            assert full.shape == (rows, 16)
            assert torch.equal(full[: min(rows, 64)], weights[index, name][:rows])
            shards = [reader.shard(index, name, rank, 2) for rank in range(2)]
            assert torch.equal(torch.cat(shards, reader.spec(index, name).partition_dim), full)
            if rows > 64:
                new = weights[index, name][-1] if vocab_size else torch.zeros(16)
                assert (full[64:] == new).all()


def test_a_row_that_is_in_use_is_never_cut(tmp_path):
    saved = small_plan()
    state = {"model_identity": {"vocab_size": 60}}
    write_checkpoint(tmp_path, saved, seeded_weights(saved), client_state=state)
    with raises_naming(CheckpointError, "word_embeddings.weight", 60, 56):
        CheckpointReader(tmp_path, small_plan(padded_vocab_size=56)).full(0, "word_embeddings.weight")


def test_says_what_is_missing_or_of_another_model(tmp_path):
    layers = small_plan()
    write_checkpoint(tmp_path, layers, seeded_weights(layers), tp_size=2)
    with raises_naming(CheckpointError, [4, 7, 8], layer_file(8, 0)):
        CheckpointReader(tmp_path, small_plan(num_layers=4))
    with raises_naming(CheckpointError, [6]):
        CheckpointReader(tmp_path, small_plan(no_weight_tying=False))
    with raises_naming(CheckpointError, "attention.query_key_value.weight", [48, 16], [96, 32]):
        CheckpointReader(tmp_path, small_plan(hidden_size=32)).full(2, "attention.query_key_value.weight")
    (tmp_path / layer_file(3, 1)).unlink()
    with raises_naming(CheckpointError, layer_file(3, 1)):
        CheckpointReader(tmp_path, layers)
    (tmp_path / "empty").mkdir()
    with raises_naming(CheckpointError, tmp_path / "empty"):
        CheckpointReader(tmp_path / "empty")
    with raises_naming(CheckpointError, tmp_path / "nowhere"):
        CheckpointReader(tmp_path / "nowhere")


def test_a_tied_checkpoint_may_hold_a_copy_of_the_embedding(tmp_path):
    layers = small_plan(no_weight_tying=False)
    weights = seeded_weights(layers)
    write_checkpoint(tmp_path, layers, weights)
    write_layer(tmp_path, 6, 0, {"word_embeddings.weight": weights[0, "word_embeddings.weight"]})
    assert torch.equal(
        CheckpointReader(tmp_path, layers).full(0, "word_embeddings.weight"), weights[0, "word_embeddings.weight"]
    )


@pytest.mark.parametrize("parallelism", ["row", "column"])
def test_finetuning_may_tie_or_untie_the_head(tmp_path, parallelism):
    untied = small_plan(output_layer_parallelism=parallelism)
    tied = small_plan(no_weight_tying=False)
    weights = seeded_weights(untied)
    with_head = write_checkpoint(tmp_path / "untied", untied, weights, tp_size=2)
    without = write_checkpoint(tmp_path / "tied", tied, weights, tp_size=2)
    assert CheckpointReader(with_head, tied, finetune=True).layer_shard(len(tied) - 1, 0, 1) == {}
    reader, head, name = CheckpointReader(without, untied, finetune=True), len(untied) - 1, "final_linear.weight"
    embedding = weights[0, "word_embeddings.weight"]
    assert torch.equal(reader.full(head, name), embedding)
    parts = [reader.layer_shard(head, rank, 2)[name] for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=0 if parallelism == "column" else 1), embedding)
    for rank in range(2):  # gpt-neox may store a tied head's copy of the embedding
        shutil.copyfile(without / layer_file(0, rank), without / layer_file(head, rank))
    assert torch.equal(CheckpointReader(without, untied, finetune=True).full(head, name), embedding)
    with pytest.raises(CheckpointError):
        CheckpointReader(with_head, tied)


def test_parameters_that_the_model_does_not_have_are_refused(tmp_path):
    layers = small_plan()
    reader = CheckpointReader(write_checkpoint(tmp_path, layers, seeded_weights(layers)), small_plan(gpt_j_tied=True))
    assert "post_attention_layernorm.weight" not in reader.layer_shard(2, 0, 1)  # gpt-neox keeps it, unused
    without = small_plan(use_bias_in_mlp=False)
    with raises_naming(CheckpointError, layer_file(2, 0), "mlp.dense_h_to_4h.bias"):
        CheckpointReader(tmp_path, without).layer_shard(2, 0, 1)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_is_read_at_any_degree(tmp_path, network):
    layers = plan_of_network(**NETWORKS[network]).layers
    weights = seeded_weights(layers)
    for saved in (1, 2):
        reader = CheckpointReader(write_checkpoint(tmp_path / str(saved), layers, weights, tp_size=saved), layers)
        for (index, name), value in weights.items():
            spec = reader.spec(index, name)
            assert torch.equal(reader.full(index, name), value)
            assert torch.equal(torch.cat(list(reader.row_blocks(index, name, max_bytes=200))), value)
            parts = [reader.shard(index, name, rank, 2) for rank in range(2)]
            assert all(torch.equal(part, shard(value, spec, rank, 2)) for rank, part in enumerate(parts))
