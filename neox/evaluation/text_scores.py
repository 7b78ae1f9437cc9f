"""Scoring of answers in JSON lines with a reward model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from neox.config import NeoXConfig
from neox.corpus import BadInput, BadRecord, SkipBudget, convert_lines, expand_inputs, read_blocks
from neox.generation.runner import ModelRunner
from neox.log import get_logger
from neox.preprocess import PreferenceSettings, PreprocessSettings, TokenizerSpec
from neox.preprocess.conversations import without_nulls
from neox.preprocess.encode import EncodeJob
from neox.preprocess.preference_encoder import CHOSEN, PreferenceEncoder
from neox.tokenizer.chat import ChatTemplate

_log = get_logger(__name__)
_BLOCK_BYTES = 1 << 18
_LONGEST_TEXT = 1 << 24
Line = TypeVar("Line")


class _LineToScore(NamedTuple):
    """A line of the input.

    Attributes:
        record: Its JSON object.
        answers: Token ids of its answers, each with the prompt: chosen and rejected, or the only one.
    """

    record: dict[str, Any]
    answers: tuple[np.ndarray, ...]


@dataclass
class ScoreSummary:
    """Statistics of the lines scored so far.

    Attributes:
        scores: Score of every answer.
        margins: Score of the chosen answer minus that of the rejected one, for each pair.
    """

    scores: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{len(self.scores):,} answers"
        if self.scores:
            text += f", mean score {sum(self.scores) / len(self.scores):.4g}"
        if self.margins:
            accuracy = sum(margin > 0 for margin in self.margins) / len(self.margins)
            margin = sum(self.margins) / len(self.margins)
            text += f"; {len(self.margins):,} pairs, accuracy {accuracy:.4f}, mean margin {margin:.4g}"
        return text


def answer_encoder(config: NeoXConfig, template: ChatTemplate | None) -> PreferenceEncoder:
    """Return an encoder that tokenizes lines as preprocessing for the training of a reward model does.

    Args:
        config: Configuration of the reward model.
        template: The model's chat template; None if it has none.
    """
    keys = config.tokenizer
    tokenizer = TokenizerSpec(keys.tokenizer_type, keys.vocab_file, keys.merge_file, True, tuple(keys.added_tokens))
    settings = PreprocessSettings((), "", tokenizer)
    return PreferenceEncoder(EncodeJob(settings, "int32", (), _LONGEST_TEXT), PreferenceSettings(template))


def scored_lines(
    runner: ModelRunner,
    encoder: PreferenceEncoder,
    paths: Sequence[str],
    summary: ScoreSummary,
    *,
    batch: int,
    skip_bad: int,
) -> Iterator[str]:
    """Score the answers in files, and yield each line with its scores as JSON.

    A line with `chosen` and `rejected` gets `chosen_score` and `rejected_score`, one with `completion` gets `score`.
    All ranks of the model call it together.

    Args:
        runner: The reward model.
        encoder: Encoder of lines.
        paths: Files or directories.
        summary: Receives the scores and margins.
        batch: Number of lines in a forward pass.
        skip_bad: Number of bad lines that may be skipped, each with a warning.

    Raises:
        DataError: If there are more bad lines. It names the file and line of the first one.
    """

    def convert(record: Any) -> _LineToScore:
        return _line(encoder, record, runner.max_length)

    for lines in grouped(read_lines(paths, convert, skip_bad), batch):
        yield from _scored(runner, lines, summary)


def _line(encoder: PreferenceEncoder, record: Any, max_length: int) -> _LineToScore:
    """Return a line with the ids of its answers. Raises BadRecord."""
    if isinstance(record, dict) and CHOSEN in record:
        answers = tuple(document.ids for document in encoder.pair(record))
    else:
        answers = (encoder.completion(record).ids,)
    longest = max(map(len, answers))
    if longest > max_length:
        raise BadRecord(f"prompt and answer have {longest:,} tokens, but the model reads at most {max_length:,}")
    return _LineToScore(record, answers)


def grouped(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    """Yield lines in lists of a number of them; the last one has those that are left."""
    while group := list(islice(lines, size)):
        yield group


def read_lines(paths: Sequence[str], convert: Callable[[Any], Line], skip_bad: int) -> Iterator[Line]:
    """Yield the good lines of files.

    Args:
        paths: Files or directories.
        convert: Function from the JSON value of a line to the line; it raises BadRecord.
        skip_bad: Number of bad lines that may be skipped, each with a warning.

    Raises:
        DataError: If there are more bad lines. It names the file and line of the first one.
    """

    def read(record: Any, _: bool, *, fills_nulls: bool) -> Line:
        if fills_nulls:
            record = without_nulls(record)
        return convert(record)

    budget = SkipBudget(skip_bad, report=lambda bad: _log.warning("skipped %s", bad))
    for file in expand_inputs(paths):
        for block in read_blocks(file, block_bytes=_BLOCK_BYTES):
            lines: Iterable[Line | BadInput] = [block] if isinstance(block, BadInput) else ()
            if not isinstance(block, BadInput):
                lines = convert_lines(block, partial(read, fills_nulls=block.fills_nulls))
            for line in lines:
                if isinstance(line, BadInput):
                    budget.add(line)
                else:
                    yield line


def _scored(runner: ModelRunner, lines: Sequence[_LineToScore], summary: ScoreSummary) -> Iterator[str]:
    """Score lines in one forward pass, and yield them with their scores."""
    answers = [ids for line in lines for ids in line.answers]
    lengths = torch.tensor(list(map(len, answers)))
    tokens = torch.zeros(len(answers), int(lengths.max()), dtype=torch.long)
    for row, ids in zip(tokens, answers, strict=True):
        row[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
    scores = runner.text_scores(tokens.to(runner.device), lengths.to(runner.device)).tolist()
    summary.scores += scores
    remaining = iter(scores)
    for line in lines:
        own = [next(remaining) for _ in line.answers]
        if len(own) == 1:
            found = {"score": own[0]}
        else:
            found = {"chosen_score": own[0], "rejected_score": own[1]}
            summary.margins.append(own[0] - own[1])
        yield json.dumps({**line.record, **found}, ensure_ascii=False)
