"""Score a trained checkpoint: perplexities, LAMBADA, tasks of lm-evaluation-harness.

Through `python deepy.py evaluate.py -d configs MODEL.yml --eval_tasks wikitext=wiki.test.raw lambada_openai` on as many
ranks as the configuration says, or directly, `python tools/evaluate.py -d configs MODEL.yml --eval_tasks ...`, in one
process that holds the whole model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import _checkout  # noqa: F401

from neox.checkpoint import CheckpointReader
from neox.config import RunPlan
from neox.errors import run_script
from neox.evaluation.results import TaskResult, check_writable, flat_metrics, format_table, write_results
from neox.evaluation.run import check_tasks, evaluate_tasks
from neox.generation.load import load_model
from neox.generation.startup import (
    add_plan_arguments,
    choose_checkpoint,
    plan_from_arguments,
    start_ranks,
    tokenizer_of,
)
from neox.log import setup_logging
from neox.tokenizer import Tokenizer
from neox.train.boards import TensorBoard, WandB
from neox.train.callbacks import Callback
from neox.train.state import TrainState


def show_on_boards(plan: RunPlan, results: Sequence[TaskResult], iteration: int) -> None:
    """Add the scores to TensorBoard and wandb at the checkpoint's iteration, where the configuration has them on."""
    keys, state = plan.config.logging, TrainState(iteration=iteration)
    boards: list[tuple[Callback, TrainState]] = []
    if keys.tensorboard_dir:
        # Opened as at a start: opened at an iteration, it drops the curves of training that lie behind that.
        boards.append((TensorBoard(keys.tensorboard_dir), TrainState()))
    if keys.use_wandb:
        boards.append((WandB(plan), state))
    for board, start in boards:
        board.on_start(start)
        board.on_evaluation(state, "tasks", flat_metrics(results))
        board.on_end(state)


def prepare(plan: RunPlan, tokenizer: Tokenizer) -> Path:
    """Refuse what can be refused before minutes of loading, and return the checkpoint to load."""
    check_writable(plan.config.generation.eval_results_prefix)
    check_tasks(plan.config, tokenizer)
    return choose_checkpoint(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_plan_arguments(parser)
    parser.add_argument("--eval_tasks", nargs="+", help="names the harness knows, YAML files of tasks, or KIND=FILE")
    parser.add_argument("--eval_results_prefix", help="beginning of the result file's path")
    args = parser.parse_intermixed_args()
    if args.eval_tasks:
        args.overrides.append(f"eval_tasks={json.dumps(args.eval_tasks)}")
    if args.eval_results_prefix:
        args.overrides.append(f"eval_results_prefix={args.eval_results_prefix}")
    setup_logging()
    plan = plan_from_arguments(args)
    keys = plan.config.generation
    tokenizer = tokenizer_of(plan.config)
    grid, device, checkpoint = start_ranks(plan, lambda: prepare(plan, tokenizer))
    model = load_model(plan, checkpoint, grid, device)
    results = evaluate_tasks(keys.eval_tasks or (), model, tokenizer, grid, plan.config)
    if grid.rank == 0:
        iteration = CheckpointReader(checkpoint).iteration
        about = {
            "checkpoint": str(checkpoint),
            "iteration": iteration,
            "precision": keys.inference_precision or plan.precision,
            "config": plan.config.to_flat(),
        }
        print(format_table(results), flush=True)  # a disk or a board that fails costs no scores
        path = write_results(keys.eval_results_prefix, results, about, datetime.now())
        print(f"\nresults in {path}", flush=True)
        show_on_boards(plan, results, iteration)


if __name__ == "__main__":
    run_script(main)
