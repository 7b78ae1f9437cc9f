# PYTHON_ARGCOMPLETE_OK
"""Show what a checkpoint holds, or how two differ.

tools/inspect_checkpoint.py CKPT/global_step1000 [--tensors] [--json]
tools/inspect_checkpoint.py CKPT/global_step1000 OTHER/global_step1000    exit code 3 if their weights differ
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
from neox.checkpoint.inspection import Summary, TensorStats
from neox.checkpoint.remote.fetching import add_checkpoint_cache, all_files, without_optimizer
from neox.errors import run_script
from neox.plan import config_from_files

# exit statuses
WEIGHTS_DIFFER = 3
INCOMPLETE = 4


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", nargs="+", help="one or two global_stepN directories, or that hold some, or their addresses")
    add("--tensors", action="store_true", help="list every tensor with shape, norm, largest value and sha256")
    add("--no-verify", action="store_true", help="do not read every byte to check it")
    add("--config_file", nargs="+", help="the run's YAML, if the checkpoint does not tell enough")
    add("--json", action="store_true", help="one JSON object")
    add_checkpoint_cache(parser)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if len(args.checkpoint) > 2:
        build_parser().error("one or two checkpoints")
    config = config_from_files(args.config_file) if args.config_file else None
    needed = without_optimizer if len(args.checkpoint) == 2 else all_files
    paths = [checkpoint_at(given, args.cache_dir, needed) for given in args.checkpoint]
    readers = [open_checkpoint(path, config=config) for path in paths]
    if len(readers) == 2:
        return show_difference(*readers, as_json=args.json)
    return show(readers[0], args)


def show(reader: CheckpointReader, args: argparse.Namespace) -> int:
    """Print what a checkpoint holds, and return the exit status."""
    summary = summarize(reader, verify=not args.no_verify)
    tensors = list(tensor_stats(reader)) if args.tensors else []
    if args.json:
        whole: dict[str, Any] = {**dataclasses.asdict(summary), "path": str(summary.path)}
        whole["tensors"] = list(map(dataclasses.asdict, tensors))
        print(json.dumps(whole, indent=1))
    else:
        print_table(summary_lines(summary))
        for tensor in tensors:
            print(tensor_line(tensor))
    return INCOMPLETE if summary.problems else 0


def summary_lines(summary: Summary) -> dict[str, Any]:
    """Return the names and values to print."""
    checked = "no manifest; the archives' own checksums"
    if summary.has_manifest:
        checked = "manifest"
    size = f"{summary.parameters:,} parameters"
    if summary.active_parameters != summary.parameters:
        size += f" ({summary.active_parameters:,} active)"
    return {
        "checkpoint": summary.path,
        "iteration": summary.iteration,
        "degrees": f"pp {summary.pp_size or '?'} x mp {summary.tp_size} x dp {summary.dp_size or '?'}",
        "model": f"{summary.layers} blocks, {size}, {', '.join(summary.dtypes)}",
        "on disk": f"{summary.bytes_on_disk:,} bytes, {summary.optimizer_files} optimizer files",
        **averages(summary),
        f"complete ({checked})": "; ".join(summary.problems) or "yes",
        **summary.args,
    }


def averages(summary: Summary) -> dict[str, str]:
    """Return lines about averages: of weights over steps, and of checkpoints."""
    lines = {}
    if summary.averaged_steps is not None:
        lines["average"] = f"of the weights over {summary.averaged_steps:,} steps"
    if summary.averaged_from:
        sources = [f"{weight:.4g} x {path}" for path, weight in summary.averaged_from.items()]
        lines["mean of"] = " + ".join(sources)
    return lines


def print_table(lines: dict[str, Any]) -> None:
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name.ljust(width)}  {value}")


def tensor_line(tensor: TensorStats) -> str:
    shape = "x".join(map(str, tensor.shape))
    numbers = f"norm {tensor.norm:.6g} max {tensor.largest:.6g}"
    line = f"{tensor.index:3d} {tensor.name:36s} {shape:>14s} {tensor.dtype} {numbers} {tensor.sha256[:16]}"
    if not tensor.finite:
        line += "  NOT FINITE"
    return line


def show_difference(first: CheckpointReader, second: CheckpointReader, *, as_json: bool) -> int:
    """Print how two checkpoints differ, and return the exit status."""
    tensors = list(compare_checkpoints(first, second))
    settings = {}
    for key in sorted({*first.args, *second.args}):
        values = [first.args.get(key), second.args.get(key)]
        if values[0] != values[1]:
            settings[key] = values
    status = WEIGHTS_DIFFER if tensors else 0
    if as_json:
        print(json.dumps({"settings": settings, "tensors": list(map(dataclasses.asdict, tensors))}, indent=1))
        return status
    for key, (one, two) in settings.items():
        print(f"{key}: {one} | {two}")
    for tensor in tensors:
        line = f"{tensor.index:3d} {tensor.name}: {tensor.what}"
        if tensor.largest is not None:
            line += f", largest difference {tensor.largest:.3g} (relative {tensor.relative:.3g})"
        print(line)
    print(f"{len(tensors)} tensors differ" if tensors else "all tensors are equal")
    return status


if __name__ == "__main__":
    run_script(main)
