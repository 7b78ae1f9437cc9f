"""Adam and Lion of bitsandbytes, with states of 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from neox.config.sections.optimizer_kind import BLOCK, PIECE, SCALES, VALUES, State
from neox.config.sections.optimizer_table import OPTIMIZERS
from neox.errors import ConfigError, install_command
from neox.optim.clipping import ClippedOptimizer


class _EightBits(ClippedOptimizer):
    """An optimizer of bitsandbytes, which updates states of 8 bits (arXiv:2110.02861) by blocks of 256 elements.

    Each code stands for one of 256 numbers, times the largest absolute value in its block. States of small tensors stay
    in fp32.

    Args:
        groups: Parameter groups of `parameter_groups`.
        lr: Learning rate.
        betas: Decay rates of the moments, or as in `Lion`.
        eps: Number added to the denominator.
        min_8bit_size: Number of elements below which a tensor's states stay in fp32.
        clipping: Further arguments of `ClippedOptimizer`.

    Attributes:
        key: Key of the optimizer in `OPTIMIZERS`.
        theirs: Name of the optimizer in bitsandbytes.
    """

    key: str
    theirs: str

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        min_8bit_size: int = 4096,
        **clipping: Any,
    ) -> None:
        super().__init__(groups, defaults={"lr": lr, "betas": betas, "eps": eps}, **clipping)
        self.smallest = min_8bit_size
        self.kind = OPTIMIZERS[self.key]
        self._values: dict[bool, Tensor] = {}  # by whether numbers may be negative
        for state in self.kind.states:
            self._values[state.signed] = self._functions.create_dynamic_map(signed=state.signed)

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
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if not self.state[parameter]:
                self.keep(parameter, {state.name: torch.zeros_like(parameter) for state in self.kind.states})
            state = self.state[parameter]
            if self.kind.counts_steps:
                state["step"] += 1
            weights = parameter.view(-1)
            slopes = gradient.view(-1)
            is_in_8_bits = self.kind.states[0].name + SCALES in state
            update = self._update_8_bits if is_in_8_bits else self._update_32_bits
            for start in range(0, weights.numel(), PIECE):  # on a CPU bitsandbytes makes fp32 copies
                piece = slice(start, start + PIECE)
                update(group, weights[piece], slopes[piece], piece, state)

    def _update_32_bits(
        self, group: dict[str, Any], weights: Tensor, slopes: Tensor, piece: slice, state: Mapping[str, Tensor]
    ) -> None:
        """Update a piece of a small tensor, whose states are in fp32.

        Args:
            group: The parameter group.
            weights: Weights of the piece.
            slopes: Gradients of the piece.
            piece: Elements of the flat parameter.
            state: States of the parameter.
        """
        first, second = self._pair(lambda name: state[name].view(-1)[piece])
        beta1, beta2 = group["betas"]
        self._functions.optimizer_update_32bit(
            self.theirs,
            slopes,
            weights,
            first,
            beta1,
            group["eps"],
            int(state.get("step", 1)),
            group["lr"],
            second,
            beta2,
            weight_decay=group["weight_decay"],
        )

    def _update_8_bits(
        self, group: dict[str, Any], weights: Tensor, slopes: Tensor, piece: slice, state: Mapping[str, Tensor]
    ) -> None:
        """Update a piece of a tensor whose states are codes. Arguments are those of `_update_32_bits`."""
        blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
        first, second = self._pair(lambda name: state[name].view(-1)[piece])
        first_values, second_values = self._pair(lambda name: state[name + VALUES])
        first_scales, second_scales = self._pair(lambda name: state[name + SCALES][blocks])
        beta1, beta2 = group["betas"]
        self._functions.optimizer_update_8bit_blockwise(
            self.theirs,
            slopes,
            weights,
            first,
            second,
            beta1,
            beta2,
            0.0,
            0.0,
            group["eps"],
            int(state.get("step", 1)),
            group["lr"],
            first_values,
            second_values,
            first_scales,
            second_scales,
            weight_decay=group["weight_decay"],
        )

    def _pair(self, tensor: Callable[[str], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return a tensor of the first state and of the second one; None if there is only one state."""
        first, *others = self.kind.states
        if not others:
            return tensor(first.name), None
        return tensor(first.name), tensor(others[0].name)

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
            for state in self.kind.states:
                if state.name + SCALES in kept:
                    kept[state.name] = kept[state.name].to(torch.uint8)


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
    """Adam with decoupled weight decay and both moments in 8 bits."""

    key = "adam8bit"
    theirs = "adam"


class Lion8bit(_EightBits):
    """Lion with momentum in 8 bits."""

    key = "lion8bit"
    theirs = "lion"
