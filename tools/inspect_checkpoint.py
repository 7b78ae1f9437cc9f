# PYTHON_ARGCOMPLETE_OK
"""Show what a checkpoint holds, or how two differ.

tools/inspect_checkpoint.py CKPT/global_step1000 [--tensors] [--json]
tools/inspect_checkpoint.py CKPT/global_step1000 OTHER/global_step1000    exit code 3 if their weights differ
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.checkpoint import (
    CheckpointReader,
    checkpoint_at,
    compare_checkpoints,
    open_checkpoint,
    summarize,
    tensor_stats,
)
from neox.errors import run_script
from neox.plan import config_from_files

WEIGHTS_DIFFER, INCOMPLETE = 3, 4


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", nargs="+", help="one or two global_stepN directories, or directories that hold some")
    add("--tensors", action="store_true", help="list every tensor with shape, norm, largest value and sha256")
    add("--no-verify", action="store_true", help="do not read every byte to check it")
    add("--config_file", nargs="+", help="the run's YAML, where the checkpoint does not tell enough")
    add("--json", action="store_true", help="one JSON object")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if len(args.checkpoint) > 2:
        build_parser().error("one or two checkpoints")
    config = config_from_files(args.config_file) if args.config_file else None
    readers = [open_checkpoint(checkpoint_at(Path(path)), config=config) for path in args.checkpoint]
    return show_difference(*readers, as_json=args.json) if len(readers) == 2 else show(readers[0], args)


def show(reader: CheckpointReader, args: argparse.Namespace) -> int:
    summary = summarize(reader, verify=not args.no_verify)
    tensors = list(tensor_stats(reader)) if args.tensors else []
    if args.json:
        whole: dict[str, Any] = {**dataclasses.asdict(summary), "path": str(summary.path)}
        print(json.dumps({**whole, "tensors": [dataclasses.asdict(t) for t in tensors]}, indent=1))
        return INCOMPLETE if summary.problems else 0
    checked = "manifest" if summary.has_manifest else "no manifest; the archives' own checksums"
    state = "; ".join(summary.problems) if summary.problems else "yes"
    lines = {
        "checkpoint": summary.path,
        "iteration": summary.iteration,
        "degrees": f"pp {summary.pp_size or '?'} x mp {summary.tp_size} x dp {summary.dp_size or '?'}",
        "model": f"{summary.layers} blocks, {summary.parameters:,} parameters, {', '.join(summary.dtypes)}",
        "on disk": f"{summary.bytes_on_disk:,} bytes, {summary.optimizer_files} optimizer files",
        f"complete ({checked})": state,
        **summary.args,
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name.ljust(width)}  {value}")
    for t in tensors:
        warning = "" if t.finite else "  NOT FINITE"
        shape = "x".join(map(str, t.shape))
        numbers = f"norm {t.norm:.6g} max {t.largest:.6g}"
        print(f"{t.index:3d} {t.name:36s} {shape:>14s} {t.dtype} {numbers} {t.sha256[:16]}{warning}")
    return INCOMPLETE if summary.problems else 0


def show_difference(first: CheckpointReader, second: CheckpointReader, *, as_json: bool) -> int:
    differences = list(compare_checkpoints(first, second))
    a, b = first.args, second.args
    settings = {key: [a.get(key), b.get(key)] for key in sorted({*a, *b}) if a.get(key) != b.get(key)}
    if as_json:
        tensors = [dataclasses.asdict(d) for d in differences]
        print(json.dumps({"settings": settings, "tensors": tensors}, indent=1))
        return WEIGHTS_DIFFER if differences else 0
    for key, (one, two) in settings.items():
        print(f"{key}: {one} | {two}")
    for d in differences:
        by = "" if d.largest is None else f", largest difference {d.largest:.3g} (relative {d.relative:.3g})"
        print(f"{d.index:3d} {d.name}: {d.what}{by}")
    print(f"{len(differences)} tensors differ" if differences else "all tensors are equal")
    return WEIGHTS_DIFFER if differences else 0


if __name__ == "__main__":
    run_script(main)
