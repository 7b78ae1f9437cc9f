"""Compiled layers train as the others do, in every engine; each is one graph; what cannot be compiled is refused."""

from __future__ import annotations

import os
import shutil
from functools import partialmethod
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from neox.engine.build_engine import multiply_in_fp8
from neox.engine.compile_cache import keep_compiled_layers, model_of_cpu
from neox.errors import ConfigError
from neox.model import GPT
from neox.ops import DTYPES, FP8_RECIPES
from neox.parallel import ParallelGrid, Topology
from neox.plan.devices.compiled import compiles
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan, train_curves
from tests.losses import causal_lm_loss
from tests.plans import MIXTURES, NETWORKS, networks_for, small_plan

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="torch.compile needs a C++ compiler (Debian: g++)"
)


def compiled_curves(plans, steps, backend):
    """The curves of `plans`, and how many graphs were compiled for each on this rank."""
    from torch._dynamo.utils import counters

    compile_by = partialmethod(torch.nn.Module.compile, backend=backend)
    answers = []
    for plan in plans:
        counters.clear()
        with mock.patch.object(torch.nn.Module, "compile", compile_by):
            curve = train_curves([plan], steps)[0]
        answers.append((curve, counters["stats"]["unique_graphs"]))
    return answers


@needs_compiler
@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        pytest.param({}, "aot_eager", id="traced"),  # the same graphs, without the minute that C++ for them takes
        pytest.param({}, "inductor", id="plain", marks=pytest.mark.slow),
        pytest.param({"pp": 2}, "inductor", id="stages", marks=pytest.mark.slow),
        pytest.param({"mp": 2}, "inductor", id="tensor", marks=pytest.mark.slow),
    ],
)
def test_losses_agree(layout, backend):
    world = 2 if layout else 1
    keys = {"num_layers": 2, "train_micro_batch_size_per_gpu": 2, "checkpoint_activations": True}
    plans = [tiny_plan(world, **layout, **keys, compile_layers=compiled) for compiled in (False, True)]
    (plain, none), (compiled, graphs) = run_ranks(world, compiled_curves, plans, 4, backend, timeout=300)[0]
    assert none == 0
    assert graphs == 1
    for (loss, norm), (loss_compiled, norm_compiled) in zip(plain, compiled, strict=True):
        assert loss_compiled == pytest.approx(loss, rel=1e-5)
        assert norm_compiled == pytest.approx(norm, rel=1e-4)


PARTS = {"checkpoint_activations": True, "recompute_granularity": "full_attn"}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"zero": 3}, "zero_optimization.stage"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling"),
        (PARTS, "recompute_granularity"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(keys, named):
    with pytest.raises(ConfigError) as refused:
        tiny_plan(1, compile_layers=True, **keys)
    assert [problem.keys for problem in refused.value.problems] == [("compile_layers", named)]
    automatic = tiny_plan(1, **keys).config
    assert not compiles(automatic, "cuda")


def test_layers_are_compiled_on_gpus_and_where_a_budget_needs_it():
    assert [compiles(tiny_plan(1).config, family) for family in ("cuda", "cpu")] == [True, False]
    assert not compiles(tiny_plan(1, compile_layers=False).config, "cuda")
    assert compiles(tiny_plan(1, activation_memory_budget=0.5).config, "cpu")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"zero": 3}, "zero_optimization.stage"),
        ({"checkpoint_activations": True}, "checkpoint_activations"),
        ({"compile_layers": False}, "compile_layers"),
    ],
)
def test_a_budget_needs_compiled_layers_and_no_other_recomputation(keys, named):
    with pytest.raises(ConfigError) as refused:
        tiny_plan(1, activation_memory_budget=0.5, **keys)
    assert [problem.keys for problem in refused.value.problems] == [("activation_memory_budget", named)]


def test_a_budget_is_in_the_plan():
    kept, fewer, least = (
        tiny_plan(1, **keys).memory.activations
        for keys in ({}, {"activation_memory_budget": 0.5}, {"checkpoint_activations": True})
    )
    assert kept > fewer > least


FP8 = {recipe: {"precision": "bf16", "fp8": recipe} for recipe in FP8_RECIPES}


def blocks_in_one_graph(tp_size: int, networks: dict[str, dict]) -> dict[str, list[list[str]]]:
    """Train each network once with compiled blocks; return what its backward graphs call, in order.

    With torch's fake process group, whose collectives change nothing: one process traces what each rank would.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp_size)
    grid = ParallelGrid.build(Topology(tp_size=tp_size))
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    calls = {}
    for name, keys in networks.items():
        graphs: list[list[str]] = calls.setdefault(name, [])

        def record(graph: torch.fx.GraphModule, inputs: object, graphs: list = graphs) -> object:
            graphs.append([str(node.target) for node in graph.graph.nodes])
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=record)
        results = []
        for compiled in (False, True):
            plan = small_plan(tp_size, model_parallel_size=tp_size, **keys)
            model = GPT(plan, grid, dtype=DTYPES[plan.precision])
            multiply_in_fp8(model, plan, torch.device("cpu"))
            torch._dynamo.reset()
            for block in model.blocks if compiled else ():
                block.compile(fullgraph=True, backend=backend)
            loss = causal_lm_loss(model, tokens, tokens, torch.ones(2, 16))
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    return calls


def is_one_graph(name: str) -> bool:
    """Experts run outside of graphs, because only the host knows how many tokens each has."""
    return name not in MIXTURES


@pytest.mark.parametrize(
    ("tp_size", "names"),
    [
        pytest.param(2, ("rotary", "mamba"), id="tensor"),
        pytest.param(2, tuple(filter(is_one_graph, networks_for(2))), id="tensor-all", marks=pytest.mark.slow),
        pytest.param(1, tuple(filter(is_one_graph, NETWORKS)), id="plain-all", marks=pytest.mark.slow),
        pytest.param(2, tuple(FP8), id="tensor-fp8", marks=pytest.mark.slow),
        pytest.param(1, tuple(FP8), id="plain-fp8", marks=pytest.mark.slow),
    ],
)
def test_every_block_is_one_graph(tp_size: int, names: tuple[str, ...]):
    networks = {name: {**NETWORKS, **FP8}[name] for name in names}
    (calls,) = run_ranks(1, blocks_in_one_graph, tp_size, networks, timeout=400)
    assert all(calls.values())
    if tp_size == 1:
        return
    for call in calls[names[0]]:  # an input gradient is summed over ranks beside the weight gradient's product
        starts = [at for at, target in enumerate(call) if "all_reduce" in target]
        assert len(starts) == 2
        for start in starts:
            waits = next(at for at in range(start, len(call)) if "wait_tensor" in call[at])
            assert any("aten.mm" in target for target in call[start:waits])


def kept_bytes(budgets: list[float | None]) -> list[tuple[int, list[torch.Tensor]]]:
    """Return for each budget the bytes that the backward pass of one step needs, and the gradients."""
    from torch.autograd.graph import saved_tensors_hooks

    from neox.engine.build_engine import compile_blocks

    results = []
    for budget in budgets:
        keys = {} if budget is None else {"activation_memory_budget": budget}
        plan = small_plan(hidden_size=64, attention_config=[[["flash"], "all"]], compile_layers=True, **keys)
        model = GPT(plan, ParallelGrid.single())
        torch._dynamo.reset()
        compile_blocks(model, plan, torch.device("cpu"))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, int] = {}

        def count(tensor: torch.Tensor, own: set = own, saved: dict = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
        with saved_tensors_hooks(count, lambda tensor: tensor):
            hidden = model.hidden(tokens)
        hidden.square().sum().backward()
        results.append((sum(saved.values()), [p.grad for p in model.parameters() if p.grad is not None]))
    return results


@needs_compiler
@pytest.mark.slow
def test_a_budget_keeps_fewer_activations_and_the_same_gradients():
    (results,) = run_ranks(1, kept_bytes, [None, 0.5, 0.0], timeout=400)
    whole, half, least = (size for size, _ in results)
    assert whole > half > least
    for _, gradients in results[1:]:
        for ours, expected in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def cached_start(plan):
    """Train a step; return (hits, misses) of the compiler's cache."""
    from torch._dynamo.utils import counters

    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    train_curves([plan], 1)
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


@needs_compiler
@pytest.mark.slow
def test_a_second_start_takes_compiled_layers_from_the_run(tmp_path):
    """Both ranks of a host share the directory. Processes are new, as those of a second start."""
    keys = {"num_layers": 2, "compile_layers": True, "zero": 1}
    plan = tiny_plan(2, **keys, log_dir=str(tmp_path))
    first = run_ranks(2, cached_start, plan, timeout=400)
    assert all(hits + misses > 0 for hits, misses in first)
    assert any(misses for _, misses in first)
    assert any((tmp_path / "compile_cache").iterdir())
    for hits, misses in run_ranks(2, cached_start, plan, timeout=400):
        assert (hits > 0, misses) == (True, 0)


def test_the_place_of_compiled_layers(tmp_path):
    beside = {"save": "of checkpoints", "log_dir": str(tmp_path)}
    chosen = str(tmp_path / "compile_cache" / model_of_cpu())
    cases = [
        (beside, {}, chosen),
        (beside, {"TORCHINDUCTOR_CACHE_DIR": "mine"}, "mine"),
        (beside, {"TORCHINDUCTOR_CACHE_DIR": "mine/compile_cache"}, "mine/compile_cache"),
        # A second run of this process goes to its own place.
        ({"save": str(tmp_path / "save")}, {}, str(tmp_path / "save" / "compile_cache" / model_of_cpu())),
        (
            {"save": str(tmp_path / "save")},
            {"TORCHINDUCTOR_CACHE_DIR": chosen, "NEOX_COMPILE_CACHE": chosen},
            str(tmp_path / "save" / "compile_cache" / model_of_cpu()),
        ),
        ({**beside, "compile_cache": False}, {}, None),
        ({}, {}, None),
    ]
    for keys, environment, wanted in cases:
        keep_compiled_layers(small_plan(**keys), environment)
        assert environment.get("TORCHINDUCTOR_CACHE_DIR") == wanted
