"""Table of optimizers: names, states and conditions of each.

The class that updates weights has the same key in `neox.optim.CLASSES`. Validation, memory, saved states and the
reference page follow from this table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from neox.config.sections.optimizer_params import (
    AdafactorParams,
    Adam8bitParams,
    AdamParams,
    Lion8bitParams,
    LionParams,
    MadgradParams,
    MuonParams,
    OptimizerParams,
    SGDParams,
    SM3Params,
)

WITHOUT_SAVED_OPTIMIZER = (
    "set `no_load_optim: true` (weights and iteration, a new optimizer) or `finetune: true` (weights, iteration 0)"
)
"""What to do about an optimizer state that cannot be loaded, for messages."""


PIECE = 2**24
"""Elements of parameters that are updated together, where a step needs temporary tensors of their size."""
BLOCK = 256
"""Elements of a state of 8 bits that share a scale."""
SCALES, VALUES = "_scales", "_values"
"""Appended to the name of a state of 8 bits: its fp32 scales, and the number that each of the 256 codes means."""


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each parameter.

    Attributes:
        name: Its name in the optimizer's state, and so in checkpoints.
        only_with: Number of the optimizer that is not 0 where the tensor exists; "" for none.
        axis: None if it has the parameter's shape; otherwise the one axis along which it has more than one element.
        of: Parameters that have it; `hidden` ones are blocks' matrices.
        bits: Of an element. Those of 8 bits are codes with a scale for each block of elements; they are read as fp32.
        signed: Whether it may be negative.
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
        return 4 if self.bits == 32 else 1 + 4 / BLOCK

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the tensors that hold it."""
        return (self.name,) if self.bits == 32 else (self.name, self.name + SCALES, self.name + VALUES)

    def shape(self, parameter: tuple[int, ...], *, hidden: bool | None = None) -> tuple[int, ...] | None:
        """Return its shape for a parameter; None if that has no such tensor.

        Args:
            parameter: Shape of the parameter.
            hidden: Whether it is hidden; None where that is not known.
        """
        ndim = len(parameter)
        absent = {"matrices": ndim < 2, "vectors": ndim > 1, "hidden": hidden is False, "others": hidden is True}
        if absent.get(self.of):
            return None
        if self.axis is None:
            return parameter
        return tuple(n if i == self.axis else 1 for i, n in enumerate(parameter)) if self.axis < ndim else None


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer on paper.

    Attributes:
        names: Values of `optimizer.type`, in any case, with or without underscores. The first is its own name.
        params: Its numbers.
        states: What it keeps for each parameter, beside a counter of steps.
        counts_steps: Whether it keeps the counter `step`.
        host_names: Names of the variant that updates states in the hosts' memory.
        gradient_degree: Degree of a step in the size of the gradient: 0 if it does not depend on it. Learning rates
            under muP follow from it.
        elementwise: Whether it updates every element by itself, so that it may get any part of a parameter. Others
            need whole parameters: they work without tensor ranks, and without ZeRO unless they gather.
        gathers: Whether it gathers parameters that are divided over data ranks.
        hidden_apart: Whether hidden parameters are updated in another way than all others.
        package: Optional package that it needs; "" for none.
        temporaries: Tensors of `PIECE` elements that it makes in a step.
    """

    names: tuple[str, ...]
    params: type[OptimizerParams]
    states: tuple[State, ...]
    counts_steps: bool = False
    host_names: tuple[str, ...] = ()
    gradient_degree: float = 0.0
    elementwise: bool = True
    gathers: bool = False
    hidden_apart: bool = False
    package: str = ""
    temporaries: int = 0

    def states_with(self, params: OptimizerParams) -> tuple[State, ...]:
        """Return the tensors that it keeps with these numbers."""
        return tuple(state for state in self.states if not state.only_with or getattr(params, state.only_with))

    def state(self, name: str) -> State:
        """Return a tensor by its name. Raises KeyError."""
        return {state.name: state for state in self.states}[name]


OPTIMIZERS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        "adam": OptimizerKind(
            names=("Adam", "AdamW", "FusedAdam", "HybridAdam"),
            params=AdamParams,
            states=(State("exp_avg"), State("exp_avg_sq")),
            counts_steps=True,
            host_names=("CPUAdam", "DeepSpeedCPUAdam", "cpu_torch_adam"),
        ),
        "lion": OptimizerKind(
            names=("Lion", "FusedLion"),
            params=LionParams,
            states=(State("exp_avg"),),
            host_names=("CPULion", "DeepSpeedCPULion"),
            temporaries=1,
        ),
        "sgd": OptimizerKind(
            names=("SGD",),
            params=SGDParams,
            states=(State("momentum_buffer", only_with="momentum"),),
            gradient_degree=1.0,
        ),
        "madgrad": OptimizerKind(
            names=("madgrad_wd", "MADGRAD"),
            params=MadgradParams,
            states=(State("s"), State("grad_sum_sq"), State("x0")),
            counts_steps=True,
            gradient_degree=1 / 3,
            temporaries=2,
        ),
        "sm3": OptimizerKind(
            names=("SM3",),
            params=SM3Params,
            states=(
                State("momentum_buffer", only_with="momentum"),
                State("accumulator_0", axis=0),
                State("accumulator_1", axis=1),
            ),
            elementwise=False,
        ),
        "adafactor": OptimizerKind(
            names=("Adafactor",),
            params=AdafactorParams,
            states=(
                State("row_var", axis=0, of="matrices"),
                State("col_var", axis=1, of="matrices"),
                State("variance", of="vectors"),
            ),
            counts_steps=True,
            elementwise=False,
        ),
        "muon": OptimizerKind(
            names=("Muon",),
            params=MuonParams,
            states=(
                State("momentum_buffer", of="hidden"),
                State("exp_avg", of="others"),
                State("exp_avg_sq", of="others"),
            ),
            counts_steps=True,
            elementwise=False,
            gathers=True,
            hidden_apart=True,
        ),
        "adam8bit": OptimizerKind(
            names=("Adam8bit", "AdamW8bit", "adamw_bnb_8bit"),
            params=Adam8bitParams,
            states=(State("exp_avg", bits=8), State("exp_avg_sq", bits=8, signed=False)),
            counts_steps=True,
            package="bitsandbytes",
        ),
        "lion8bit": OptimizerKind(
            names=("Lion8bit",),
            params=Lion8bitParams,
            states=(State("exp_avg", bits=8),),
            package="bitsandbytes",
        ),
    }
)

_GONE = "DeepSpeed 0.19.8 no longer has it; use Adam, with communication_data_type bf16 where communication is slow"
_PAGED = "its pages need one GPU and no ZeRO; use Adam8bit, with offload_optimizer where memory is short"
_WITH_MUP = "set `use_mup: true` with Adam or SGD"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _GONE),
        **dict.fromkeys(("pagedadamw8bit", "pagedadam8bit", "pagedlion8bit"), _PAGED),
        **dict.fromkeys(("muadam", "muadamw", "musgd"), _WITH_MUP),
    }
)
"""Optimizers of gpt-neox and DeepSpeed that are known and not supported, and what to do."""


def plain_name(name: str) -> str:
    """Return a value of `optimizer.type` in the spelling that is compared."""
    return name.lower().replace("_", "").replace("-", "")


def find_optimizer(name: str) -> str | None:
    """Return the key in `OPTIMIZERS` of a value of `optimizer.type`; None for an unknown one."""
    plain = plain_name(name)
    found = (key for key, kind in OPTIMIZERS.items() if plain in map(plain_name, (*kind.names, *kind.host_names)))
    return next(found, None)


def optimizer_of_states(names: Collection[str]) -> str | None:
    """Return the optimizer whose states have these names; None for an unknown one, Adam if it has taken no step."""
    tensors = {name for name in names if name != "step"}
    if not tensors:
        return "adam"
    matches = (
        key
        for key, kind in OPTIMIZERS.items()
        if {name for state in kind.states if not state.only_with for name in state.stored}
        <= tensors
        <= {name for state in kind.states for name in state.stored}
    )
    return next(matches, None)


def goes_on(saved: str, here: str) -> bool:
    """Return whether an optimizer can go on with another's state: one that differs in the bits of its states alone.

    Args:
        saved: Key of the optimizer of the state.
        here: Key of the run's optimizer.
    """
    theirs, ours = OPTIMIZERS[saved], OPTIMIZERS[here]
    return [state.name for state in theirs.states] == [state.name for state in ours.states]


def other_optimizer(path: Path, saved: str, here: str) -> str:
    """Return the message about a checkpoint whose optimizer state is another optimizer's than the run's.

    Args:
        path: The checkpoint.
        saved: Key of its optimizer.
        here: Key of the run's optimizer.
    """
    theirs, ours = OPTIMIZERS[saved], OPTIMIZERS[here]
    lost = ", ".join(state.name for state in theirs.states)
    return (
        f"{path} holds the state of {theirs.names[0]} ({lost}), which {ours.names[0]} cannot go on with; "
        f"`optimizer.type: {theirs.names[0]}` resumes it, or without it: {WITHOUT_SAVED_OPTIMIZER}"
    )


def optimizer_names() -> list[str]:
    """Return the values of `optimizer.type` in their usual spelling."""
    return [name for kind in OPTIMIZERS.values() for name in (*kind.names, *kind.host_names)]
