"""Prompts from a file, completions into one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from neox.errors import GenerationError
from neox.files import write_text
from neox.generation.text_stream import is_text

if TYPE_CHECKING:
    from neox.generation.completion import Completion

_TEXT_KEYS = ("context", "prompt", "text")


def read_prompts(path: str | Path) -> list[str]:
    """Read one prompt a line; in a `.jsonl` file an object a line, with its prompt under `context`, `prompt` or `text`.

    Blank lines at the end are nothing; anywhere else they are an error, as are lines that are not what the file's name
    promises: all of them are named with their line. Raises GenerationError.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise GenerationError(f"{path}: cannot be read as a file of prompts ({_reason(error)})") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise GenerationError(f"{path}: holds no prompts; write one a line, or choose text_gen_type: unconditional")
    read = _json_prompt if path.suffix in (".jsonl", ".json") else _plain_prompt
    prompts, problems = [], []
    for number, line in enumerate(lines, start=1):
        try:
            prompts.append(read(line.removesuffix("\r")))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise GenerationError("\n".join(problems))
    return prompts


def write_completions(path: str | Path, completions: Iterable[Completion]) -> None:
    """Write one JSON object a line; the file appears whole or, on an error, stays as it was."""
    try:
        write_text(Path(path), (json.dumps(done.to_json(), ensure_ascii=False) + "\n" for done in completions))
    except OSError as error:
        raise GenerationError(f"{path}: cannot be written ({_reason(error)})") from error


def _plain_prompt(line: str) -> str:
    if not line.strip():
        raise ValueError("empty prompt: remove the line, or choose text_gen_type: unconditional")
    return line


def _json_prompt(line: str) -> str:
    if not line.strip():
        raise ValueError("empty line")
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if isinstance(record, str):
        text: object = record
    elif isinstance(record, dict):
        text = next((record[key] for key in _TEXT_KEYS if key in record), None)
    else:
        text = None
    if not isinstance(text, str):
        raise ValueError(
            f"no prompt: expected a string, or an object with a string under one of {', '.join(_TEXT_KEYS)}"
        )
    if not is_text(text):
        raise ValueError("the prompt holds half of a UTF-16 pair (\\ud800 to \\udfff), which is no text")
    return _plain_prompt(text)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
