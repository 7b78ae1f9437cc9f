"""All features. Nothing else imports one of them; the order of the table is the order in which points are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neox.engine import Feature, RunStart, TrainedModel
from neox.features.char_perplexity import run as char_perplexity
from neox.features.ema import run as ema
from neox.features.eval_tasks import run as eval_tasks
from neox.features.forward_check import run as forward_check
from neox.features.ledger import run as ledger
from neox.features.loss_spikes import run as loss_spikes
from neox.features.mirror_uploads import run as mirror_uploads
from neox.features.noise_scale import run as noise_scale
from neox.features.profiler import run as profiler
from neox.features.reference import run as reference
from neox.features.replica_check import run as replica_check
from neox.features.stability import run as stability
from neox.features.stragglers import run as stragglers
from neox.features.terminal import run as terminal
from neox.features.trackers import comet, metrics_file, mlflow, tensorboard, trackio, wandb
from neox.features.update_statistics import run as update_statistics

BUILDERS: tuple[Callable[[TrainedModel, RunStart], Feature | None], ...] = (
    replica_check.build,  # before anything else sees an update: differing weights end the run
    reference.build,  # completes batches before `stability` begins to observe the passes
    ledger.build,
    loss_spikes.build,
    ema.build,  # follows a step before others read the model
    noise_scale.build,
    stability.build,
    update_statistics.build,
    stragglers.build,
    char_perplexity.build,
    eval_tasks.build,
    forward_check.build,  # runs the model, so its `load` comes after those that change weights
    # What only reports, with the numbers of all those above:
    terminal.build,
    tensorboard.build,
    wandb.build,
    mlflow.build,
    comet.build,
    trackio.build,
    metrics_file.build,
    profiler.build,
    mirror_uploads.build,
)


def build_features(model: TrainedModel, start: RunStart) -> Sequence[Feature]:
    """Build the features that the configuration of a run asks for. All ranks call it together.

    Raises:
        NeoXError: If one cannot be built, as for a tracker whose package is not installed.
    """
    features = []
    for build in BUILDERS:
        feature = build(model, start)
        if feature is not None:
            features.append(feature)
    return features
