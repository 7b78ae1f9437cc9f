"""Starts of small trainings: as a dry run, as the launcher makes them, and on a rank without the launcher's checks."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml

from neox.data import IndexedDatasetBuilder
from neox.errors import NeoXError
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.plan import decode_payload
from neox.preflight import command
from tests.log_settings import restored_log_settings

PREFIX = "text_document"
"""Prefix of the token files that `write_data` makes in a directory."""
KEYS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "pos_emb": "rotary",
    "tokenizer_type": "CharLevelTokenizer",
    "data_path": PREFIX,
    "split": "8,1,1",
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 2,
    "lr_decay_iters": 2,
    "eval_interval": 1,
    "eval_iters": 1,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "distributed_backend": "gloo",
    "num_gpus": 1,
    "log_dir": "logs",
    "num_workers": 0,
}
"""Keys of a training that starts in a directory with the files of `write_data`. None removes one of them."""


@dataclass(frozen=True)
class Answer:
    """What a command of `deepy.py` answered.

    Attributes:
        status: Exit status.
        errors: Lines about errors on standard error, and the error that ended it.
        payload: Plan with which ranks were started; None if none was.
    """

    status: int
    errors: str
    payload: str | None = None


def write_data(directory: Path, documents: int = 30, length: int = 20) -> None:
    """Write token files of the character tokenizer with documents of one length."""
    with IndexedDatasetBuilder(directory / PREFIX, np.uint16) as builder:
        for number in range(documents):
            builder.add_document((np.arange(length) * 7 + number) % 200 + 32)


def write_configuration(directory: Path, change: Mapping[str, Any]) -> Path:
    """Write the configuration of a training with some other keys."""
    path = directory / "run.yml"
    keys = {**KEYS, **change}
    path.write_text(yaml.safe_dump({key: value for key, value in keys.items() if value is not None}))
    return path


def dry_run(directory: Path, change: Mapping[str, Any], *flags: str) -> Answer:
    """Answer of `deepy.py train.py run.yml --dry-run`."""
    write_configuration(directory, change)
    return _answer(directory, "--dry-run", *flags)


def start(directory: Path, change: Mapping[str, Any], *flags: str) -> Answer:
    """Answer of `deepy.py train.py run.yml`, of which ranks that were started are taken to have finished."""
    write_configuration(directory, change)
    return _answer(directory, *flags)


def unchecked_start(directory: Path, change: Mapping[str, Any]) -> Answer:
    """Answer of a start whose launcher refuses nothing but keys of other types."""
    write_configuration(directory, change)
    with ExitStack() as stack:
        stack.enter_context(mock.patch("neox.plan.resolve.static_problems", return_value=[]))
        stack.enter_context(mock.patch("neox.preflight.start_run.StartRun._refuse_problems"))
        return _answer(directory)


def _answer(directory: Path, *flags: str) -> Answer:
    said = io.StringIO()
    ended = RunEnd(EndKind.FINISHED, 0)
    with ExitStack() as stack:
        stack.enter_context(restored_log_settings())
        stack.enter_context(redirect_stderr(said))
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(_inside(directory))
        stack.enter_context(mock.patch.object(sys, "argv", ["deepy.py", "train.py", "run.yml", *flags]))
        launch = stack.enter_context(mock.patch("neox.preflight.start_run.launch", return_value=ended))
        try:
            status = command.main()
        except NeoXError as error:
            status = error.exit_code
            print(f"error: {error}", file=said)
    errors = [line for line in said.getvalue().splitlines() if not line.startswith(("warning:", "note:"))]
    payload = None
    if launch.called:
        payload = launch.call_args.args[0].arguments[-1]
    return Answer(status, "\n".join(errors), payload)


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Work in a directory, on a machine without GPUs."""
    former = Path.cwd()
    os.chdir(directory)
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}):
        try:
            yield
        finally:
            os.chdir(former)


def refusals_of_rank(directories: Sequence[Path], payloads: Sequence[str]) -> list[tuple[str, str]]:
    """Start trainings one after the other on this rank, up to their first step; all ranks call it together.

    Args:
        directories: Directory of each.
        payloads: Plan of each.

    Returns:
        Function that refused each, as `FILE:FUNCTION`, with the error; empty strings if the first step was done.
    """
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine
    from neox.features.table import features_with

    answers = []
    for directory, payload in zip(directories, payloads, strict=True):
        with _inside(directory):
            try:
                plan = decode_payload(payload)
                grid, device = initialize_distributed(plan)
                engine = open_engine(plan, grid, device, features_with([]))
                data = build_data_iterators(plan, grid.data_rank, engine.iteration, **engine.data_arguments())
                engine.train_batch(data.train)
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                answers.append((f"{Path(frame.filename)}:{frame.name}", f"{type(error).__name__}: {error}"))
            else:
                answers.append(("", ""))
    return answers
