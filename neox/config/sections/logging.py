"""What is reported while training, and where."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from neox.config.sections.base import OnlyWith, Section


class LoggingConfig(Section):
    """Terminal, metrics file, TensorBoard, wandb."""

    log_dir: str | None = None
    """Directory of metrics.jsonl and of per-rank logs."""

    log_interval: int = Field(100, ge=1)
    """Iterations between lines on the terminal (unset in gpt-neox v2.0; its later default)."""

    log_grad_norm: bool = False
    """Report the gradient norm."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard; unset is off."""

    use_wandb: bool | None = None
    """Report to Weights & Biases; unset is off."""

    wandb_group: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Group of the run."""

    wandb_team: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Team (entity) of the run."""

    wandb_project: Annotated[str, OnlyWith("use_wandb")] = "neox"
    """Project of the run."""

    wandb_host: Annotated[str, OnlyWith("use_wandb")] = "https://api.wandb.ai"
    """Server."""

    wandb_run_name: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Name of the run."""

    peak_theoretical_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one GPU, for model FLOPs utilisation; a dry run assumes an H100's 989 (bf16, dense)."""

    expected_mfu: float = Field(0.4, gt=0, le=1)
    """Model FLOPs utilisation that a dry run assumes when it says how many days a run takes."""
