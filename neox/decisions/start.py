"""What a start decides, in order: hosts, data, checkpoint, precision, length, warm-up, divisor of losses."""

from __future__ import annotations

from neox.config import NOTHING, Decided, Decision, NeoXConfig, apply_decisions
from neox.decisions.checkpoint import DecidedStart
from neox.decisions.schedule import decide_schedule, decide_warmup
from neox.errors import DataError
from neox.plan import Capabilities
from neox.plan.batches.batch import MICRO, TOTAL, BatchPlan, solve_batch
from neox.plan.batches.batch_schedule import BatchSchedule, ramp_problems
from neox.plan.devices.precision import decide_precision
from neox.plan.ranks.topology import solve_grid
from neox.problems import Missing

_EPOCHS = "num_train_epochs"
_NORMALIZATION = "loss_normalization"


def decide_start(
    config: NeoXConfig,
    world_size: int,
    capabilities: Capabilities,
    *,
    hosts: Decided = NOTHING,
    data: Decided = NOTHING,
    own: DecidedStart | None = None,
) -> Decided:
    """Decide everything that a start takes from what is on disks and hosts. It reads the configuration as it was given.

    Args:
        config: The configuration, which breaks no rule.
        world_size: Number of ranks.
        capabilities: What the hosts multiply natively, and the precision of the checkpoint that the run resumes from.
        hosts: Decisions about fewer hosts than planned (`neox.preflight.fit_hosts`).
        data: Copies of remote token files (`neox.preflight.remote_data`).
        own: The checkpoint from which a training starts (`checkpoint.choose_checkpoint`); None for other scripts.
    """
    decided = hosts + data
    if own is None:
        return decided + decide_precision(config, capabilities)
    decided += own
    decided += decide_precision(config, capabilities)
    length = decide_length(config, world_size, hosts=hosts, data=data)
    steps = length.values.get("train_iters", config.training.train_iters)
    decided += decide_schedule(config, own.loaded)
    decided += length
    decided += decide_warmup(config, own.loaded, steps)
    return decided + decide_loss_normalization(config, data)


def decide_length(config: NeoXConfig, world_size: int, *, hosts: Decided = NOTHING, data: Decided = NOTHING) -> Decided:
    """Count the iterations of `num_train_epochs` in the training data.

    Nothing is counted if the batch or the lengths break rules, which `resolve` reports.

    Args:
        config: The configuration.
        world_size: Number of ranks, which determines the samples of a step.
        hosts: Decisions about hosts, which may keep the batch of more ranks.
        data: Copies of remote token files.
    """
    epochs = config.training.num_train_epochs
    length = config.model.seq_length
    if epochs is None or length is None or config.training.train_iters is not None or config.data.data_stages:
        return NOTHING
    grid = solve_grid(config, world_size, [])
    if grid is None:
        return NOTHING
    sizes = hosts.values
    batch: BatchPlan | None
    if TOTAL in sizes:
        batch = BatchPlan(sizes[TOTAL], sizes[MICRO], sizes[TOTAL] // (sizes[MICRO] * grid.data_size))
    else:
        batch = solve_batch(config, grid.data_size, [])
    if batch is None or any(ramp_problems(config, batch)):
        return NOTHING
    try:
        from neox.data.pass_amounts import training_samples  # numpy, which a dry run without data does not need

        samples = training_samples(apply_decisions(config, data.decisions), length, epochs)
    except (DataError, ModuleNotFoundError) as error:
        rule = f"is counted in the training data, which cannot be read: {error}"
        return Decided(problems=tuple(Missing.of([config.problem(_EPOCHS, rule)])))
    steps = max(1, BatchSchedule.of(config, batch).steps(samples))
    reason = (
        f"{config.describe_setting(_EPOCHS)} is train_iters {steps:,}: {samples:,} samples of {length:,} tokens, "
        f"{batch.train_batch_size:,} a step"
    )
    source = config.source(_EPOCHS).derived(_EPOCHS)
    decisions = (Decision("train_iters", steps, reason, source), Decision(_EPOCHS, None, reason, source))
    return Decided(decisions, (reason,))


def decide_loss_normalization(config: NeoXConfig, data: Decided = NOTHING) -> Decided:
    """Decide `loss_normalization: auto` if the labels of the training data are those of conversations."""
    labels = data.values.get("train_label_data_paths", config.data.train_label_data_paths) or ()
    if config.data.loss_normalization != "auto" or not any(map(_are_of_conversations, labels)):
        return NOTHING
    reason = f"`{_NORMALIZATION}: auto` is tokens: the labels are of conversations"
    source = config.source(_NORMALIZATION).derived(_NORMALIZATION)
    return Decided((Decision(_NORMALIZATION, "tokens", reason, source),), (reason,))


def _are_of_conversations(prefix: str) -> bool:
    """Return whether `preprocess_chat.py` wrote a dataset; False if its sidecar is missing or damaged."""
    try:
        from neox.data.token_files import sidecar  # numpy, which a dry run without data does not need

        found = sidecar.read_sidecar(prefix)
    except (DataError, ModuleNotFoundError):
        return False
    return found is not None and "chat" in found.settings
