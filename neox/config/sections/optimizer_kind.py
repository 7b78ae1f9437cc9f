"""Kinds of optimizers on paper: the numbers they take, the states they keep, and where they work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from neox.config.sections.base import Section, has_unbounded_number
from neox.config.sections.numbers import NonNegativeFloat

PIECE = 2**24
"""Elements of parameters that are updated together by a step that needs temporary tensors of their size."""
BLOCK = 256
"""Elements of a state of 8 bits that share a scale."""
SCALES, VALUES = "_scales", "_values"
"""Appended to the name of a state of 8 bits: its fp32 scales, and the number that each of the 256 codes means."""


class OptimizerParams(Section):
    """Numbers that every optimizer has. Every number of a subclass must have bounds."""

    lr: NonNegativeFloat = 0.001
    """Peak learning rate."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class that would accept any number, such as a beta of 1.5."""
        super().__pydantic_init_subclass__(**kwargs)
        for name, info in cls.model_fields.items():
            if has_unbounded_number(info):
                raise TypeError(f"{cls.__name__}.{name} accepts any number: give it a type of sections.numbers")

    def options(self) -> dict[str, Any]:
        """Return the arguments of its class in `neox.optim`, apart from those of parameter groups."""
        return self.model_dump(exclude={"lr", "weight_decay"})


class DecayingParams(OptimizerParams):
    """Numbers of an optimizer with weight decay."""

    weight_decay: NonNegativeFloat | None = None
    """Weight decay. The flat key weight_decay sets the same value; a contradiction is refused."""


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each parameter.

    Attributes:
        name: Its name in the optimizer's state, and so in checkpoints.
        only_with: Number of the optimizer that must not be 0 for the tensor to exist; empty if it always exists.
        axis: None if it has the parameter's shape; otherwise the one axis along which it has more than one element.
        of: Parameters that have it; `hidden` ones are the matrices of blocks.
        bits: Size of an element. Elements of 8 bits are codes with a scale for each block; they are read as fp32.
        signed: Whether elements may be negative.
    """

    name: str
    only_with: str = ""
    axis: int | None = None
    of: Literal["all", "matrices", "vectors", "hidden", "others"] = "all"
    bits: Literal[8, 32] = 32
    signed: bool = True

    @property
    def bytes(self) -> float:
        """Bytes of an element, with its share of the block's scale."""
        if self.bits == 32:
            return 4
        return 1 + 4 / BLOCK

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the tensors that hold it."""
        if self.bits == 32:
            return (self.name,)
        return (self.name, self.name + SCALES, self.name + VALUES)

    def shape(self, parameter: tuple[int, ...], *, hidden: bool | None = None) -> tuple[int, ...] | None:
        """Return its shape for a parameter; None if that has no such tensor.

        Args:
            parameter: Shape of the parameter.
            hidden: Whether it is hidden; None if that is not known.
        """
        ndim = len(parameter)
        absent = {"matrices": ndim < 2, "vectors": ndim > 1, "hidden": hidden is False, "others": hidden is True}
        if absent.get(self.of):
            return None
        if self.axis is None:
            return parameter
        if self.axis >= ndim:
            return None
        shape = [1] * ndim
        shape[self.axis] = parameter[self.axis]
        return tuple(shape)


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer on paper.

    Attributes:
        names: Values of `optimizer.type`, in any case, with or without underscores. The first is its own name.
        params: Its numbers.
        states: Tensors that it keeps for each parameter, apart from a counter of steps.
        counts_steps: Whether it keeps the counter `step`.
        cycled_betas: Name of the two betas, the first of which a schedule may cycle (`OneCycle`); empty if it has none.
        host_names: Names of the variant that updates states in the hosts' memory.
        gradient_degree: How a step scales with the gradient: 0 for Adam, 1 for SGD. Learning rates under muP follow
            from it.
        width_degree: Power of muP's m by which steps of hidden matrices may be larger than those of Adam, whose effect
            grows with the width as if their elements had one sign: 0.5 for steps without such a common direction.
        elementwise: Whether it updates every element by itself, so that it may get any part of a parameter. Others
            need whole parameters: unless they gather, they work without tensor ranks and without ZeRO.
        gathers: Whether it gathers parameters that are sharded over data or tensor ranks.
        hidden_apart: Whether it updates hidden parameters in a different way than all others.
        leaves_untouched: Whether elements whose gradient is always zero stay as they are, bit for bit, without weight
            decay.
        package: Optional package that it needs; empty for none.
        temporaries: Number of tensors of `PIECE` elements that it makes in a step.
    """

    names: tuple[str, ...]
    params: type[OptimizerParams]
    states: tuple[State, ...]
    counts_steps: bool = False
    cycled_betas: str = ""
    host_names: tuple[str, ...] = ()
    gradient_degree: float = 0.0
    width_degree: float = 0.0
    elementwise: bool = True
    gathers: bool = False
    hidden_apart: bool = False
    leaves_untouched: bool = True
    package: str = ""
    temporaries: int = 0

    def states_with(self, params: OptimizerParams) -> tuple[State, ...]:
        """Return the tensors that it keeps with these numbers."""
        return tuple(state for state in self.states if not state.only_with or getattr(params, state.only_with))

    @property
    def state_names(self) -> list[str]:
        """Names of the tensors that it may keep."""
        return [state.name for state in self.states]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Values of `optimizer.type` that mean it, with those of the variant in the hosts' memory."""
        return (*self.names, *self.host_names)

    def state(self, name: str) -> State:
        """Return a tensor by its name. Raises KeyError."""
        return {state.name: state for state in self.states}[name]
