"""MLflow (`use_mlflow`)."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from neox.errors import ConfigError, needs_package
from neox.features.trackers.journal import QueuedTracker, Row, first_line, short
from neox.features.trackers.tracker import run_settings
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)
_LONGEST_NAME = 250


def build(plan: RunPlan, rank: int) -> MLflow | None:
    """Return the tracker of rank 0; None if it is not configured."""
    if rank != 0 or not plan.config.logging.use_mlflow:
        return None
    return MLflow(plan)


class MLflow(QueuedTracker):
    """MLflow run, at `mlflow_tracking_uri` or the environment's MLFLOW_TRACKING_URI.

    Raises:
        ConfigError: If mlflow is not installed.
    """

    name = "mlflow"
    _MOST_METRICS = 900
    _MOST_PARAMETERS = 100

    def __init__(self, plan: RunPlan, part: str = "") -> None:
        super().__init__(plan, part)
        with needs_package(ConfigError, "use_mlflow", "mlflow-skinny", "requirements-mlflow.txt"):
            import mlflow
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run = ""

    def connect(self, *, is_resumed: bool) -> None:
        """Find the run by its tag, or create it and log its settings as parameters."""
        keys = self.plan.config.logging
        client = self._mlflow.MlflowClient(tracking_uri=keys.mlflow_tracking_uri)
        experiment = client.get_experiment_by_name(keys.mlflow_experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(keys.mlflow_experiment)
        # An attempt that broke off may have created the run, too.
        found = client.search_runs([number], f"tags.neox_run = '{self.run_id}'")
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            tags = {"neox_run": self.run_id}
            if keys.tracker_group is not None:
                tags["group"] = keys.tracker_group
            created = client.create_run(number, tags=tags, run_name=keys.mlflow_run_name)
            self._run = created.info.run_id
        self._client = client
        known = found[0].data.params if found else {}
        parameters = []
        for key, value in run_settings(self.plan).items():
            if key not in known:  # MLflow refuses another value for a parameter
                parameters.append(self._mlflow.entities.Param(accepted_name(key), short(value)))
        for start in range(0, len(parameters), self._MOST_PARAMETERS):
            self._log_parameters(parameters[start : start + self._MOST_PARAMETERS])

    def _log_parameters(self, parameters: list[Any]) -> None:
        """Log settings; those that the server refuses are left out."""
        try:
            self._client.log_batch(self._run, params=parameters)
        except Exception as error:  # of its own classes
            if not self.refuses(error):
                raise
            if len(parameters) == 1:
                _log.warning("mlflow refuses the setting %s: %s", parameters[0].key, first_line(error))
                return
            half = len(parameters) // 2
            self._log_parameters(parameters[:half])
            self._log_parameters(parameters[half:])

    def refuses(self, error: Exception) -> bool:
        """Return whether MLflow refuses a name or a value; other errors may be temporary."""
        refused = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST")
        return getattr(error, "error_code", "") in refused or super().refuses(error)

    def send(self, rows: list[Row]) -> None:
        """Log metrics in batches of the size that the server accepts."""
        metrics = []
        for row in rows:
            for name, value in row.scalars.items():
                time_ms = int(row.seconds * 1000)
                metrics.append(self._mlflow.entities.Metric(accepted_name(name), value, time_ms, row.iteration))
        for start in range(0, len(metrics), self._MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + self._MOST_METRICS])

    def close(self, *, failed: bool) -> None:
        """Set the state of the run."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def accepted_name(name: str) -> str:
    """Return a name that every MLflow server accepts: the same one each time, and another one for another name.

    Servers accept letters, digits, `_`, `-`, `.`, `/` and blanks, in what is a path in its shortest form. In other
    names the characters become `_`, and four digits of a hash of the name are added. Names end after 250 characters.
    """
    accepted = re.sub(r"[^/\w.\- ]", "_", name)
    parts = [part for part in accepted.split("/") if part.strip(". ")]
    accepted = "/".join(parts)
    if accepted == name and len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:4]
    return f"{accepted[: _LONGEST_NAME - 5]}-{digest}"
