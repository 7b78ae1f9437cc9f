"""Sections of the numbers of each optimizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from neox.config.sections.base import Section


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


class Adam8bitParams(DecayingParams):
    """With `type: Adam8bit`: numbers of Adam with decoupled weight decay and states of 8 bits (arXiv:2110.02861).

    Saved states are loaded exactly in the same layout, and rounded again at
    other degrees or ZeRO stages. A run goes on from Adam's states, too, and Adam from these.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""

    eps: float = Field(1e-8, gt=0)
    """Added to the root of Adam's second moment."""

    min_8bit_size: int = Field(4096, ge=0)
    """Elements below which a tensor's states stay in fp32; under ZeRO they are a rank's part of all parameters."""


class Lion8bitParams(LionParams):
    """With `type: Lion8bit`: numbers of Lion with momentum of 8 bits, saved and loaded as Adam8bit's."""

    min_8bit_size: int = Field(4096, ge=0)
    """Elements below which a tensor's momentum stays in fp32; under ZeRO they are a rank's part of all parameters."""


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


AnyParams = (
    AdamParams
    | LionParams
    | SGDParams
    | MadgradParams
    | SM3Params
    | AdafactorParams
    | MuonParams
    | Adam8bitParams
    | Lion8bitParams
)
