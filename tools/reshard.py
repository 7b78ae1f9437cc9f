# PYTHON_ARGCOMPLETE_OK
"""Write a checkpoint's weights again for other degrees of parallelism.

    tools/reshard.py --input_dir CKPT/global_step1000 --output_dir OUT --model-parallel-size 4 --pipe-parallel-size 2

Training loads a checkpoint at any degrees; this is for other programs. The original stays as it is. The result has only
weights, without optimizer and random states.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.checkpoint import checkpoint_at, open_checkpoint, reshard
from neox.checkpoint.remote.fetching import add_checkpoint_cache
from neox.errors import run_script
from neox.log import setup_logging
from neox.plan import config_from_files


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("--input_dir", required=True, help="a global_stepN directory, or one that holds some, or its address")
    add("--output_dir", required=True, type=Path, help="global_stepN and `latest` are written into it")
    add("--model-parallel-size", type=int, required=True, help="tensor ranks of the result")
    add("--pipe-parallel-size", type=int, default=1, help="pipeline stages of the result")
    add("--config_file", nargs="+", help="the run's YAML, if the checkpoint does not tell enough")
    add_checkpoint_cache(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    config = config_from_files(args.config_file) if args.config_file else None
    reader = open_checkpoint(checkpoint_at(args.input_dir, args.cache_dir), config=config)
    path = reshard(reader, args.output_dir, tp_size=args.model_parallel_size, pp_size=args.pipe_parallel_size)
    print(f"{path}: pp {args.pipe_parallel_size} x mp {args.model_parallel_size}")


if __name__ == "__main__":
    run_script(main)
