"""All features. Nothing else imports one of them; the order of the table is the order in which points are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neox.engine import Feature, MakeFeatures, RunStart, TrainedModel
from neox.features.best_checkpoint import run as best_checkpoint
from neox.features.bits_per_byte import run as bits_per_byte
from neox.features.char_perplexity import run as char_perplexity
from neox.features.ema import run as ema
from neox.features.eval_tasks import run as eval_tasks
from neox.features.forward_check import run as forward_check
from neox.features.hf_export import run as hf_export
from neox.features.ledger import run as ledger
from neox.features.loss_spikes import run as loss_spikes
from neox.features.mirror_uploads import run as mirror_uploads
from neox.features.noise_scale import run as noise_scale
from neox.features.profiler import run as profiler
from neox.features.reference import run as reference
from neox.features.replica_check import run as replica_check
from neox.features.selective_fp32 import run as selective_fp32
from neox.features.stability import run as stability
from neox.features.stragglers import run as stragglers
from neox.features.terminal import run as terminal
from neox.features.trackers import comet, metrics_file, mlflow, tensorboard, trackio, wandb
from neox.features.update_statistics import run as update_statistics
from neox.plan import RunPlan

BUILDERS: tuple[Callable[[TrainedModel, RunStart], Feature | None], ...] = (
    replica_check.build,  # before anything else sees an update: differing weights end the run
    reference.build,  # completes batches before `stability` begins to observe the passes
    ledger.build,
    loss_spikes.build,
    selective_fp32.build,  # completes weights before averages begin with them
    ema.build,  # follows a step before others read the model
    noise_scale.build,
    stability.build,
    update_statistics.build,
    stragglers.build,
    bits_per_byte.build,
    char_perplexity.build,
    eval_tasks.build,
    forward_check.build,  # runs the model, so its `load` comes after those that change weights
)
"""Features that take part, in the order of their points. They are built when the model is."""

REPORTERS: tuple[Callable[[RunPlan, int], Feature | None], ...] = (
    terminal.build,
    tensorboard.build,
    wandb.build,
    mlflow.build,
    comet.build,
    trackio.build,
    metrics_file.build,
    profiler.build,
    best_checkpoint.build,
    hf_export.build,  # of what has become the best
    mirror_uploads.build,
)
"""Features that only report, with the numbers of all those above, and come after them. They are built from the plan and
the number of the rank before the run touches its checkpoints: a package that is missing, or a directory that cannot be
written, ends it with nothing changed."""


def build_reporters(plan: RunPlan, rank: int) -> Sequence[Feature]:
    """Build what reports on this rank.

    Raises:
        NeoXError: If one cannot be built, as for a tracker whose package is not installed.
    """
    built = [build(plan, rank) for build in REPORTERS]
    return [feature for feature in built if feature is not None]


def features_with(reporters: Sequence[Feature]) -> MakeFeatures:
    """Return the function that builds all features of a run around what reports already."""

    def build_all(model: TrainedModel, start: RunStart) -> Sequence[Feature]:
        built = [build(model, start) for build in BUILDERS]  # all ranks together
        return [*(feature for feature in built if feature is not None), *reporters]

    return build_all


def build_features(model: TrainedModel, start: RunStart) -> Sequence[Feature]:
    """Build the features that the configuration of a run asks for. All ranks call it together.

    Raises:
        NeoXError: If one cannot be built.
    """
    return features_with(build_reporters(model.plan, model.grid.rank))(model, start)
