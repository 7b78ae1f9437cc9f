"""Pretraining and finetuning of one rank: from the plan to the exit code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from neox.checkpoint import add_end_ids
from neox.data.run_data import DataIterators, build_data_iterators
from neox.engine import Engine, from_first_rank, initialize_distributed, open_engine, shutdown
from neox.evaluation.run import check_tasks, evaluate_in_training
from neox.log import get_logger, setup_logging
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from neox.tokenizer import tokenizer_of
from neox.train.callbacks import Callback
from neox.train.characters import CharacterCounter
from neox.train.failures import reported_failures
from neox.train.mirror_uploads import MirrorUploads
from neox.train.profiling import Profiler
from neox.train.reference import reference_log_probs
from neox.train.remote_trackers import queued_trackers
from neox.train.stopping import ignore_signals
from neox.train.stragglers import Stragglers
from neox.train.terminal import TerminalLine
from neox.train.trackers import MetricsFile, TensorBoard, WandB
from neox.train.trainer import Trainer
from neox.train.update_statistics import UpdateStatistics, observes_updates

_log = get_logger(__name__)


def pretrain(plan: RunPlan) -> int:
    """Train or finetune as planned, on this rank; all ranks call it together.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        NeoXError: If something fails that users can mend.
    """
    with reported_failures():
        return _pretrain(plan)


def _pretrain(plan: RunPlan) -> int:
    """Train on this rank, and return the exit code."""
    grid, device = initialize_distributed(plan)
    setup_logging(grid.rank)
    callbacks: list[Callback] = []
    if grid.rank == 0:
        callbacks = build_callbacks(plan)
    if plan.config.logging.profile or plan.config.logging.memory_profiling:
        callbacks.append(Profiler(plan, grid.rank))
    engine = open_engine(plan, grid, device)
    callbacks.append(Stragglers(plan, engine))
    if observes_updates(plan):
        callbacks.append(UpdateStatistics(plan, engine))
    uploads: MirrorUploads | None = None
    if grid.rank == 0 and plan.config.checkpoint.checkpoint_mirror is not None:
        uploads = MirrorUploads(plan)
        callbacks.append(uploads)
    characters = None
    if plan.config.training.char_level_ppl:
        characters = CharacterCounter(tokenizer_of(plan.config))
    warn_of_other_samples(engine)
    reference = partial(reference_log_probs, engine)

    def open_data() -> DataIterators:
        return build_data_iterators(plan, grid.data_rank, engine.iteration, ledger=engine.ledger, reference=reference)

    data = open_data()
    tasks = build_tasks(plan, engine, grid, device)
    code = Trainer(plan, engine, data, callbacks, tasks, open_data, characters).fit()
    if code:
        # torchrun signals the other ranks when the first one exits with such a status; they have finished as well.
        ignore_signals()
    shutdown()
    if uploads is not None:
        uploads.finish()
    return code


def warn_of_other_samples(engine: Engine) -> None:
    """Warn if a resumed run has read other samples than it would have with this batch: some are skipped or repeated.

    With a record of what was read, the run goes on after that.
    """
    read = engine.deepspeed_engine.global_samples
    expected = engine.plan.batch_schedule.samples(engine.iteration)
    if read in (0, expected) or engine.ledger is not None:  # 0: counters were not loaded
        return
    _log.warning(
        "the checkpoint has seen %d samples in %d iterations, and this batch means %d: %d samples are %s",
        read,
        engine.iteration,
        expected,
        abs(read - expected),
        "skipped" if expected > read else "read again",
    )


def build_tasks(
    plan: RunPlan, engine: Engine, grid: ParallelGrid, device: torch.device
) -> Callable[[], dict[str, float]] | None:
    """Build the function that scores `eval_tasks` on the model in training.

    Returns:
        A function that all ranks call together, or None if there are no tasks.

    Raises:
        EvaluationError: If a task does not exist.
    """
    if not plan.config.generation.eval_tasks:
        return None
    tokenizer = tokenizer_of(plan.config)
    from_first_rank(lambda: check_tasks(plan.config, tokenizer))
    add_end_ids(tokenizer, engine.generation_settings, str(plan.config.checkpoint.load))
    return partial(evaluate_in_training, plan, engine.deepspeed_engine, grid, device, tokenizer)


def build_callbacks(plan: RunPlan) -> list[Callback]:
    """Build the callbacks of rank 0 from the logging keys.

    Raises:
        ConfigError: If a tracker's package is not installed.
    """
    keys = plan.config.logging
    callbacks: list[Callback] = [TerminalLine(plan)]
    if keys.tensorboard_dir:
        callbacks.append(TensorBoard(keys.tensorboard_dir, plan))
    if keys.use_wandb:
        callbacks.append(WandB(plan))
    callbacks += queued_trackers(plan)
    if keys.log_dir:
        callbacks.append(MetricsFile(keys.log_dir))
    return callbacks
