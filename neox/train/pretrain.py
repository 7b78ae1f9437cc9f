"""The composition root: a plan becomes ranks, an engine, data, callbacks, and a loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from neox.config import RunPlan
from neox.data.build import build_data_iterators
from neox.engine import Engine, from_first_rank, initialize_distributed, leave, open_engine
from neox.evaluation.run import check_tasks, evaluate_in_training
from neox.generation.startup import tokenizer_of
from neox.log import setup_logging
from neox.parallel import ParallelGrid
from neox.train.boards import TensorBoard, WandB
from neox.train.callbacks import Callback
from neox.train.metrics_file import LossPicture, MetricsFile
from neox.train.stopping import ignore_signals
from neox.train.terminal import TerminalLine
from neox.train.trainer import Trainer


def pretrain(plan: RunPlan) -> int:
    """Train (or finetune) as planned, on this rank; return the exit code. Raises NeoXError for what users can mend."""
    grid, device = initialize_distributed(plan)
    setup_logging(grid.rank)
    callbacks = build_callbacks(plan) if grid.rank == 0 else []
    engine = open_engine(plan, grid, device)
    data = build_data_iterators(plan, grid.dp_rank, engine.iteration)
    code = Trainer(plan, engine, data, callbacks, build_tasks(plan, engine, grid, device)).fit()
    if code:
        # The first rank to be gone with such a status makes torchrun end the others, who have done all too.
        ignore_signals()
    leave()
    return code


def build_tasks(
    plan: RunPlan, engine: Engine, grid: ParallelGrid, device: torch.device
) -> Callable[[], dict[str, float]] | None:
    """Return what scores `eval_tasks` on the model in training, or None where there are none.

    Raises EvaluationError for tasks that do not exist, now and not after hours.
    """
    if not plan.config.generation.eval_tasks:
        return None
    tokenizer = tokenizer_of(plan.config)
    from_first_rank(lambda: check_tasks(plan.config, tokenizer))
    # A stage is read layer by layer; the whole network is called as in training, where ZeRO-3 gathers its weights.
    module = engine.body.module if grid.pp_size > 1 else engine.body
    return partial(evaluate_in_training, plan, module, grid, device, tokenizer)


def build_callbacks(plan: RunPlan) -> list[Callback]:
    """Return what the configuration's logging keys ask for. Raises ConfigError when a package is missing."""
    keys, training = plan.config.logging, plan.config.training
    callbacks: list[Callback] = [
        TerminalLine(training.train_iters or 0, keys.log_interval, log_grad_norm=keys.log_grad_norm)
    ]
    if keys.tensorboard_dir:
        callbacks.append(TensorBoard(keys.tensorboard_dir))
    if keys.use_wandb:
        callbacks.append(WandB(plan))
    if keys.log_dir:
        callbacks += [MetricsFile(keys.log_dir), LossPicture(keys.log_dir)]
    return callbacks
