"""Passes, losses, optimizers and DeepSpeed's engines on fake CUDA tensors, which are on no other device.

Each case raises where tensors of two devices meet, and returns what the host waited for. A quick choice has a case of
each group; the test of the checker shows that a case of each group fails on a tensor of the CPU and on a wait.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from neox.engine.build_engine import multiply_in_fp8
from neox.model import GPT, Context
from neox.objectives import CausalLM, Objective, ScoreTable, build_objective
from neox.objectives.distillation import Distilled
from neox.objectives.dpo import DPO
from neox.objectives.ipo import IPO
from neox.objectives.kto import KTO
from neox.objectives.orpo import ORPO
from neox.objectives.reward import RewardModel
from neox.objectives.simpo import SimPO
from neox.optim import CLASSES, ClippedOptimizer, NormScope
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan
from tests.fake_cuda import CUDA, fake_cuda, let_autograd_run
from tests.plans import small_plan

TOPK = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk"}
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"checkpoint_activations": True},
    "recompute of parts": {"checkpoint_activations": True, "recompute_granularity": "selective"},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "dropout and recompute": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "checkpoint_activations": True},
    "tiles": {"mlp_tile_size": 4},
    "lora": {"lora": {"r": 2, "dropout": 0.1}},
    "row head": {"output_layer_parallelism": "row"},
    "tied": {"no_weight_tying": False},
    "layer scaling": {"apply_query_key_layer_scaling": True},
    "fp8 tensorwise": {"precision": "bf16", "fp8": "tensorwise", "hidden_size": 64, "seq_length": 16},
    "fp8 rowwise": {"precision": "bf16", "fp8": "rowwise", "hidden_size": 64, "seq_length": 16},
    "experts": {**TOPK, "moe_ffn_hidden_size": 32},
    "capacity": {**TOPK, "moe_ffn_hidden_size": 32, "moe_expert_capacity_factor": 1.0},
    "sinkhorn": {"moe_num_experts": 4, "moe_top_k": 1, "moe_ffn_hidden_size": 32},
}
OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "dpo": partial(DPO, beta=0.1),
    "ipo": partial(IPO, beta=0.1),
    "kto": partial(KTO, beta=0.1),
    "orpo": partial(ORPO, beta=0.1),
    "simpo": partial(SimPO, beta=0.1, gamma=0.5),
    "reward": partial(RewardModel, 0.1, 0.1),
    "distillation forward": partial(Distilled, direction="forward", temperature=2.0, weight=0.5),
    "distillation reverse": partial(Distilled, direction="reverse", weight=0.5),
    "z-loss": partial(CausalLM, 0.1),
}
OPTIMIZERS = [name for name in CLASSES if not name.endswith("8bit")]  # those have kernels of their own
LAYOUTS: dict[str, dict[str, Any]] = {
    f"{precision} zero {zero}": {"precision": precision, "zero": zero}
    for precision in ("bf16", "fp16", "fp32")
    for zero in range(4)
} | {
    "offload": {
        "precision": "bf16",
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    },
    "experts in an engine": {"precision": "bf16", "zero": 1, **TOPK, "moe_ffn_hidden_size": 32},
    "replicas": {"precision": "bf16", "zero": 1, "check_replicas_every": 1},
    "average": {"precision": "bf16", "zero": 1, "ema_decay": 0.9},
    "stability": {"precision": "bf16", "zero": 1, "log_stability_every": 1},
    "label weights": {"precision": "bf16", "zero": 1, "loss_normalization": "tokens"},
    "tensor ranks": {"precision": "bf16", "zero": 1, "mp": 2},
    "sequence parallel": {"precision": "bf16", "zero": 1, "mp": 2, "sequence_parallel": True},
    "muon in an engine": {"precision": "bf16", "zero": 1, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
}
GROUPS = {"settings": SETTINGS, "objectives": OBJECTIVES, "optimizers": OPTIMIZERS, "engines": LAYOUTS}
QUICK = ("dropout and recompute", "dpo", "adam", "bf16 zero 1")
WORLD = 8


def expect_on_gpu(model: torch.nn.Module) -> None:
    """Check that all parameters, buffers and gradients are on the GPU."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device == CUDA, f"{name} is on {tensor.device}"
        assert tensor.grad is None or tensor.grad.device == CUDA, f"the gradient of {name} is on {tensor.grad.device}"


def train_once(plan: RunPlan, objective: Objective, batch: dict[str, Tensor], waits: list[str]) -> None:
    """A forward and a backward pass."""
    grid = ParallelGrid.single()
    grid.seed(3)
    model = GPT(plan, grid, device=CUDA, dtype=torch.bfloat16)
    multiply_in_fp8(model, plan, CUDA)
    waits.clear()
    inputs = objective.inputs(batch)
    loss = partial(objective.scores, targets=objective.targets(batch))
    scores = model(inputs.pop("tokens"), Context(**inputs), loss)
    assert scores.device == CUDA
    assert scores.shape == (1 + 2 * len(ScoreTable(objective).rows),)
    scores[0].backward()
    expect_on_gpu(model)


def causal_batch() -> dict[str, Tensor]:
    tokens = torch.zeros(2, 16, dtype=torch.long, device=CUDA)
    teacher = torch.zeros(2, 16, 4, device=CUDA)
    return {
        "tokens": tokens,
        "labels": tokens.clone(),
        "loss_mask": torch.ones(2, 16, device=CUDA),
        "teacher_ids": teacher.long(),
        "teacher_logits": teacher.bfloat16(),
    }


def pairs() -> dict[str, Tensor]:
    ids = ("tokens", "labels", "document_starts", "slots", "in_answer")
    return {
        **{name: torch.zeros(2, 16, dtype=torch.long, device=CUDA) for name in ids},
        "pair_mask": torch.ones(2, 2, device=CUDA),
        "ends": torch.zeros(2, 4, dtype=torch.long, device=CUDA),
        "reference": torch.zeros(2, 4, device=CUDA),
        "desirable": torch.zeros(2, 2, device=CUDA),
    }


def with_settings(name: str, waits: list[str]) -> None:
    plan = small_plan(**{"precision": "bf16", **SETTINGS[name]})
    train_once(plan, build_objective(plan), causal_batch(), waits)


def with_objective(name: str, waits: list[str]) -> None:
    objective = OBJECTIVES[name]()
    keys = {"train_impl": "rm"} if name == "reward" else {}
    train_once(small_plan(precision="bf16", **keys), objective, causal_batch() | pairs(), waits)


def optimizer_steps(name: str, waits: list[str]) -> None:
    """Two clipped steps."""
    weights = [torch.nn.Parameter(torch.zeros(shape, device=CUDA)) for shape in ((8, 8), (8,), (8, 16))]
    groups: list[dict[str, Any]] = [
        {"params": weights[:2], "weight_decay": 0.1},
        {"params": weights[2:], "weight_decay": 0.1, "hidden": True},
    ]
    scope = NormScope(None, lambda _: True)
    optimizer: ClippedOptimizer = CLASSES[name](groups, lr=0.1, max_norm=0.5, scope=scope)
    waits.clear()
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    for weight in weights:
        for state, value in optimizer.state[weight].items():
            assert not isinstance(value, Tensor) or not value.dim() or value.device == CUDA, state


def engine_steps(name: str, waits: list[str]) -> None:
    """Two steps and an evaluation by DeepSpeed's engine, on one of eight ranks whose collectives do nothing."""
    import deepspeed
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from torch.distributed._tools import fake_collectives  # noqa: F401  (shapes of collectives)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from neox.engine import initialize_engine

    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    eager = {"train_batch_size": 16, "compile_layers": False}
    plan = tiny_plan(WORLD, **eager, **(fp16 if name.startswith("fp16") else {}), **LAYOUTS[name])
    new_group = dist.new_group
    agreed = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")
    with ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.dict(os.environ, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD)}))
        patch(mock.patch.object(real_accelerator, "ds_accelerator", CUDA_Accelerator()))
        for unused in ("range_push", "range_pop"):
            patch(mock.patch.object(CUDA_Accelerator, unused, do_nothing))
        patch(mock.patch("neox.engine.engine.StepValues", FakeValues))
        patch(mock.patch.object(torch.nn.Module, "_apply", lambda self, *_, **__: self))  # all is made on the GPU
        patch(mock.patch.object(dist, "new_group", lambda ranks=None, **_: new_group(ranks)))
        patch(mock.patch.object(dist, "all_gather_object", same_everywhere))
        patch(mock.patch.object(dist, "broadcast_object_list", do_nothing))
        for module in [module for key, module in sys.modules.items() if key.startswith("deepspeed.runtime.zero.")]:
            for check in agreed:
                if hasattr(module, check):
                    patch(mock.patch.object(module, check, do_nothing))
        dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
        try:
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
            engine = initialize_engine(plan, ParallelGrid.build(plan.grid), CUDA)
            expect_on_gpu(engine.deepspeed_engine.module)
            waits.clear()
            data = ({key: value.pin_memory() for key, value in batch.items()} for batch in batches(plan, 0))
            for _ in range(2):
                engine.train_batch(data)
            trained = list(waits)
            engine.eval_batch(data)
            waits[:] = trained  # an evaluation reads its scores
        finally:
            dist.destroy_process_group()


def do_nothing(*_: Any, **__: Any) -> None: ...


def same_everywhere(found: list[Any], own: Any, group: dist.ProcessGroup | None = None) -> None:
    found[:] = [own] * len(found)


class FakeValues:
    """The numbers of a step, which fake tensors do not have."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.count = count

    def put(self, rows: Tensor, norm: Tensor | float) -> None:
        assert rows.device == CUDA

    def take(self) -> tuple[list[list[float]], float]:
        return [[1.0, 1.0]] * self.count, 1.0


RUN = {"settings": with_settings, "objectives": with_objective, "optimizers": optimizer_steps, "engines": engine_steps}
NORM = {"item at optim/clipping.py:global_norm"}
BF16_NORM = {"tolist at engine/deepspeed_patches/bf16_optimizer.py:_norm_and_factor"}
OFFLOADED = "engine/deepspeed_patches/zero_optimizer.py"
ANSWERS = {"nonzero at objectives/preferences.py:select_tokens"}
# What the host may wait for, besides DeepSpeed's own waits, as counted in `test_host_waits.py` with the reasons.
ALLOWED: dict[str, set[str]] = {
    "sinkhorn": {"__bool__ at ops/routing.py:log_sinkhorn"},
    **dict.fromkeys(("dpo", "ipo", "kto", "simpo"), ANSWERS),
    "orpo": ANSWERS | {"nonzero at objectives/preferences.py:cross_entropy"},
    **dict.fromkeys(OPTIMIZERS, NORM),
    **{name: NORM for name in LAYOUTS if name.endswith("zero 0")},
    **{name: BF16_NORM for name, keys in LAYOUTS.items() if keys["precision"] == "bf16" and keys.get("zero") == 1},
    "offload": {
        f"__bool__ at {OFFLOADED}:local_overflow",
        f"copy from cuda at {OFFLOADED}:complete_grad_norm_calculation_for_cpu_offload",
    },
}
# A function that runs in the quick case of each group.
DISTURBED = {
    "settings": "neox.model.mlp.MLP.forward",
    "objectives": "neox.objectives.dpo.DPO.pair_scores",
    "optimizers": "neox.optim.adamw.AdamW.update",
    "engines": "neox.engine.engine.Engine._before_update",
}


def wait_once() -> None:
    torch.ones(2, device=CUDA).sum().item()


def use_the_cpu() -> None:
    torch.ones(2, device=CUDA) + torch.ones(2)


@contextmanager
def disturbed(target: str, action: Callable[[], None]) -> Iterator[None]:
    """Let a method do something before."""
    module, kind, name = target.rsplit(".", 2)
    original = getattr(getattr(sys.modules[module], kind), name)

    def first(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    with mock.patch(target, first):
        yield


def run_cases(names: Sequence[str], action: Callable[[], None] | None = None) -> dict[str, set[str] | str]:
    """Return the places at which the host waited in each case, or the traceback of its failure.

    Args:
        names: The cases.
        action: What a function of each group does besides.
    """
    import neox.engine.engine  # noqa: F401  (patched by name)

    let_autograd_run()
    dist.destroy_process_group()
    found: dict[str, set[str] | str] = {}
    with fake_cuda() as waits:
        for name in names:
            group = next(group for group, cases in GROUPS.items() if name in cases)
            changed = nullcontext() if action is None else disturbed(DISTURBED[group], action)
            try:
                with changed:
                    RUN[group](name, waits)
                found[name] = set(waits)
            except Exception:
                found[name] = traceback.format_exc()
    with tempfile.TemporaryDirectory() as directory:  # for the barrier of `run_ranks`
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    return found


def check(names: Sequence[str]) -> None:
    for name, waits in run_ranks(1, run_cases, names)[0].items():
        assert not isinstance(waits, str), waits
        ours = {wait for wait in waits if " at deepspeed/" not in wait}
        assert ours == ALLOWED.get(name, set()), name


def test_a_case_of_each_group() -> None:
    check(QUICK)


def test_a_wait_and_a_tensor_of_the_cpu_are_found() -> None:
    [found] = run_ranks(1, run_cases, ("adam",), wait_once)
    assert any(wait.startswith("item at ") for wait in found["adam"] - ALLOWED["adam"])
    [found] = run_ranks(1, run_cases, ("adam",), use_the_cpu)
    assert "FakeTensorDeviceMismatchError" in found["adam"]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_cases(group: str) -> None:
    check([name for name in GROUPS[group] if name not in QUICK])


@pytest.mark.slow
def test_a_wait_and_a_tensor_of_the_cpu_are_found_in_each_group() -> None:
    for name, waits in run_ranks(1, run_cases, QUICK, wait_once)[0].items():
        assert any(wait.startswith("item at ") for wait in set(waits) - ALLOWED.get(name, set())), name
    for name, failure in run_ranks(1, run_cases, QUICK, use_the_cpu)[0].items():
        assert "FakeTensorDeviceMismatchError" in failure, name
