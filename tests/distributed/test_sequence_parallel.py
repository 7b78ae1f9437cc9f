"""Tokens divided over tensor ranks between split layers: the numbers of whole ones, and less kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from neox.model import GPT, build_layer
from neox.model.context import BlockContext
from neox.parallel import ParallelGrid, Topology
from neox.plan.memory.activations import block_bytes
from tests.distributed.spawn import run_ranks
from tests.distributed.test_resume import interrupted_runs
from tests.distributed.test_tensor_parallel import batch, randomize_vectors, specs_of
from tests.distributed.training_runs import batches, tiny_plan, train_curves
from tests.losses import causal_lm_loss
from tests.plans import ENCODERS, networks_for, small_plan

# refused: every rank holds the vectors of a soft prompt, and rwkv's blocks shift tokens
REFUSED = ("soft_prompt", "rwkv")
NETWORKS = {name: keys for name, keys in networks_for(2).items() if name not in REFUSED}


def whole_and_divided(networks: dict[str, dict[str, Any]]) -> None:
    tokens, labels, mask = batch()
    for name, keys in networks.items():
        results = []
        for divided in (False, True):
            grid = ParallelGrid.build(Topology(tp_size=2, sequence_parallel=divided))
            plan = small_plan(2, model_parallel_size=2, sequence_parallel=divided, **keys)
            assert plan.grid == grid.topology
            model = GPT(plan, grid)
            randomize_vectors(model, specs_of(plan))
            loss = causal_lm_loss(model, tokens, labels, mask)
            loss.backward()
            logits = model.eval()(tokens[:, :3]).detach()  # a length that does not divide
            results.append({"loss": loss.detach(), "logits": logits})
            results[-1] |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        whole, shared = results
        assert whole.keys() == shared.keys()
        for key, value in whole.items():
            torch.testing.assert_close(
                shared[key], value, atol=1e-6, rtol=1e-5, msg=lambda m, n=name, k=key: f"{n} {k}: {m}"
            )


@pytest.mark.parametrize(
    "networks",
    [
        pytest.param({name: NETWORKS[name] for name in ("rotary", "gptj", "latent")}, id="some"),
        pytest.param(NETWORKS, id="every", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_equal_those_of_whole_tokens(networks: dict[str, dict[str, Any]]):
    run_ranks(2, whole_and_divided, networks)


RECOMPUTED = {"checkpoint_activations": True, "checkpoint_num_layers": 2}
LORA = {"lora": {"r": 4, "target": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}}
CURVES = {
    "tensor": (2, [{"mp": 2, "zero": zero, **keys} for zero in range(3) for keys in ({}, RECOMPUTED)]),
    "zero3": (2, [{"mp": 2, "zero": 3}]),
    "parallel": (2, [{"mp": 2, "zero": 1, "gpt_j_residual": True, "checkpoint_activations": True}]),
    "parts": (2, [{"mp": 2, "checkpoint_activations": True, "recompute_granularity": "full_attn"}]),
    "lora": (2, [{"mp": 2, **LORA}]),
    "data": (4, [{"mp": 2, "zero": zero, "train_micro_batch_size_per_gpu": 2} for zero in (1, 2)]),
    "stages": (4, [{"pp": 2, "mp": 2, "zero": zero, **keys} for zero in (0, 1) for keys in ({}, RECOMPUTED)]),
    "stages of unequal tokens": (4, [{"pp": 2, "mp": 2, "no_weight_tying": True, "pipe_partition_method": "uniform"}]),
    "encoders": (2, [{"mp": 2, **keys} for keys in ENCODERS.values()]),
    "stages of encoders": (4, [{"pp": 2, "mp": 2, **ENCODERS["bert"]}]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVES)
def test_engines_train_as_with_whole_tokens(name: str):
    world, layouts = CURVES[name]
    plans = [tiny_plan(world, **keys, sequence_parallel=on) for keys in layouts for on in (False, True)]
    curves = run_ranks(world, train_curves, plans, 4, timeout=600)[0]
    for keys, whole, divided in zip(layouts, curves[::2], curves[1::2], strict=True):
        for (loss, norm), (divided_loss, divided_norm) in zip(whole, divided, strict=True):
            assert divided_loss == pytest.approx(loss, rel=2e-6), keys
            assert divided_norm == pytest.approx(norm, rel=2e-5), keys


def evaluated_between(plans):
    """Return each plan's losses of two steps with an evaluation between, and the evaluation's."""
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        first = engine.train_batch(data).loss
        scores = engine.eval_batch(batches(plan, grid.dp_rank)).scores
        answers.append([first, *scores.values(), engine.train_batch(data).loss])
    return answers


@pytest.mark.slow
def test_evaluations_between_steps_have_whole_tokens():
    plans = [tiny_plan(4, pp=2, mp=2, sequence_parallel=on) for on in (False, True)]
    whole, divided = run_ranks(4, evaluated_between, plans, timeout=300)[0]
    assert divided == pytest.approx(whole, rel=2e-6)


@pytest.mark.slow
def test_runs_resume_with_tokens_divided_or_not(tmp_path):
    drops = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "sequence_parallel": True}
    runs = []
    for number, (saves, loads) in enumerate([(drops, drops), ({}, {"sequence_parallel": True}), (drops, {})]):
        directory = str(tmp_path / str(number))
        runs.append((tiny_plan(2, mp=2, save=directory, **saves), tiny_plan(2, mp=2, load=directory, **loads)))
    same, switched, without = run_ranks(2, interrupted_runs, runs, 4, 2, timeout=300)[0]
    assert same[1] == same[0][2:]
    for whole, divided in zip(switched[0][2:], switched[1], strict=True):
        assert divided.loss == pytest.approx(whole.loss, rel=2e-6)
    assert without[1][0].loss != without[0][2].loss


def drops_and_keeps() -> float:
    """Check the random streams of divided tokens; return kept over predicted bytes of a block."""
    grid = ParallelGrid.build(Topology(tp_size=2, sequence_parallel=True))
    tokens, labels, mask = batch()
    divided = {"model_parallel_size": 2, "sequence_parallel": True}
    for parallel in (False, True):
        results = []
        for recompute in (False, True):
            dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.3, "gpt_j_residual": parallel}
            model = GPT(small_plan(2, **divided, **dropout, checkpoint_activations=recompute), grid)
            grid.seed(11)
            losses = [causal_lm_loss(model, tokens, labels, mask) for _ in range(2)]
            torch.stack(losses).sum().backward()
            results.append([loss.detach() for loss in losses] + [p.grad for p in model.parameters()])
        assert all(map(torch.equal, *results))
        assert not torch.equal(results[0][0], results[0][1])
    ones = [torch.empty(8), torch.empty(8)]
    grid.seed(11)
    dist.all_gather(ones, torch.rand(8), group=grid.tp_group)
    assert not torch.equal(*ones)

    flash = {"attention_config": [[["flash"], "all"]], "hidden_size": 64, "precision": "bf16", "rotary_pct": 0.25}
    plan = small_plan(2, **divided, **flash, seq_length=256, max_position_embeddings=256)
    layer = build_layer(plan, 2, grid, device="cpu", dtype=torch.bfloat16)
    weights, kept = {p.untyped_storage().data_ptr() for p in layer.parameters()}, {}
    positions = torch.arange(256)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x = torch.randn(2, 128, 64, dtype=torch.bfloat16, requires_grad=True)
        layer(x, BlockContext(positions, layer.attention.position_tables(positions, 256, x.dtype)))
    measured = sum(size for pointer, size in kept.items() if pointer not in weights)
    return measured / block_bytes(plan.workload_on("cpu"))


@pytest.mark.slow
def test_dropout_differs_between_shares_and_the_plan_counts_shares():
    for ratio in run_ranks(2, drops_and_keeps):
        assert ratio == pytest.approx(1.0, rel=0.1)


def compiled_blocks() -> list[list[str]]:
    """Train with compiled blocks as without; return what their backward graphs call, in order."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    grid = ParallelGrid.build(Topology(tp_size=2, sequence_parallel=True))
    tokens, labels, mask = batch()
    calls: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: object) -> object:
        calls.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=record,
        partition_fn=min_cut_rematerialization_partition,
    )
    results = []
    for compiled in (False, True):
        model = GPT(small_plan(2, model_parallel_size=2, sequence_parallel=True, hidden_dropout=0.1), grid)
        for block in model.blocks if compiled else ():
            block.compile(fullgraph=True, backend=backend)
        grid.seed(3)
        loss = causal_lm_loss(model, tokens, labels, mask)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    return calls


@pytest.mark.slow
def test_a_compiled_block_is_one_graph_that_gathers_again_and_overlaps():
    for calls in run_ranks(2, compiled_blocks, timeout=300)[0]:
        assert sum("all_gather" in call for call in calls) == 4  # two products' inputs, two outputs' gradients
        starts = [at for at, call in enumerate(calls) if "reduce_scatter" in call]
        assert len(starts) == 2
        for start in starts:  # the weight's gradient is computed meanwhile
            waits = [at for at in range(start, len(calls)) if "wait_tensor" in calls[at]]
            assert any("aten.mm" in call for call in calls[start : waits[-1]])
