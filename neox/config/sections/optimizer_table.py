"""Table of optimizers: names, numbers, states and conditions of each.

The class that updates weights has the same key in `neox.optim.CLASSES`. Validation, memory, saved states and the
reference page follow from this table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from neox.config.sections.base import Section

WITHOUT_SAVED_OPTIMIZER = (
    "set `no_load_optim: true` (weights and iteration, a new optimizer) or `finetune: true` (weights, iteration 0)"
)
"""What to do about an optimizer state that cannot be loaded, for messages."""


class OptimizerParams(Section):
    """Numbers that every optimizer has."""

    lr: float = Field(0.001, ge=0)
    """Peak learning rate."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of its class in `neox.optim`, apart from those of parameter groups."""
        return self.model_dump(exclude={"lr", "weight_decay"})


class DecayingParams(OptimizerParams):
    """Numbers of an optimizer with weight decay."""

    weight_decay: float | None = Field(None, ge=0)
    """Weight decay. The flat key weight_decay sets the same value; a contradiction is refused."""


class AdamParams(DecayingParams):
    """With `type: Adam` or `AdamW`: numbers of Adam with decoupled weight decay (arXiv:1711.05101)."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""

    eps: float = Field(1e-8, gt=0)
    """Added to the root of Adam's second moment."""

    torch_adam: bool | None = None
    """DeepSpeed's switch for torch's own Adam; torch's AdamW is always used here."""

    adam_w_mode: bool | None = None
    """DeepSpeed's switch for decoupled weight decay; it is always decoupled here."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of its class, without DeepSpeed's switches."""
        return self.model_dump(include={"betas", "eps"})


class LionParams(DecayingParams):
    """With `type: Lion`: numbers of Lion (arXiv:2302.06675), which moves every weight by the learning rate."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Share of the momentum in a step's direction, and decay rate of the momentum."""


class SGDParams(DecayingParams):
    """With `type: SGD`: numbers of torch's stochastic gradient descent. Weight decay is added to the gradient."""

    momentum: float = Field(0.0, ge=0, lt=1)
    """Decay rate of the momentum; 0 keeps none."""

    dampening: float = Field(0.0, ge=0, lt=1)
    """Share of a gradient that is left out of the momentum."""

    nesterov: bool = False
    """Nesterov's momentum; needs momentum and no dampening."""


class MadgradParams(DecayingParams):
    """With `type: madgrad_wd`: numbers of MADGRAD (arXiv:2101.11075) with decoupled weight decay."""

    momentum: float = Field(0.9, gt=0, lt=1)
    """Share of the old weights in the new ones."""

    eps: float = Field(1e-6, gt=0)
    """Added to the cube root, and to the learning rate, as in gpt-neox."""


class SM3Params(OptimizerParams):
    """With `type: SM3`: numbers of SM3 (arXiv:1901.11150). It has no weight decay, as in gpt-neox."""

    momentum: float = Field(0.0, ge=0, lt=1)
    """Decay rate of an average of the steps; 0 keeps none."""

    beta: float = Field(0.0, ge=0, lt=1)
    """Decay rate of the sums of squares; 0 sums without decay, as in the paper."""

    eps: float = Field(1e-30, gt=0)
    """Added under the root."""


class AdafactorParams(DecayingParams):
    """With `type: Adafactor`: numbers of torch's Adafactor (arXiv:1804.04235)."""

    beta2_decay: float = Field(-0.8, le=0)
    """Power of the step in the decay rate of squares."""

    eps: tuple[float | None, float] = (None, 1e-3)
    """Smallest root of squares (null: the number format's), and smallest size of weights that steps are relative to."""

    d: float = Field(1.0, ge=1)
    """Root mean square above which a step is clipped."""


class MuonParams(DecayingParams):
    """With `type: Muon`: numbers of torch's Muon for matrices of blocks, and of AdamW for all others."""

    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum. The matrix of queries, keys and values is one matrix."""

    nesterov: bool = True
    """Nesterov's momentum."""

    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations."""

    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Size of Muon's steps: as large as AdamW's (arXiv:2502.16982), so that one lr serves both, or the original one."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""

    eps: float = Field(1e-8, gt=0)
    """Added to the root of AdamW's second moment."""


AnyParams = AdamParams | LionParams | SGDParams | MadgradParams | SM3Params | AdafactorParams | MuonParams


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each parameter.

    Attributes:
        name: Its name in the optimizer's state, and so in checkpoints.
        only_with: Number of the optimizer that is not 0 where the tensor exists; "" for none.
        axis: None if it has the parameter's shape; otherwise the one axis along which it has more than one element.
        of: Parameters that have it; `hidden` ones are blocks' matrices.
        bytes: Of an element.
    """

    name: str
    only_with: str = ""
    axis: int | None = None
    of: Literal["all", "matrices", "vectors", "hidden", "others"] = "all"
    bytes: int = 4

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
    }
)

_GONE = "DeepSpeed 0.19.8 no longer has it; use Adam, with communication_data_type bf16 where communication is slow"
_EIGHT_BIT = "states of 8 bits are not supported; Lion keeps half of what Adam keeps, Adafactor next to nothing"
_WITH_MUP = "set `use_mup: true` with Adam or SGD"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _GONE),
        **dict.fromkeys(("adam8bit", "adamw8bit", "lion8bit"), _EIGHT_BIT),
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
        if {state.name for state in kind.states if not state.only_with} <= tensors <= {s.name for s in kind.states}
    )
    return next(matches, None)


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
