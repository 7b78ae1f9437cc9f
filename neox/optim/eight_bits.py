"""Adam and Lion of bitsandbytes, with states of 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from neox.config.sections.optimizer_kind import BLOCK, PIECE, SCALES, VALUES, State
from neox.config.sections.optimizer_table import OPTIMIZERS
from neox.errors import ConfigError, install_command
from neox.optim.clipping import ClippedOptimizer, NormScope


class _EightBits(ClippedOptimizer):
    """An optimizer of bitsandbytes, which updates states of 8 bits (arXiv:2110.02861) by blocks of 256 elements.

    Each code stands for one of 256 numbers, times the largest absolute value in its block. States of small tensors stay
    in fp32.
    """

    key: str
    theirs: str

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        max_norm: float = 0.0,
        scope: NormScope | None = None,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        min_8bit_size: int = 4096,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__(groups, max_norm=max_norm, scope=scope, defaults=defaults)
        self.smallest = min_8bit_size
        self.kind = OPTIMIZERS[self.key]
        self._values = {s.signed: self._functions.create_dynamic_map(signed=s.signed) for s in self.kind.states}

    @cached_property
    def _functions(self) -> ModuleType:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of what its matrix products lack
        try:
            from bitsandbytes import functional
        except ImportError as error:
            install = install_command("requirements-bitsandbytes.txt")
            raise ConfigError(
                f"optimizer.type: {self.kind.names[0]} needs bitsandbytes ({error}); {install}"
            ) from error
        functions: ModuleType = functional
        return functions

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update a group's parameters."""
        for p, gradient in zip(parameters, gradients, strict=True):
            if not self.state[p]:
                self.keep(p, {s.name: torch.zeros_like(p) for s in self.kind.states})
            state = self.state[p]
            if self.kind.counts_steps:
                state["step"] += 1
            steps = int(state.get("step", 1))
            flat, slopes = p.view(-1), gradient.view(-1)
            for start in range(0, flat.numel(), PIECE):  # on a CPU bitsandbytes makes fp32 copies
                self._update_piece(group, flat, slopes, slice(start, start + PIECE), state, steps)

    def _update_piece(
        self,
        group: dict[str, Any],
        parameter: Tensor,
        gradient: Tensor,
        piece: slice,
        state: Mapping[str, Tensor],
        steps: int,
    ) -> None:
        """Update elements of a flat parameter."""
        first, *second = (s.name for s in self.kind.states)
        names = (first, second[0] if second else None)
        one, two = (None if name is None else state[name].view(-1)[piece] for name in names)
        beta, further = group["betas"]
        weights, slopes, decay = parameter[piece], gradient[piece], group["weight_decay"]
        if first + SCALES not in state:
            self._functions.optimizer_update_32bit(
                *(self.theirs, slopes, weights, one, beta, group["eps"], steps, group["lr"], two, further),
                weight_decay=decay,
            )
            return
        blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
        values = [None if name is None else state[name + VALUES] for name in names]
        scales = [None if name is None else state[name + SCALES][blocks] for name in names]
        self._functions.optimizer_update_8bit_blockwise(
            *(self.theirs, slopes, weights, one, two, beta, further, 0.0, 0.0, group["eps"], steps, group["lr"]),
            *(*values, *scales),
            weight_decay=decay,
        )

    def keep(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Take over a parameter's saved states.

        Args:
            parameter: The parameter.
            states: Numbers of each state. Those that were saved in 8 bits are coded as they were if they are in fp64,
                which holds them exactly.
        """
        if not states:
            self.state[parameter] = {}
            return
        kept: dict[str, Tensor] = {}
        if self.kind.counts_steps:
            kept["step"] = states.get("step", torch.zeros(())).cpu()
        for state in self.kind.states:
            kept |= self._packed(state, states[state.name], parameter.device)
        self.state[parameter] = kept

    def _packed(self, state: State, numbers: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors on a device that hold a state's numbers."""
        if numbers.numel() < self.smallest:
            return {state.name: numbers.to(device, torch.float32)}
        values = self._values[state.signed].to(device)
        codes = torch.empty(numbers.shape, dtype=torch.uint8, device=device)
        flat = numbers.view(-1)
        scales = [torch.empty(0, device=device)]
        for start in range(0, flat.numel(), PIECE):
            piece, found = _nearest_codes(flat[start : start + PIECE].to(device), values)
            codes.view(-1)[start : start + PIECE] = piece
            scales.append(found)
        return {state.name: codes, state.name + SCALES: torch.cat(scales), state.name + VALUES: values}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load; torch converts states to the parameters' type, and codes back here."""
        super().load_state_dict(state_dict)
        for kept in self.state.values():
            for name in (s.name for s in self.kind.states if s.name + SCALES in kept):
                kept[name] = kept[name].to(torch.uint8)


def _nearest_codes(numbers: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest code of each number, and the fp32 scale of each block.

    A block's scale lets its extreme number have a code's value exactly, so that what was decoded is coded the same
    again. bitsandbytes' `quantize_blockwise` divides by the largest absolute value, but -1 is no code's value.

    Args:
        numbers: Any number of numbers, [N]. In fp64 a product of a scale and a code's value is exact, and so is the
            quotient that finds the scale again.
        values: Numbers that the codes mean, in ascending order, [256].
    """
    count = numbers.numel()
    values = values.to(numbers.dtype)
    blocks = torch.nn.functional.pad(numbers, (0, -count % BLOCK)).view(-1, BLOCK)  # [blocks, BLOCK]
    low, high = blocks.aminmax(dim=1)
    scales = high / values[-1]
    if values[0] != 0:
        scales = torch.maximum(scales, low / values[0])
    shares = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True)
    return codes.view(-1)[:count].to(torch.uint8), scales.float()


class Adam8bit(_EightBits):
    """Adam with decoupled weight decay and both moments in 8 bits.

    Arguments are those of `ClippedOptimizer` and of `Adam8bitParams`.
    """

    key, theirs = "adam8bit", "adam"


class Lion8bit(_EightBits):
    """Lion with momentum in 8 bits.

    Arguments are those of `ClippedOptimizer` and of `Lion8bitParams`.
    """

    key, theirs = "lion8bit", "lion"
