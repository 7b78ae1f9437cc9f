# PYTHON_ARGCOMPLETE_OK
"""Average the weights of several checkpoints of a model into a new checkpoint.

    tools/average_checkpoints.py --input_dir runs/my/checkpoints --last 5 --output_dir runs/my/averaged
    tools/average_checkpoints.py --input_dir A/global_step800 A/global_step1000 --weights decay --output_dir OUT

`--weights mean` counts all the same, `linear` as 1 : 2 : 3, the last one most. `decay` imitates a decay of the learning
rate that the run did not have: a WSD run whose learning rate is still high gets the weights of one that has decayed
(arXiv:2507.17634). The checkpoints may have any degrees. The result has only weights, which text, evaluation, exports
and `finetune: true` read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.checkpoint import (
    CheckpointReader,
    average_checkpoints,
    checkpoint_at,
    checkpoint_weights,
    last_checkpoints,
    open_checkpoint,
)
from neox.checkpoint.remote.fetching import add_checkpoint_cache
from neox.errors import ConfigError, run_script
from neox.log import setup_logging
from neox.plan import config_from_files
from neox.plan.schedule import FINAL_DECAYS
from neox.storage import is_remote


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("--input_dir", required=True, nargs="+", help="global_stepN directories, or one that holds them")
    add("--last", type=int, help="number of the newest checkpoints, if --input_dir holds several")
    add("--output_dir", required=True, type=Path, help="global_stepN and `latest` are written into it")
    add("--weights", choices=["mean", "linear", "decay"], default="mean", help="how much each checkpoint counts")
    add("--decay", choices=[*FINAL_DECAYS], default="minus_sqrt", help="shape of the decay that is imitated")
    add("--model-parallel-size", type=int, help="tensor ranks of the result (default: the newest checkpoint's)")
    add("--pipe-parallel-size", type=int, help="pipeline stages of the result (default: the newest checkpoint's)")
    add("--config_file", nargs="+", help="the run's YAML, if the checkpoints do not tell enough")
    add_checkpoint_cache(parser)
    return parser


def chosen_checkpoints(args: argparse.Namespace) -> list[Path]:
    """Return the checkpoints to average, the oldest first. Raises ConfigError for fewer than two."""
    if args.last is not None:
        if len(args.input_dir) != 1 or args.last < 2:
            raise ConfigError("--last takes a number from 2 on, and one directory of checkpoints as --input_dir")
        if is_remote(args.input_dir[0]):
            raise ConfigError("--last takes a local directory: give the addresses of checkpoints as --input_dir")
        return last_checkpoints(Path(args.input_dir[0]), args.last)
    if len(args.input_dir) < 2:
        raise ConfigError("one checkpoint is its own average: give --last N, or several checkpoints as --input_dir")
    paths = [checkpoint_at(given, args.cache_dir) for given in args.input_dir]
    return sorted(paths, key=lambda path: CheckpointReader(path).iteration)


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    config = config_from_files(args.config_file) if args.config_file else None
    paths = chosen_checkpoints(args)
    last = open_checkpoint(paths[-1], config=config)
    date = config.checkpoint.gpt_neox_date if config is not None else None
    readers = [CheckpointReader(path, last.layers, gpt_neox_date=date) for path in paths[:-1]]
    weights = checkpoint_weights(args.weights, len(paths), args.decay)
    for path, weight in zip(paths, weights, strict=True):
        print(f"{weight:8.5f}  {path}")
    written = average_checkpoints(
        [*readers, last],
        weights,
        args.output_dir,
        tp_size=args.model_parallel_size or last.tp_size,
        pp_size=args.pipe_parallel_size or last.pp_size or 1,
    )
    print(written)


if __name__ == "__main__":
    run_script(main)
