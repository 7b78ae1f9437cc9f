# PYTHON_ARGCOMPLETE_OK
"""Score a trained checkpoint: perplexities, LAMBADA, tasks of lm-evaluation-harness.

On as many ranks as the configuration says:

    python deepy.py evaluate.py -d configs MODEL.yml --eval_tasks wikitext=wiki.test.raw lambada_openai

or in one process that holds the whole model:

    python tools/evaluate.py -d configs MODEL.yml --eval_tasks ...

The perplexity of your own text as lm-evaluation-harness defines it (bits per byte compare models with different
tokenizers; losses per token do not):

    python tools/evaluate.py -d configs MODEL.yml --eval_tasks perplexity=my.jsonl

The log-probability of each sentence: tools/score.py.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.checkpoint import CheckpointReader
from neox.errors import run_script
from neox.evaluation.evaluate import check_tasks, evaluate_tasks
from neox.evaluation.results import check_writable, flat_metrics, format_table, write_harness_report, write_results
from neox.features.trackers.scores import report_scores
from neox.generation.load import load_model
from neox.generation.startup import (
    add_plan_arguments,
    choose_checkpoint,
    end_ranks,
    plan_from_arguments,
    start_ranks,
    use_end_ids,
)
from neox.log import setup_logging
from neox.plan import RunPlan
from neox.tokenizer import Tokenizer


def prepare(plan: RunPlan, tokenizer: Tokenizer) -> Path:
    """Check the request before the model is loaded, and return the checkpoint."""
    check_writable(plan.config.generation.eval_results_prefix)
    check_tasks(plan.config, tokenizer)
    return choose_checkpoint(plan, tokenizer)


def main() -> None:
    parser = ScriptParser(description=__doc__)
    add_plan_arguments(parser, "-o")
    parser.add_argument(
        "--eval_tasks",
        nargs="+",
        help="names of the harness, YAML files of tasks, or KIND=FILE with perplexity, wikitext, lambada or needle",
    )
    parser.add_argument("--eval_results_prefix", help="start of the result file's path")
    args = parser.parse_intermixed_args()
    if args.eval_tasks:
        args.set.append(f"eval_tasks={json.dumps(args.eval_tasks)}")
    if args.eval_results_prefix:
        args.set.append(f"eval_results_prefix={args.eval_results_prefix}")
    setup_logging()
    plan, tokenizer = plan_from_arguments(args)
    keys = plan.config.generation
    grid, device, checkpoint = start_ranks(plan, lambda: prepare(plan, tokenizer))
    use_end_ids(plan, checkpoint, tokenizer)
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
        print(f"{checkpoint}, {iteration:,} steps\n")
        print(format_table(results), flush=True)  # a full disk or a tracker that fails loses no scores
        now = datetime.now()
        path = write_results(keys.eval_results_prefix, results, about, now)
        report = write_harness_report(keys.eval_results_prefix, results, about, now)
        print(f"\nresults in {path}", flush=True)
        if report:
            print(f"the same in lm-eval's form in {report}", flush=True)
        report_scores(plan, flat_metrics(results), iteration)
    end_ranks(grid)


if __name__ == "__main__":
    run_script(main)
