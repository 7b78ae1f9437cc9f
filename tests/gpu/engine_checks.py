"""What the engine must do on any one device: each check runs on a GPU where there is one, and on a CPU else.

Numbers are compared with a plain loop in fp32 on the CPU. Bit-exactness is claimed on CPUs alone; these bounds are for
all devices.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

import neox.model.build
from neox.engine import BackgroundSaves, Engine, initialize_distributed, initialize_engine, open_engine
from neox.features.table import build_features
from neox.generation.decoding import decode
from neox.generation.load import load_model
from neox.generation.request import SamplingParams
from neox.model import GPT
from neox.optim import LRSchedule, NormScope, build_optimizer
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from tests.distributed.training_runs import batches, tiny_plan
from tests.losses import causal_lm_loss
from tests.plans import NETWORKS, SMALL
from tests.unit.generation.random_model import logits, runner

STEPS = 4
BOUNDS = {"fp32": 2e-4, "fp16": 5e-3, "bf16": 2e-2}
PRECISIONS = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}, "bf16": {"precision": "bf16"}}


def plain_curve() -> list[float]:
    """Losses of a plain loop: four micro batches, clipping, AdamW, schedule."""
    plan, grid = tiny_plan(1), ParallelGrid.single()
    model = GPT(plan, grid)
    optimizer = build_optimizer(plan, model.named_parameters(), NormScope(None, lambda _: True))
    schedule, data, losses = LRSchedule(plan, optimizer), batches(plan, 0), []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(plan.batch.gradient_accumulation_steps):
            batch = next(data)
            loss = causal_lm_loss(model, batch["tokens"], batch["labels"], batch["loss_mask"])
            (loss / plan.batch.gradient_accumulation_steps).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total / plan.batch.gradient_accumulation_steps)
    return losses


def build(plan: RunPlan) -> Engine:
    """Return an engine with initial weights."""
    return initialize_engine(plan, *initialize_distributed(plan), build_features)


def curve(engine: Engine, steps: int = STEPS) -> list[float]:
    """Return the losses of the engine's next steps."""
    data = batches(engine.plan, 0, engine.iteration * engine.plan.batch.gradient_accumulation_steps)
    return [engine.train_batch(data).loss for _ in range(steps)]


def close(ours: list[float], expected: list[float], precision: str) -> None:
    """Compare losses within the bound of a precision."""
    bound = BOUNDS[precision]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=bound, atol=0)


def losses_follow_the_plain_loop(precision: str, zero: int, **keys: object) -> None:
    """The curve of a precision and a ZeRO stage."""
    plan = tiny_plan(1, zero=zero, **PRECISIONS[precision], **keys)
    close(curve(build(plan)), plain_curve(), precision)


def experts_in_bf16_follow_fp32(**keys: object) -> None:
    """The curve of a mixture of experts, whose products are grouped on a GPU in bf16."""
    network = {**NETWORKS["experts"], "moe_ffn_hidden_size": 24, **keys}
    expected = curve(build(tiny_plan(1, **network)))
    close(curve(build(tiny_plan(1, zero=1, **PRECISIONS["bf16"], **network))), expected, "bf16")


def fp8_follows_bf16(recipe: str, **keys: object) -> None:
    """A curve near bf16's that is another one; evaluation and weights are those of bf16."""
    curves, scores = [], []
    for fp8 in ({}, {"fp8": recipe}):
        plan = tiny_plan(1, zero=1, precision="bf16", **fp8, **keys)
        engine = build(plan)
        scores.append(engine.eval_batch(batches(plan, 0)).scores)
        curves.append(curve(engine))
        assert {parameter.dtype for parameter in engine.deepspeed_engine.module.parameters()} == {torch.bfloat16}
    close(curves[1], curves[0], "bf16")
    assert curves[0] != curves[1]
    assert scores[0] == scores[1]


def recomputation_repeats_dropout() -> None:
    """Equal curves with and without recomputation, and another one without dropout."""
    keys = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    kept, again = (curve(build(tiny_plan(1, checkpoint_activations=on, **keys))) for on in (False, True))
    close(again, kept, "fp32")
    assert max(abs(with_dropout - without) for with_dropout, without in zip(kept, plain_curve(), strict=True)) > 1e-2


def a_resumed_run_goes_on(directory: Path, precision: str = "bf16", zero: int = 1) -> None:
    """Save in the background after two steps, train on, and resume: the copies are of the moment of the save."""
    keys = {**PRECISIONS[precision], "zero": zero, "save": str(directory), "async_save": True}
    whole = build(tiny_plan(1, **keys))
    curve(whole, 2)
    saves = BackgroundSaves(whole)
    saves.start(directory)
    rest = curve(whole, 2)  # changes what is being written
    saves.wait()
    assert [report.iteration for report in saves.take_reports()] == [2]
    plan = tiny_plan(1, **keys, load=str(directory))
    resumed = open_engine(plan, *initialize_distributed(plan), build_features)
    assert resumed.iteration == 2
    close(curve(resumed, 2), rest, "fp32")


def updates_wait_for_copies() -> None:
    """The update after a background save is queued behind its copies."""
    engine = build(tiny_plan(1, zero=1, precision="bf16"))
    weights = next(engine.deepspeed_engine.module.parameters())
    before, seen = weights.detach().clone(), []

    engine.before_next_overwrite(lambda: seen.append(torch.equal(weights, before)))
    data = batches(engine.plan, 0)
    for _ in range(3):  # the first step's learning rate is 0
        engine.train_batch(data)
    assert seen == [True]
    assert not torch.equal(weights, before)


def generates_what_the_cpu_does(directory: Path) -> None:
    """Greedy continuations of a saved model on this device and on the CPU, in fp32."""
    engine = build(tiny_plan(1, save=str(directory)))
    curve(engine, 2)
    saves = BackgroundSaves(engine)
    saves.start(directory)
    saves.wait()
    params, codec = SamplingParams(max_new_tokens=6), SimpleNamespace(eod=59, end_ids=(59,), decode_shown=str)
    texts = []
    for device in (torch.device("cpu"), engine.device):
        plan = tiny_plan(1)
        model = load_model(plan, directory / "global_step2", ParallelGrid.single(), device)
        texts.append([result.tokens for result in decode(model, [[1, 2, 3], [4, 5]], params, codec)])
    assert texts[0] == texts[1]


def recorded_steps_give_the_usual_logits(
    device: torch.device, name: str, dtype: str = "fp32", lengths: tuple[int, ...] = (3, 6, 5)
) -> None:
    """Logits of a prompt and of steps of fixed shapes, beside those of steps whose shapes grow."""
    keys = {**SMALL, "init_method_std": 0.2, **NETWORKS[name]}
    usual, recorded = (runner(parallel_residual=False, dtype=dtype, device=device, **keys) for _ in range(2))
    recorded.recorded = True
    expected, found = (logits(model, lengths, steps=5) for model in (usual, recorded))
    bound = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.15}[dtype]
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)
    if dtype == "fp32":
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def big_networks_have_the_weights_of_a_cpu(device: torch.device) -> None:
    """Initial weights do not depend on the device, nor on its kind."""
    plan, grid = tiny_plan(1), ParallelGrid.single()
    with mock.patch.object(neox.model.build, "DRAWN_IN_PIECES", 0):
        usual = GPT(plan, grid)
        found = GPT(plan, grid, device=device)
    for name, weight in found.named_parameters():
        assert torch.equal(weight.cpu(), usual.get_parameter(name)), name
