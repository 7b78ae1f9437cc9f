"""The optimizer: DeepSpeed's nested block, typed, and weight decay."""

from __future__ import annotations

from pydantic import Field

from neox.config.sections.base import Section


class OptimizerParams(Section):
    """Numbers of the optimizer."""

    lr: float = Field(0.001, ge=0)
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""

    eps: float = Field(1e-8, gt=0)
    """Added to the root of Adam's second moment."""

    weight_decay: float | None = Field(None, ge=0)
    """Weight decay; the flat key weight_decay says the same, a contradiction is refused."""

    torch_adam: bool | None = None
    """DeepSpeed's switch for torch's own Adam; torch's AdamW is always used here."""

    adam_w_mode: bool | None = None
    """DeepSpeed's switch for decoupled weight decay; always decoupled here."""


class OptimizerSettings(Section):
    """DeepSpeed's `optimizer` block."""

    type: str = "Adam"
    """`Adam` or `AdamW`; both mean AdamW with decoupled weight decay, as in gpt-neox."""

    params: OptimizerParams = Field(default_factory=OptimizerParams)
    """Numbers of the optimizer."""


class OptimizerConfig(Section):
    """How weights move."""

    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    """`{type: Adam, params: {lr, betas, eps}}`. Absent: Adam with lr 0.001, betas (0.9, 0.999), eps 1e-8."""

    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay, not applied to biases and norms."""
