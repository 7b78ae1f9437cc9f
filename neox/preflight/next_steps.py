"""Suggested commands after a training: chat with the model, generate text, or export it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from shlex import join

from neox.plan import RunPlan
from neox.plan.network.export_form import export_note
from neox.preflight.chat_checks import carries_chat_template
from neox.preflight.command_line import overrides

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
        generate = join(["python", "tools/generate.py", *files, *settings])
        if carries_chat_template(save):
            yield f"to chat with the model: {generate} --chat"
        interactive = ["--set", "text_gen_type=interactive"]
        yield f"to generate text: {generate} {join(interactive)}"
    if export_note(plan.config, plan.architecture) is None:
        export = ["python", "tools/convert_to_hf.py", "--input_dir", save, "--output_dir", f"{save.rstrip('/')}-hf"]
        yield f"to export the model: {join(export)}"
