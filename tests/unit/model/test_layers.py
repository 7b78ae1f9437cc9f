"""Modules and layer plan agree; numbers of a block by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neox.architecture import BLOCK_OFFSET, BLOCKS
from neox.model import GPT, BlockContext, TransformerLayer, build_layer, share_parameters
from neox.model.positions import reset_buffers
from neox.parallel import ParallelGrid, Topology
from tests.errors import raises_naming
from tests.plans import NETWORKS, PLAIN_NETWORKS, networks_for, small_plan


def grid_of(tp_size: int, tp_rank: int = 0) -> ParallelGrid:
    """Return a grid that stands for one tensor rank; enough to build layers, not to talk."""
    return replace(ParallelGrid.single(), topology=Topology(1, 1, tp_size), rank=tp_rank)


@pytest.mark.parametrize("head", ["row", "column", "tied"])
@pytest.mark.parametrize(("tp_size", "network"), [(n, network) for n in (1, 2, 4) for network in networks_for(n)])
def test_parameters_are_those_of_the_layer_plan(head: str, tp_size: int, network: str):
    keys = {"no_weight_tying": False} if head == "tied" else {"output_layer_parallelism": head}
    plan = small_plan(tp_size, model_parallel_size=tp_size, **keys, **NETWORKS[network])
    for entry in plan.layers:
        layer = build_layer(plan, entry.index, grid_of(tp_size), device="meta")
        shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
        assert shapes == {spec.name: spec.shard_shape(tp_size) for spec in entry.parameters}
        marked = {name for name, p in layer.named_parameters() if getattr(p, "model_parallel", False)}
        split = {spec.name for spec in entry.parameters if spec.partition_dim is not None and tp_size > 1}
        assert marked == split
        saved = layer.state_dict()
        buffers = {name: (tuple(b.shape), b.dtype) for name, b in saved.items() if name not in shapes}
        wanted = {
            ("rotary", "block"): {
                "attention.rotary_emb.inv_freq": ((plan.architecture.rotary_ndims // 2,), torch.float32)
            },
            ("alibi", "block"): {"attention.alibi_embed.slopes": ((4 // tp_size,), torch.float32)},
            ("sinusoidal", "embedding"): {"position_embeddings.inv_freq": ((16,), torch.float32)},
        }
        number = entry.index - BLOCK_OFFSET
        has_no_positions = number in plan.architecture.unrotated_blocks
        if entry.kind == "block":
            has_no_positions |= BLOCKS[plan.architecture.attention[number]].attention is None
        expected = wanted.get((plan.architecture.positions, entry.kind), {})
        assert buffers == ({} if has_no_positions else expected)


@pytest.mark.parametrize("network", NETWORKS)
def test_gpt_numbers_its_layers_like_the_plan(network: str):
    plan = small_plan(**NETWORKS[network])
    model = GPT(plan, ParallelGrid.single())
    names = [f"sequential.{entry.index}.{spec.name}" for entry in plan.layers for spec in entry.parameters]
    assert [name for name, _ in model.named_parameters()] == names
    assert isinstance(model.sequential[1], nn.Identity) == (network != "soft_prompt")
    share_parameters(enumerate(model.sequential), plan.layers)
    assert isinstance(model.sequential[4], nn.Identity)
    assert sum(p.numel() for p in model.parameters()) == plan.layers.numel


def test_no_positions_means_no_buffer_and_a_permutable_past():
    model = GPT(small_plan(pos_emb="none"), ParallelGrid.single()).eval()
    assert not list(model.buffers())
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    one_layer = GPT(small_plan(pos_emb="none", num_layers=1), ParallelGrid.single()).eval()
    logits = one_layer(tokens)
    torch.testing.assert_close(logits[0, 2:], logits[1, 2:])


def block_by_hand(block: TransformerLayer, x: torch.Tensor, *, parallel: bool, tanh: bool) -> torch.Tensor:
    """One block in the plainest words, 4 heads of 8, rotary on 4."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        a = block.attention
        qkv = F.linear(x, a.query_key_value.weight, a.query_key_value.bias).view(*x.shape[:2], 4, 3, 8)
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), a.rotary_emb.inv_freq).double()
        turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

        def rotated(y: torch.Tensor) -> torch.Tensor:
            z = torch.complex(y[..., :2], y[..., 2:4]) * turn
            return torch.cat((z.real, z.imag, y[..., 4:]), -1)

        q, k, v = rotated(qkv[..., 0, :]), rotated(qkv[..., 1, :]), qkv[..., 2, :]
        scores = torch.einsum("bsnd,btnd->bnst", q, k) / 8**0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -10000.0)
        out = torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), v).flatten(2)
        return F.linear(out, a.dense.weight, a.dense.bias)

    def mlp(x: torch.Tensor) -> torch.Tensor:
        wide = F.linear(x, block.mlp.dense_h_to_4h.weight, block.mlp.dense_h_to_4h.bias)
        wide = F.gelu(wide, approximate="tanh" if tanh else "none")
        return F.linear(wide, block.mlp.dense_4h_to_h.weight, block.mlp.dense_4h_to_h.bias)

    first, second = block.input_layernorm, block.post_attention_layernorm
    if parallel:
        return x + attention(first(x)) + mlp(second(x))
    x = x + attention(first(x))
    return x + mlp(second(x))


def block_context(block: TransformerLayer, x: torch.Tensor) -> BlockContext:
    """Return what a stage gives to a block: positions 0..S-1, all earlier tokens visible."""
    positions = torch.arange(x.shape[1])
    return BlockContext(positions, block.attention.position_tables(positions, x.shape[1], x.dtype))


@pytest.mark.parametrize("attention", ["global", "flash"])
@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_block_by_hand(parallel: bool, tanh: bool, attention: str):
    keys = {"gpt_j_residual": parallel, "bias_gelu_fusion": tanh, "attention_config": [[[attention], "all"]]}
    block = build_layer(small_plan(**keys), 2, ParallelGrid.single(), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    x = torch.randn(2, 9, 32, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        found, aux = block(x, block_context(block, x))
        torch.testing.assert_close(found, block_by_hand(block, x, parallel=parallel, tanh=tanh), atol=1e-7, rtol=0)
    assert aux == {}


@pytest.mark.parametrize("network", PLAIN_NETWORKS)
def test_flash_and_eager_attention_are_the_same_function(network: str):
    tokens, logits = torch.arange(20).view(2, 10), []
    for kind in ("global", "flash"):
        plan = small_plan(**{"attention_config": [[[kind], "all"]], **NETWORKS[network]})
        logits.append(GPT(plan, ParallelGrid.single())(tokens))
    torch.testing.assert_close(*logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", ["global", "flash"])
@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_query_key_layer_scaling_changes_the_order_of_factors_and_not_the_function(attention: str, positions: str):
    keys = {"attention_config": [[[attention], "all"]], "pos_emb": positions}
    plain = GPT(small_plan(**keys), ParallelGrid.single())
    scaled = GPT(small_plan(apply_query_key_layer_scaling=True, **keys), ParallelGrid.single())
    assert [block.attention.softmax_scale for block in scaled.blocks] == [1.0, 2.0]
    tokens = torch.arange(16).view(2, 8)
    torch.testing.assert_close(scaled(tokens), plain(tokens))


def test_layer_norm_epsilon_is_the_configured_one():
    model = GPT(small_plan(layernorm_epsilon=0.5), ParallelGrid.single())
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 5
    assert all(norm.eps == 0.5 for norm in norms)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, where the kernel is used")
def test_fused_softmax_on_a_cpu_is_said_aloud(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("WARNING", logger="neox"):
        model = GPT(small_plan(scaled_upper_triang_masked_softmax_fusion=True), ParallelGrid.single())
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "needs a GPU" in caplog.text
    assert model.blocks[0].attention.impl == "eager"


def test_dropout_is_off_in_eval_and_on_in_training():
    model = GPT(small_plan(hidden_dropout=0.3, attention_dropout=0.3), ParallelGrid.single())
    tokens = torch.arange(16).view(2, 8)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_blocks_compile_without_a_graph_break():
    explained = torch._dynamo.explain(GPT(small_plan(), ParallelGrid.single()))(torch.arange(16).view(2, 8))
    assert explained.graph_break_count == 0, explained.break_reasons


def test_a_buffer_that_nothing_computes_again_is_an_error():
    layer = build_layer(small_plan(), 2, ParallelGrid.single(), device="meta").to_empty(device="cpu")
    reset_buffers(layer)
    assert torch.equal(
        layer.attention.rotary_emb.inv_freq,
        build_layer(small_plan(), 2, ParallelGrid.single()).attention.rotary_emb.inv_freq,
    )
    layer.mlp.register_buffer("table", torch.zeros(2))
    with raises_naming(TypeError, "MLP"):
        reset_buffers(layer)
