"""Messages between pipeline stages: hidden states forward, gradients back, without waiting for each other.

Every stage knows from the schedule which messages another stage sends to it, and in which order. So a message needs no
name, and a receiver can prepare for it before it needs it. Messages up and down the line of ranks have a group each:
NCCL runs what two ranks exchange in one group one after the other, and two ranks that both send first would wait for
each other.

Tensor ranks that hold the same hidden states each send a share of them, and gather the shares that they receive: the
links between tensor ranks are the fast ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from neox.engine.pipeline.instructions import Message, PassOrder

Form = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shape and type of each tensor of a message."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)
_ANNOUNCEMENT = 64
"""Numbers of the tensor that announces a form."""


class _Sent(NamedTuple):
    message: Message
    works: list[dist.Work]
    tensors: list[Tensor]


class _Expected(NamedTuple):
    works: list[dist.Work]
    tensors: list[Tensor]
    form: Form


class Mailbox:
    """Messages of one stage, of one data and tensor rank.

    Args:
        stage: Number of this stage.
        ranks: Rank of each stage.
        device: Device of the tensors.
        sharers: Group of the tensor ranks that hold the same hidden states; None if each has its own.
        form_of_gradient: Function from a message with a gradient to its form, or None while the output is not there.
    """

    def __init__(
        self,
        stage: int,
        ranks: Sequence[int],
        device: torch.device,
        sharers: dist.ProcessGroup | None,
        form_of_gradient: Callable[[Message], Form | None],
    ) -> None:
        self._stage = stage
        self._ranks = ranks
        self._device = device
        self._sharers = sharers
        self._shares = 1 if sharers is None else dist.get_world_size(sharers)
        self._form_of_gradient = form_of_gradient
        self._upward = dist.new_group()
        self._downward = dist.new_group()
        self._coming: dict[int, deque[Message]] = {}
        self._expected: dict[Message, _Expected] = {}
        self._sent: list[_Sent] = []
        self._own: dict[Message, list[Tensor]] = {}
        self._announced: set[tuple[int, int]] = set()
        self._forms: dict[tuple[int, int], Form] = {}

    def connect(self, order: PassOrder) -> None:
        """Open the connections that a schedule needs, by a tensor over each; all stages call it together.

        NCCL opens a connection when it is first used, and both sides wait for that.
        """
        nothing = torch.zeros(1, device=self._device)
        for source, target in sorted(order.routes):
            if source == self._stage:
                dist.send(nothing, self._ranks[target], group=self._group(source, target))
            elif target == self._stage:
                dist.recv(nothing, self._ranks[source], group=self._group(source, target))

    def begin(self, order: PassOrder) -> None:
        """Expect the messages of a step."""
        assert not self._expected
        assert not self._own
        self._coming = {}
        for (source, target), messages in order.routes.items():
            if target == self._stage:
                self._coming[source] = deque(messages)

    def forget_forms(self) -> None:
        """Expect hidden states of another shape from now on; all stages call it together."""
        self._announced.clear()
        self._forms.clear()

    def ask(self, message: Message) -> None:
        """Prepare for a message and for those before it, as far as their forms are known."""
        if message.source != self._stage:
            self._expect(message, self._known_form)

    def take(self, message: Message) -> list[Tensor]:
        """Wait for a message and return it."""
        if message.source == self._stage:
            return self._own.pop(message)
        self._expect(message, self._form)
        expected = self._expected.pop(message)
        for work in expected.works:
            work.wait()
        self._release(message.source, message.made_at)
        return [self._whole(tensor, shape) for tensor, (shape, _) in zip(expected.tensors, expected.form, strict=True)]

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send a message without waiting until it is taken."""
        passed = [tensor.detach().contiguous() for tensor in tensors]
        if message.target == self._stage:
            self._own[message] = passed
            return
        if not message.made_by.backward:
            self._announce(message, passed)
        shares = [self._share(tensor) for tensor in passed]
        self._sent.append(_Sent(message, [self._put(message, tensor) for tensor in shares], shares))

    def finish(self) -> None:
        """Wait until everything has been taken; called at the end of a step."""
        for sent in self._sent:
            for work in sent.works:
                work.wait()
        self._sent.clear()

    def _expect(self, message: Message, form_of: Callable[[Message], Form | None]) -> None:
        """Receive into new tensors all messages of a stage up to one, or to the first one without a form."""
        coming = self._coming[message.source]
        while message not in self._expected:
            form = form_of(coming[0])
            if form is None:
                return
            self._receive(coming.popleft(), form)

    def _receive(self, message: Message, form: Form) -> None:
        tensors = []
        for shape, dtype in form:
            if self._is_shared(shape.numel(), dtype):
                shape = torch.Size([shape.numel() // self._shares])
            tensors.append(torch.empty(shape, dtype=dtype, device=self._device))
        group = self._group(message.source, self._stage)
        works = [_started(dist.irecv(tensor, self._ranks[message.source], group=group)) for tensor in tensors]
        self._expected[message] = _Expected(works, tensors, form)

    def _is_shared(self, numel: int, dtype: torch.dtype) -> bool:
        """Return whether each tensor rank sends a share of a tensor."""
        return self._shares > 1 and dtype.is_floating_point and numel % self._shares == 0

    def _share(self, tensor: Tensor) -> Tensor:
        """Return what this tensor rank sends of a tensor."""
        if not self._is_shared(tensor.numel(), tensor.dtype):
            return tensor
        return tensor.view(self._shares, -1)[dist.get_rank(self._sharers)]

    def _whole(self, received: Tensor, shape: torch.Size) -> Tensor:
        """Return the tensor that the tensor ranks have received together."""
        if received.shape == shape:
            return received
        whole = torch.empty(shape, dtype=received.dtype, device=received.device)
        dist.all_gather_into_tensor(whole.view(-1), received, group=self._sharers)
        return whole

    def _known_form(self, message: Message) -> Form | None:
        if message.made_by.backward:
            return self._form_of_gradient(message)
        return self._forms.get((message.source, message.made_by.chunk))

    def _form(self, message: Message) -> Form:
        """Return a message's form; that of the first hidden states is announced by their sender."""
        known = self._known_form(message)
        if known is not None:
            return known
        assert not message.made_by.backward, "a gradient comes after the output"
        numbers = torch.zeros(_ANNOUNCEMENT, dtype=torch.int64, device=self._device)
        dist.recv(numbers, self._ranks[message.source], group=self._group(message.source, self._stage))
        form = _decoded(numbers.tolist())
        self._forms[message.source, message.made_by.chunk] = form
        return form

    def _announce(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send the form of hidden states before the first ones."""
        key = (message.target, message.made_by.chunk)
        if key in self._announced:
            return
        self._announced.add(key)
        numbers = torch.tensor(_encoded(tensors), dtype=torch.int64, device=self._device)
        self._sent.append(_Sent(message, [self._put(message, numbers)], [numbers]))

    def _put(self, message: Message, tensor: Tensor) -> dist.Work:
        group = self._group(self._stage, message.target)
        return _started(dist.isend(tensor, self._ranks[message.target], group=group))

    def _release(self, stage: int, made_at: int) -> None:
        """Free what a stage has taken: all that it needed until it made what it has sent."""
        kept = []
        for sent in self._sent:
            if sent.message.target != stage or sent.message.needed_at > made_at:
                kept.append(sent)
                continue
            for work in sent.works:
                work.wait()
        self._sent = kept

    def _group(self, source: int, target: int) -> dist.ProcessGroup | None:
        return self._upward if source < target else self._downward


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


def _encoded(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of tensors, then for each the number of its type, of its dimensions, and its shape."""
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    assert len(numbers) <= _ANNOUNCEMENT, numbers
    return numbers + [0] * (_ANNOUNCEMENT - len(numbers))


def _decoded(numbers: Sequence[int]) -> Form:
    """Return the form that `_encoded` was given."""
    form = []
    at = 1
    for _ in range(numbers[0]):
        dtype = _DTYPES[numbers[at]]
        start = at + 2
        at = start + numbers[at + 1]
        form.append((torch.Size(numbers[start:at]), dtype))
    return tuple(form)
