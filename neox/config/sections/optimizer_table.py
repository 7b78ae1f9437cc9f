"""Table of optimizers: the numbers, names, states and conditions of each.

The class that updates weights has the same key in `neox.optim.CLASSES`. Rules, memory, saved states and the reference
page follow from this table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from neox.config.sections.conditions import Excludes, Refused, Requires
from neox.config.sections.numbers import Beta, NonNegativeFloat, NonNegativeInt, PositiveFloat
from neox.config.sections.optimizer_kind import DecayingParams, OptimizerKind, OptimizerParams, State

Betas = tuple[Beta, Beta]
"""Decay rates of two running means."""

_COUPLED_DECAY = Refused("does not work: weight decay is decoupled here, as in gpt-neox; remove it", when=(False,))
_ORIGINAL_STEPS = Excludes(
    "use_mup", when=("original",), reason="the size of these steps follows the width by itself, which use_mup does too"
)


class AdamParams(DecayingParams):
    """With `type: Adam` or `AdamW`: numbers of Adam with decoupled weight decay (arXiv:1711.05101)."""

    betas: Betas = (0.9, 0.999)
    """Decay rates of Adam's two moments."""

    eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment."""

    torch_adam: bool | None = None
    """DeepSpeed's switch for torch's own Adam; torch's AdamW is always used here."""

    adam_w_mode: Annotated[bool | None, _COUPLED_DECAY] = None
    """DeepSpeed's switch for decoupled weight decay; it is always decoupled here."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of its class, without DeepSpeed's switches."""
        return self.model_dump(include={"betas", "eps"})


class LionParams(DecayingParams):
    """With `type: Lion`: numbers of Lion (arXiv:2302.06675), which moves every weight by the learning rate."""

    betas: Betas = (0.9, 0.99)
    """Share of the momentum in a step's direction, and decay rate of the momentum."""


class Adam8bitParams(DecayingParams):
    """With `type: Adam8bit`: numbers of Adam with decoupled weight decay and states of 8 bits (arXiv:2110.02861).

    Saved states are loaded exactly in the same layout, and rounded again at
    other degrees or ZeRO stages. A run resumes from Adam's states, too, and Adam from these.
    """

    betas: Betas = (0.9, 0.999)
    """Decay rates of Adam's two moments."""

    eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment."""

    min_8bit_size: NonNegativeInt = 4096
    """Elements below which a tensor's states stay in fp32; under ZeRO they are a rank's part of all parameters."""


class Lion8bitParams(LionParams):
    """With `type: Lion8bit`: numbers of Lion with momentum of 8 bits, saved and loaded as Adam8bit's."""

    min_8bit_size: NonNegativeInt = 4096
    """Elements below which a tensor's momentum stays in fp32; under ZeRO they are a rank's part of all parameters."""


class SGDParams(DecayingParams):
    """With `type: SGD`: numbers of torch's stochastic gradient descent. Weight decay is added to the gradient."""

    momentum: Beta = 0.0
    """Decay rate of the momentum; 0 keeps none."""

    dampening: Beta = 0.0
    """Share of a gradient that is left out of the momentum."""

    nesterov: Annotated[bool, Requires(".momentum"), Excludes(".dampening")] = False
    """Nesterov's momentum."""


class MadgradParams(DecayingParams):
    """With `type: madgrad_wd`: numbers of MADGRAD (arXiv:2101.11075) with decoupled weight decay."""

    momentum: float = Field(0.9, gt=0, lt=1)
    """Share of the old weights in the new ones."""

    eps: PositiveFloat = 1e-6
    """Added to the cube root, and to the learning rate, as in gpt-neox."""


class SM3Params(OptimizerParams):
    """With `type: SM3`: numbers of SM3 (arXiv:1901.11150). It has no weight decay, as in gpt-neox."""

    momentum: Beta = 0.0
    """Decay rate of an average of the steps; 0 keeps none."""

    beta: Beta = 0.0
    """Decay rate of the sums of squares; 0 sums without decay, as in the paper."""

    eps: PositiveFloat = 1e-30
    """Added under the root."""


class AdafactorParams(DecayingParams):
    """With `type: Adafactor`: numbers of torch's Adafactor (arXiv:1804.04235)."""

    beta2_decay: float = Field(-0.8, le=0)
    """Power of the step in the decay rate of squares."""

    eps: tuple[NonNegativeFloat | None, NonNegativeFloat] = (None, 1e-3)
    """Smallest root of squares (null: the number format's), and smallest size of weights that steps are relative to."""

    d: float = Field(1.0, ge=1)
    """Root mean square above which a step is clipped."""


class MuonParams(DecayingParams):
    """With `type: Muon`: numbers of torch's Muon for matrices of blocks, and of AdamW for all others."""

    momentum: Beta = 0.95
    """Decay rate of Muon's momentum."""

    nesterov: bool = True
    """Nesterov's momentum."""

    split_fused: bool = True
    """Whether queries, keys, values, the two halves of a gated MLP, and what the `in_proj` of a recurrent block holds
    are matrices of their own, and not one matrix with what they are stored with. Each expert always is one."""

    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations."""

    adjust_lr_fn: Annotated[Literal["match_rms_adamw", "original"], _ORIGINAL_STEPS] = "match_rms_adamw"
    """Size of Muon's steps: as large as AdamW's (arXiv:2502.16982), so that one lr serves both, or the original one."""

    betas: Betas = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""

    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""


OPTIMIZERS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        "adam": OptimizerKind(
            names=("Adam", "AdamW", "FusedAdam", "HybridAdam"),
            params=AdamParams,
            states=(State("exp_avg"), State("exp_avg_sq")),
            counts_steps=True,
            cycled_betas="betas",
            host_names=("CPUAdam", "DeepSpeedCPUAdam", "cpu_torch_adam"),
        ),
        "lion": OptimizerKind(
            names=("Lion", "FusedLion"),
            params=LionParams,
            states=(State("exp_avg"),),
            cycled_betas="betas",
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
            leaves_untouched=False,
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
            cycled_betas="betas",
            width_degree=0.5,
            elementwise=False,
            gathers=True,
            hidden_apart=True,
        ),
        "adam8bit": OptimizerKind(
            names=("Adam8bit", "AdamW8bit", "adamw_bnb_8bit"),
            params=Adam8bitParams,
            states=(State("exp_avg", bits=8), State("exp_avg_sq", bits=8, signed=False)),
            counts_steps=True,
            cycled_betas="betas",
            leaves_untouched=False,
            package="bitsandbytes",
        ),
        "lion8bit": OptimizerKind(
            names=("Lion8bit",),
            params=Lion8bitParams,
            states=(State("exp_avg", bits=8),),
            cycled_betas="betas",
            leaves_untouched=False,
            package="bitsandbytes",
        ),
    }
)

_GONE = "DeepSpeed 0.19.8 no longer has it; use Adam, with communication_data_type bf16 if communication is slow"
_PAGED = "its pages need one GPU and no ZeRO; use Adam8bit, with offload_optimizer if memory is short"
_WITH_MUP = "set `use_mup: true` with Adam or SGD"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _GONE),
        **dict.fromkeys(("pagedadamw8bit", "pagedadam8bit", "pagedlion8bit"), _PAGED),
        **dict.fromkeys(("muadam", "muadamw", "musgd"), _WITH_MUP),
    }
)
"""Optimizers of gpt-neox and DeepSpeed that are known and not supported, and what to do."""


WITHOUT_SAVED_OPTIMIZER = (
    "set `no_load_optim: true` (weights and iteration, a new optimizer) or `finetune: true` (weights, iteration 0)"
)
"""What to do about an optimizer state that cannot be loaded, for messages."""


def plain_name(name: str) -> str:
    """Return a value of `optimizer.type` in the spelling that is compared."""
    return name.lower().replace("_", "").replace("-", "")


def find_optimizer(name: str) -> str | None:
    """Return the key in `OPTIMIZERS` of a value of `optimizer.type`; None for an unknown one."""
    plain = plain_name(name)
    for key, kind in OPTIMIZERS.items():
        if plain in map(plain_name, kind.all_names):
            return key
    return None


def optimizer_of_states(names: Collection[str]) -> str | None:
    """Return the optimizer whose states have these names; None for an unknown one, Adam if it has taken no step."""
    tensors = {name for name in names if name != "step"}
    if not tensors:
        return "adam"
    for key, kind in OPTIMIZERS.items():
        always: set[str] = set()
        possible: set[str] = set()
        for state in kind.states:
            possible |= set(state.stored)
            if not state.only_with:
                always |= set(state.stored)
        if always <= tensors <= possible:
            return key
    return None


def goes_on(saved: str, here: str) -> bool:
    """Return whether an optimizer can resume from the states of another one: only their bits may differ.

    Args:
        saved: Key of the optimizer of the state.
        here: Key of the run's optimizer.
    """
    return OPTIMIZERS[saved].state_names == OPTIMIZERS[here].state_names


def other_optimizer(path: Path, saved: str, here: str) -> str:
    """Return the message about a checkpoint that holds the state of another optimizer.

    Args:
        path: The checkpoint.
        saved: Key of its optimizer.
        here: Key of the run's optimizer.
    """
    theirs = OPTIMIZERS[saved].names[0]
    ours = OPTIMIZERS[here].names[0]
    states = ", ".join(OPTIMIZERS[saved].state_names)
    return (
        f"{path} holds the state of {theirs} ({states}), which {ours} cannot go on with; "
        f"`optimizer.type: {theirs}` resumes it, or without it: {WITHOUT_SAVED_OPTIMIZER}"
    )


def optimizer_names() -> list[str]:
    """Return the values of `optimizer.type` in their usual spelling."""
    return [name for kind in OPTIMIZERS.values() for name in kind.all_names]
