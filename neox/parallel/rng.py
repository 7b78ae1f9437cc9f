"""Random streams of tensor-parallel ranks, and recomputation that replays them.

torch's default generator has the same seed on all tensor ranks, so that they drop the same elements of replicated
tensors. Inside `RNGTracker.fork` a second stream replaces it, which differs on each tensor rank, for tensors that are
split. See Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`, which draws no random numbers, keeping only the inputs for the backward pass.

    Unlike `RNGTracker.checkpoint` it replays no stream, so that a compiler can have it in a graph.
    """
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts, and is the same on every machine and in every Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RNGTracker:
    """The second random stream: one generator state for each device.

    Attributes:
        enabled: Whether there is a second stream. With one tensor rank the default stream serves everything, and `fork`
            does nothing.
    """

    def __init__(self, enabled: bool = False, seed: int = 0) -> None:
        self.enabled = enabled
        self._seed = seed
        self._states: dict[str, torch.Tensor] = {}

    def seed(self, seed: int) -> None:
        """Start the stream anew on every device."""
        self._seed = seed
        self._states = {}

    def fork(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which torch's default generator of `device` is the tracker's stream."""
        if not self.enabled:
            return nullcontext()
        return self._forked(device)

    @contextmanager
    def _forked(self, device: torch.device) -> Iterator[None]:
        generator = _default_generator(device)
        key = str(generator.device)
        outside = generator.get_state()
        if key in self._states:
            generator.set_state(self._states[key])
        else:
            generator.manual_seed(self._seed)
        try:
            yield
        finally:
            self._states[key] = generator.get_state()
            generator.set_state(outside)

    def get_states(self) -> dict[str, Any]:
        """Return the seed, and the generator state of each device used so far: what a checkpoint must hold."""
        return {"seed": self._seed, "states": dict(self._states)}

    def set_states(self, states: dict[str, Any]) -> None:
        """Continue from `get_states`."""
        self._seed = int(states["seed"])
        self._states = dict(states["states"])

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`, keeping only the inputs; its activations are computed again in the backward pass.

        Dropout drops the same elements again, because torch's own streams and the tracker's are replayed.
        """
        if not self.enabled:
            return torch_checkpoint(function, *args, use_reentrant=False)
        before = self.get_states()
        return torch_checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), self._replay(before))
        )

    @contextmanager
    def _replay(self, states: dict[str, Any]) -> Iterator[None]:
        """Run a recomputation from `states`, and then restore the streams as they are now."""
        now = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that torch's dropout uses on `device`."""
    if device.type == "cpu":
        return torch.default_generator
    functions = torch.get_device_module(device)  # torch.cuda, torch.xpu, torch.npu
    index = device.index
    if index is None:
        index = functions.current_device()
    generator: torch.Generator = functions.default_generators[index]
    return generator
