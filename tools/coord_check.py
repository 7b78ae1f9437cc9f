# PYTHON_ARGCOMPLETE_OK
"""Print muP's coordinate check: how far the first optimizer steps move a network at several widths.

    tools/coord_check.py -d configs 125M --set use_mup=true --set mup_base_hidden_size=256 --widths 256 512 1024

With `use_mup` the rows are alike; without it they grow with the width. The check uses random tokens, fp32 and one
process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser, add_overrides
from neox.errors import run_script
from neox.log import setup_logging
from neox.plan import config_from_files
from neox.train.coordinate_check import coordinate_check


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("config", nargs="+", help="YAML files")
    add("-d", "--conf_dir", type=Path, help="directory of the YAML files")
    add_overrides(parser, "-o")
    add("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="hidden sizes")
    add("--steps", type=int, default=3, help="optimizer steps")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    config = config_from_files(args.config, conf_dir=args.conf_dir, overrides=args.set)
    print("mean absolute change since initialisation after each step")
    for row in coordinate_check(config, args.widths, steps=args.steps):
        print(f"hidden_size {row.hidden_size:6}   last block {_columns(row.hidden)}   logits {_columns(row.logits)}")


def _columns(values: Iterable[float]) -> str:
    return " ".join(f"{value:9.4f}" for value in values)


if __name__ == "__main__":
    run_script(main)
