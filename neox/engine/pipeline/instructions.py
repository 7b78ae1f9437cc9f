"""A pipeline schedule as DeepSpeed's engine runs it: the instructions of one stage in one step.

`neox.plan.ranks.pipeline_schedules` says in which order a stage runs its passes. Here each pass is surrounded by what
it receives and sends:

    load a batch | ask for what the next pass needs | wait for this pass's input | forward or backward | send the result

Messages are asked for one pass ahead, so that they travel while a pass is computed. Nobody waits for a message to be
taken.

Two stages, `1f1b`, two micro batches. F1 is the forward pass of micro batch 1, B1 its backward pass:

    stage 0   load F0 send | load ask(B0) F1 send | ask(B1) receive B0 | receive B1, reduce | tied, rest, update
    stage 1   load receive F0 | ask(F1) B0 send | load receive F1 | B1 send, reduce | tied, rest, update

A stage may hold several ranges of layers. It finds its neighbours by their places in the network: the range after place
3 is at place 4, and `stage_of` says who holds it. Two stages with two ranges each, `interleaved`; F1.0 is the forward
pass of range 1 and micro batch 0:

    place                  0         1         2         3
    stage, range           0, 0      1, 0      0, 1      1, 1
    order on stage 0       F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3
    order on stage 1       F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3

So the output of F0.1 on stage 1 (place 1) goes to F1.1 on stage 0 (place 2), and the gradients of B1.1 on stage 0 go
back to B0.1 on stage 1. `PassOrder.input_of` and `output_of` do this for every pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from deepspeed.runtime.pipe.schedule import (
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    ReduceGrads,
    ReduceTiedGrads,
)

from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES, Pass, PipelineSchedule, forward_order


class Message(NamedTuple):
    """What a pass on one stage gives to a pass on another one, or on the same one.

    Attributes:
        source: Stage that sends it.
        target: Stage that receives it.
        made_by: The pass that makes it.
        made_at: Number of that pass among those of its stage.
        needed_by: The pass that needs it.
        needed_at: Number of that pass among those of its stage.
    """

    source: int
    target: int
    made_by: Pass
    made_at: int
    needed_by: Pass
    needed_at: int


class LoadBatch(PipeInstruction):  # type: ignore[misc]
    """Instruction to read the next micro batch."""


class AskFor(PipeInstruction):  # type: ignore[misc]
    """Instruction to prepare for a message, and for all that its sender sends before it."""


class ReceiveActivation(PipeInstruction):  # type: ignore[misc]
    """Instruction to wait for the hidden states that a forward pass needs."""


class ReceiveGradient(PipeInstruction):  # type: ignore[misc]
    """Instruction to wait for the gradients that a backward pass needs."""


class Forward(PipeInstruction):  # type: ignore[misc]
    """Instruction to run a forward pass."""


class Backward(PipeInstruction):  # type: ignore[misc]
    """Instruction to run a backward pass."""


class SendActivation(PipeInstruction):  # type: ignore[misc]
    """Instruction to send what a forward pass has computed."""


class SendGradient(PipeInstruction):  # type: ignore[misc]
    """Instruction to send what a backward pass has computed."""


class ReduceRange(PipeInstruction):  # type: ignore[misc]
    """Instruction to start the reduction of a range's gradients, whose last backward pass is done."""


@dataclass(frozen=True)
class PassOrder:
    """Passes of all stages in one step, and the messages between them.

    Attributes:
        name: Value of `pipeline_schedule`.
        stages: Number of stages.
        ranges: Ranges of layers on each stage.
        micro_batches: Micro batches of the step.
        is_training: Whether backward passes follow.
    """

    name: str
    stages: int
    ranges: int
    micro_batches: int
    is_training: bool

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """Entry of the table."""
        return PIPELINE_SCHEDULES[self.name]

    @cached_property
    def passes(self) -> list[list[Pass]]:
        """Passes of each stage."""
        if not self.is_training:
            return [forward_order(self.stages, self.ranges, self.micro_batches)] * self.stages
        return [
            self.schedule.order(stage, self.stages, self.ranges, self.micro_batches) for stage in range(self.stages)
        ]

    @cached_property
    def _numbers(self) -> list[dict[Pass, int]]:
        """Number of each pass among those of its stage."""
        return [{work: number for number, work in enumerate(passes)} for passes in self.passes]

    def input_of(self, stage: int, work: Pass) -> Message | None:
        """Return the message that a pass of a stage needs; None if its input is a batch or the loss."""
        place = self.schedule.place(stage, work.chunk, self.stages)
        before = place + 1 if work.backward else place - 1
        if not 0 <= before < self.stages * self.ranges:
            return None
        source, chunk = self._holder(before)
        made_by = work._replace(chunk=chunk)
        return Message(source, stage, made_by, self._numbers[source][made_by], work, self._numbers[stage][work])

    def output_of(self, stage: int, work: Pass) -> Message | None:
        """Return the message that a pass of a stage makes; None if nobody needs it."""
        place = self.schedule.place(stage, work.chunk, self.stages)
        after = place - 1 if work.backward else place + 1
        if not 0 <= after < self.stages * self.ranges:
            return None
        target, chunk = self._holder(after)
        return self.input_of(target, work._replace(chunk=chunk))

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], Sequence[Message]]:
        """Messages from one stage to another, by (source, target), in the order in which they are sent."""
        found: dict[tuple[int, int], list[Message]] = {}
        for source, passes in enumerate(self.passes):
            for work in passes:
                message = self.output_of(source, work)
                if message is not None and message.target != source:
                    found.setdefault((source, message.target), []).append(message)
        return found

    def _holder(self, place: int) -> tuple[int, int]:
        """Return the stage that holds the range at a place, and the range's number there."""
        stage = self.schedule.stage_of(place, self.stages)
        for chunk in range(self.ranges):
            if self.schedule.place(stage, chunk, self.stages) == place:
                return stage, chunk
        raise AssertionError(f"no stage holds the range at place {place}")

    def loads(self, stage: int, work: Pass) -> bool:
        """Return whether a pass begins with the next micro batch: of tokens, or of targets if it is the last range."""
        if work.backward:
            return False
        first = (self.schedule.stage_of(0, self.stages), 0)
        if (stage, work.chunk) == first:
            return True
        return first[0] != stage and (stage, work.chunk) == self._holder(self.stages * self.ranges - 1)


class PassSchedule(PipeSchedule):  # type: ignore[misc]
    """Instructions of one stage in one step.

    Args:
        order: Passes of all stages.
        stage: Number of the stage.
    """

    def __init__(self, order: PassOrder, stage: int) -> None:
        super().__init__(micro_batches=order.micro_batches, stages=order.stages, stage_id=stage)
        self.order = order

    def num_pipe_buffers(self) -> int:
        """Return the number of DeepSpeed's buffers: one for each range and micro batch. They are freed after use."""
        return self.order.ranges * self.order.micro_batches

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions around each pass, and those of the update."""
        passes = self.order.passes[self.stage_id]
        inputs = [self.order.input_of(self.stage_id, work) for work in passes]
        last_of_range = {work.chunk: work for work in passes if work.backward}
        for work, given, following in zip(passes, inputs, [*inputs[1:], None], strict=True):
            commands = list(self._around(work, given, following))
            if last_of_range.get(work.chunk) == work:
                commands.append(ReduceRange(chunk=work.chunk))
            yield commands
        if self.order.is_training:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def _around(self, work: Pass, given: Message | None, following: Message | None) -> Iterator[PipeInstruction]:
        """Yield a pass between what it receives and sends.

        Args:
            work: The pass.
            given: What it needs.
            following: What the next pass needs.
        """
        if self.order.loads(self.stage_id, work):
            yield LoadBatch(micro_batch=work.micro_batch)
        if following is not None:
            yield AskFor(message=following)
        made = self.order.output_of(self.stage_id, work)
        if work.backward:
            if given is not None:
                yield ReceiveGradient(message=given)
            yield Backward(work=work)
            if made is not None:
                yield SendGradient(message=made)
            return
        if given is not None:
            yield ReceiveActivation(message=given)
        yield Forward(work=work)
        if made is not None:
            yield SendActivation(message=made)
