"""Suggested commands after a training: chat with the model, generate text, or export it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from shlex import join

from neox.checkpoint.save_directory.best import BEST, BestCheckpoint, read_best
from neox.checkpoint_files.finding import newest_checkpoint
from neox.config.sections.training import CheckpointConfig
from neox.plan import RunPlan
from neox.plan.network.export_form import export_note
from neox.preflight.chat_checks import carries_chat_template
from neox.preflight.command_line import overrides
from neox.shipped_files import scripts_root

_STARTED_FROM = ("load", "iteration", "load_weights")
"""Keys of the weights that a run began with. The commands after it take those that it has saved."""


def next_steps(arguments: argparse.Namespace, plan: RunPlan) -> Iterator[str]:
    """Yield commands that use the checkpoint of a training; none if it saves no checkpoints.

    Args:
        arguments: Command line of the training.
        plan: Its plan.
    """
    save = plan.config.checkpoint.save
    if save is None:
        return
    files = list(arguments.conf_file)
    if arguments.conf_dir:
        files = ["-d", arguments.conf_dir, *files]
    settings: list[str] = []
    for text in overrides(arguments):
        if text.partition("=")[0] not in (*_STARTED_FROM, "overwrite"):
            settings += ["--set", text]
    if plan.config.given("load"):  # what the run began with, or what the command line leaves of it
        settings += ["--set", f"load={save}"]
    for key in _STARTED_FROM[1:]:
        if plan.config.given(key):
            settings += ["--set", f"{key}=null"]
    if plan.config.model.objective == "causal_lm":
        generate = join(["python", _tool("generate.py"), *files, *settings])
        if carries_chat_template(save):
            yield f"to chat with the model: {generate} --chat"
        interactive = ["--set", "text_gen_type=interactive"]
        yield f"to generate text: {generate} {join(interactive)}"
        best = _earlier_best(save)
        if best is not None:
            of_best = join(["--set", f"load={save.rstrip('/')}/{BEST}", *interactive])
            yield f"to generate text with the best checkpoint ({_value_of(best)}): {generate} {of_best}"
    if export_note(plan.config, plan.architecture) is None:
        yield from _exports(plan.config.checkpoint, save)


def _earlier_best(save: str) -> BestCheckpoint | None:
    """Return the best checkpoint of `save_best`; None without one, or if it is the newest one."""
    best = read_best(Path(save))
    if best is None or Path(save, best.checkpoint) == newest_checkpoint(save):
        return None
    return best


def _value_of(best: BestCheckpoint) -> str:
    return f"{best.rule.metric} {best.value:.4g} at step {best.iteration}"


def _exports(keys: CheckpointConfig, save: str) -> Iterator[str]:
    """Yield where the exports of a training are, or the commands that export its best checkpoint and its last one."""
    if keys.hf_export is not None:
        name = BEST if keys.hf_export == "best" else "global_stepN"
        yield f"exported models ({keys.hf_export}): {keys.export_directory}/{name}"
        return
    save = save.rstrip("/")
    best = _earlier_best(save)
    if best is not None:
        yield f"to export the best checkpoint ({_value_of(best)}): {_export(f'{save}/{BEST}', f'{save}-{BEST}-hf')}"
    yield f"to export the model: {_export(save, str(keys.export_directory))}"


def _export(checkpoint: str, output: str) -> str:
    return join(["python", _tool("convert_to_hf.py"), "--input_dir", checkpoint, "--output_dir", output])


def _tool(name: str) -> str:
    """Return the path of a tool as it is found from here."""
    root = scripts_root()
    if root == Path.cwd():
        return f"tools/{name}"
    return str(root / "tools" / name)
