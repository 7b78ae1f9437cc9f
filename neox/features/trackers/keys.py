"""Keys of experiment trackers."""

from __future__ import annotations

from typing import Annotated, Any

from neox.config.sections.base import Section
from neox.config.sections.conditions import OnlyWith


class TrackerKeys(Section):
    """Keys of experiment trackers."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard; off by default."""

    tracker_group: str | None = None
    """Group that the run belongs to, such as a sweep: the group of Weights & Biases (unless `wandb_group` is given) and
    of Trackio, a tag `group` of MLflow, and a tag of Comet."""

    use_wandb: bool | None = None
    """Report to Weights & Biases; off by default."""

    wandb_group: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Group of the run."""

    wandb_team: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Team (entity) of the run."""

    wandb_project: Annotated[str, OnlyWith("use_wandb")] = "neox"
    """Project of the run."""

    wandb_host: Annotated[str, OnlyWith("use_wandb")] = "https://api.wandb.ai"
    """Address of the Weights & Biases server."""

    wandb_run_name: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Name of the run."""

    use_mlflow: bool = False
    """Log to MLflow."""

    mlflow_tracking_uri: Annotated[str | None, OnlyWith("use_mlflow")] = None
    """Address of the server, or `sqlite:///FILE`; by default the environment's MLFLOW_TRACKING_URI."""

    mlflow_experiment: Annotated[str, OnlyWith("use_mlflow")] = "neox"
    """Name of the experiment."""

    mlflow_run_name: Annotated[str | None, OnlyWith("use_mlflow")] = None
    """Name of the run."""

    use_comet: bool | None = None
    """Log to Comet; off by default."""

    comet_workspace: Annotated[str | None, OnlyWith("use_comet")] = None
    """Workspace of the experiment."""

    comet_project: Annotated[str | None, OnlyWith("use_comet")] = None
    """Project of the experiment."""

    comet_experiment_name: Annotated[str | None, OnlyWith("use_comet")] = None
    """Name of the experiment."""

    comet_tags: Annotated[tuple[str, ...] | None, OnlyWith("use_comet")] = None
    """Tags of the experiment."""

    comet_others: Annotated[dict[str, Any] | None, OnlyWith("use_comet")] = None
    """Additional values to log with the experiment (Comet's `log_others`)."""

    comet_offline_directory: Annotated[str | None, OnlyWith("use_comet")] = None
    """Directory in which the experiment is written as an archive for `comet upload`, instead of sending it."""

    use_trackio: bool = False
    """Log to Trackio: to its database on the machine of rank 0 (`trackio show`), or to a Space."""

    trackio_project: Annotated[str, OnlyWith("use_trackio")] = "neox"
    """Project of the run."""

    trackio_run_name: Annotated[str | None, OnlyWith("use_trackio")] = None
    """Name of the run, by which a resumed training continues it; by default a random name."""

    trackio_space_id: Annotated[str | None, OnlyWith("use_trackio")] = None
    """Space on the Hugging Face Hub that shows the run."""
