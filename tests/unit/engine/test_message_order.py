"""Messages between pipeline stages in the order in which NCCL would run them: does every step end?

Each stage's host queues its passes, sends and receives without waiting, by the project's own schedule and mailbox. On
the device an operation starts when the one before it in its stream has ended, when what the rank's compute stream held
at the time of the call is done, and when both of its ranks have reached it. A step hangs if these conditions form a
circle.

Which stream an operation gets depends on how the process groups are made. With a device bound to the default group
every group has one communicator and one stream on each rank (pytorch#132900, pytorch#154132); without, every two ranks
of a group have a communicator of their own. The first test reads from the start of a rank which of both it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import deepspeed.comm.comm
import pytest
import torch
import torch.distributed as dist

from neox.engine import distributed
from neox.engine.pipeline import messages
from neox.engine.pipeline.instructions import (
    AskFor,
    Backward,
    Forward,
    PassOrder,
    PassSchedule,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from neox.engine.pipeline.messages import Mailbox
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES
from tests.distributed.training_runs import tiny_plan

TENSOR = torch.zeros(1)
FORM = ((TENSOR.shape, TENSOR.dtype),)


def binds_a_device(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Start rank 0 of two on a machine whose accelerator says that it is CUDA; return whether its device was bound."""
    calls: list[dict] = []
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    accelerator = SimpleNamespace(
        device_name=lambda *_: "cuda",
        device=lambda index: torch.device("cuda", index),
        communication_backend_name=lambda: "nccl",
        create_op_builder=lambda _: None,
    )
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)
    monkeypatch.setattr(deepspeed.comm.comm, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(import_module("deepspeed.comm.torch"), "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(calls))
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    # the signature says whether torch takes a device
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, device_id=None, **_: calls.append({"device": device_id})
    )
    monkeypatch.setattr(distributed, "choose_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(distributed, "use_deterministic_algorithms", lambda *_: None)
    monkeypatch.setattr(distributed.ParallelGrid, "build", lambda *_: None)
    distributed.initialize_distributed(tiny_plan(2, pp=2))
    assert len(calls) == 1
    return calls[0]["device"] is not None


class DeviceGraph:
    """Operations of all ranks on their devices, and what each of them waits for."""

    def __init__(self, *, bound: bool) -> None:
        self.bound = bound
        self.before: list[set[int]] = []
        self.pairs: dict[tuple, int] = {}

    def node(self) -> int:
        self.before.append(set())
        return len(self.before) - 1

    def ends(self) -> bool:
        """Whether all operations end."""
        after: list[list[int]] = [[] for _ in self.before]
        waits_for = [len(earlier) for earlier in self.before]
        for node, earlier in enumerate(self.before):
            for one in earlier:
                after[one].append(node)
        ready = [node for node, count in enumerate(waits_for) if count == 0]
        ended = 0
        while ready:
            ended += 1
            for node in after[ready.pop()]:
                waits_for[node] -= 1
                if waits_for[node] == 0:
                    ready.append(node)
        return ended == len(self.before)


class Rank:
    """One stage's device: its compute stream and its NCCL streams."""

    def __init__(self, graph: DeviceGraph, stage: int) -> None:
        self.graph = graph
        self.stage = stage
        self.last_computed: int | None = None
        self.last_in: dict[object, int] = {}
        self.asked: Counter = Counter()
        self.groups: list[str] = []

    def compute(self, *waits_for: int) -> None:
        node = self.graph.node()
        self.graph.before[node].update(waits_for)
        if self.last_computed is not None:
            self.graph.before[node].add(self.last_computed)
        self.last_computed = node

    def operation(self, source: int, target: int, group: str) -> int:
        """Queue this rank's side of a message; both sides are one operation."""
        number = self.asked[source, target]
        self.asked[source, target] += 1
        key = (source, target, number)
        if key not in self.graph.pairs:
            self.graph.pairs[key] = self.graph.node()
        node = self.graph.pairs[key]
        stream = group if self.graph.bound else (group, frozenset((source, target)))
        if stream in self.last_in:
            self.graph.before[node].add(self.last_in[stream])
        self.last_in[stream] = node
        if self.last_computed is not None:
            self.graph.before[node].add(self.last_computed)
        return node

    def work(self, node: int) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: self.compute(node))

    @contextmanager
    def as_torch_distributed(self) -> Iterator[None]:
        """Let the mailbox speak to this device."""

        def receive(tensor: torch.Tensor, source: int, group: str) -> None:
            self.compute(self.operation(source, self.stage, group))
            if tensor.dtype == torch.int64:  # a form: the host reads it
                tensor.copy_(torch.tensor(messages._encoded([TENSOR])))

        def new_group() -> str:
            self.groups.append(f"group {len(self.groups)}")
            return self.groups[-1]

        faked = SimpleNamespace(
            new_group=new_group,
            isend=lambda tensor, target, group: self.work(self.operation(self.stage, target, group)),
            irecv=lambda tensor, source, group: self.work(self.operation(source, self.stage, group)),
            send=lambda tensor, target, group: self.compute(self.operation(self.stage, target, group)),
            recv=receive,
        )
        with mock.patch.object(messages, "dist", faked):
            yield


def step_ends(order: PassOrder, *, bound: bool) -> bool:
    """Return whether the first two steps of an order end."""
    graph = DeviceGraph(bound=bound)
    training = PassOrder(order.name, order.stages, order.ranges, order.micro_batches, is_training=True)
    for stage in range(order.stages):
        rank = Rank(graph, stage)
        forwarded: set = set()

        def form(message, forwarded=forwarded):
            return FORM if message.needed_by._replace(backward=False) in forwarded else None

        with rank.as_torch_distributed():
            mailbox = Mailbox(stage, range(order.stages), torch.device("cpu"), None, form)
            mailbox.connect(training)
            for _ in range(2):
                forwarded.clear()
                mailbox.begin(order)
                for command in (command for step in PassSchedule(order, stage).steps() for command in step):
                    run_command(command, mailbox, rank, forwarded)
                mailbox.finish()
    return graph.ends()


def run_command(command, mailbox: Mailbox, rank: Rank, forwarded: set) -> None:
    """Do what the engine does for an instruction."""
    if isinstance(command, AskFor):
        mailbox.ask(command.message)
    elif isinstance(command, ReceiveActivation | ReceiveGradient):
        mailbox.take(command.message)
    elif isinstance(command, SendActivation | SendGradient):
        mailbox.send(command.message, [TENSOR])
    elif isinstance(command, Forward | Backward):
        rank.compute()
        if isinstance(command, Forward):
            forwarded.add(command.work)


def orders(most_stages: int, *, stages: int = 2) -> Iterator[PassOrder]:
    """Yield what the plan accepts: all schedules, from one micro batch to two for each stage and one more."""
    for name in PIPELINE_SCHEDULES:
        for count in range(stages, most_stages + 1):
            for ranges in {"1f1b": (1,), "interleaved": (2, 3, 4), "dualpipev": (2,)}[name]:
                least = 2 * count if name == "dualpipev" else 1
                for micro_batches in range(least, 2 * count + 2):
                    for is_training in (True, False):
                        yield PassOrder(name, count, ranges, micro_batches, is_training)


def hanging(most_stages: int, *, bound: bool, stages: int = 2) -> list[PassOrder]:
    return [order for order in orders(most_stages, stages=stages) if not step_ends(order, bound=bound)]


def test_no_step_hangs_with_groups_as_a_rank_makes_them(monkeypatch):
    with monkeypatch.context() as patch:
        bound = binds_a_device(patch)
    assert not hanging(4, bound=bound)


def test_the_model_finds_what_hangs_with_a_bound_device():
    """A stage asks for its next message before it sends, in the same stream: few micro batches, several ranges."""
    found = {(order.name, order.micro_batches, order.is_training) for order in hanging(3, bound=True, stages=3)}
    assert found == {("interleaved", 1, True), ("interleaved", 2, True), ("interleaved", 1, False)}


@pytest.mark.slow
def test_no_step_hangs_with_up_to_eight_stages(monkeypatch):
    with monkeypatch.context() as patch:
        bound = binds_a_device(patch)
    assert not hanging(8, bound=bound, stages=5)
