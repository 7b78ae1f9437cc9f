"""Needle test: a pass key in a long text, which the model has to repeat (as in arXiv:2305.16300).

Texts are synthetic: sentences without meaning in random order, with the key at some depth. Everything is a function
of the length, the depth and the number of the trial.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from neox import files
from neox.errors import EvaluationError
from neox.evaluation.results import TaskResult, perplexity_of
from neox.evaluation.scoring import Scorer, Span
from neox.tokenizer import Tokenizer, positions

DEPTHS = (0, 25, 50, 75, 100)
"""Places of the key, in per cent of the text before the question."""
_DIVISORS = (8, 4, 2, 1)
"""The lengths of texts are the window divided by these."""
_TRIALS = 4
_FILLER = (
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
    " The river runs to the sea.",
    " Nobody knows what the old clock says.",
    " A ship left the harbour in the morning.",
)
_CELL = 60  # side of a cell of the picture
_LEFT = 90
_TOP = 50


class Cell(NamedTuple):
    """A length and a depth.

    Attributes:
        length: Number of tokens of a text, without the last one.
        depth: Place of the key, in per cent.
    """

    length: int
    depth: int


def needle(path: str | Path, scorer: Scorer, name: str = "needle") -> TaskResult:
    """Score how often the key is repeated, for texts of up to a window and several depths, and draw it.

    Args:
        path: Picture to write: an SVG file with a square for each length and depth.
        scorer: Model and settings. `limit` is the number of trials for each length and depth, by default 4.
        name: Name of the task in the result.

    Returns:
        `acc`: fraction of trials in which each token of the key was the most probable one. `acc_LENGTH_DEPTH`: the same
        for one length and depth. `ppl`: perplexity of the key's tokens.

    Raises:
        EvaluationError: If no text fits into the window, or the picture cannot be written.
    """
    trials = scorer.limit or _TRIALS
    longest = min(scorer.window, scorer.model.max_length)
    asked: list[Cell] = []  # the cell of each text
    spans: list[Span] = []
    for divisor, depth, trial in product(_DIVISORS, DEPTHS, range(trials)):
        cell = Cell(longest // divisor, depth)
        span = hidden_key(cell, trial, scorer.tokenizer)
        if span is not None:
            asked.append(cell)
            spans.append(span)
    if not spans:
        raise EvaluationError(f"{name}: a window of {longest} tokens is too short for a pass key and a question")
    found: dict[Cell, list[bool]] = {}
    hits = 0
    tokens = 0
    loss = 0.0
    for cell, score in zip(asked, scorer.score(spans, name), strict=True):
        found.setdefault(cell, []).append(score.greedy)
        hits += score.greedy
        tokens += score.count
        loss -= score.log_probability
    metrics = {"acc": hits / len(spans), "ppl": perplexity_of(loss / tokens)}
    rates: dict[Cell, float] = {}
    for cell, answers in found.items():
        rates[cell] = sum(answers) / len(answers)
        metrics[f"acc_{cell.length}_{cell.depth}"] = rates[cell]
    if scorer.grid.rank == 0:
        try:
            files.write_text(Path(path), heat_map(rates))
        except OSError as error:
            raise EvaluationError(f"{path}: cannot be written ({error})") from error
    return TaskResult(name, metrics, {"texts": len(spans)})


def hidden_key(cell: Cell, trial: int, tokenizer: Tokenizer) -> Span | None:
    """Return a text with a key, a question and the key, which is scored; None if it does not fit into the length."""
    draw = random.Random(f"needle {cell.length} {cell.depth} {trial}")
    key = draw.randrange(10_000, 100_000)
    start = tokenizer.before_text
    encode = partial(positions.continuation, tokenizer)
    needle_tokens = encode(f" The pass key is {key}. Remember it. {key} is the pass key.")
    question = encode(" What is the pass key? The pass key is")
    answer = encode(f" {key}")
    room = cell.length + 1 - len(start) - len(needle_tokens) - len(question) - len(answer)
    if room < 1:
        return None
    filler: list[int] = []
    while len(filler) < room:
        filler += encode(draw.choice(_FILLER))
    before = room * cell.depth // 100
    context = [*start, *filler[:before], *needle_tokens, *filler[before:room], *question]
    return Span((*context, *answer), len(context))


def heat_map(rates: dict[Cell, float]) -> str:
    """Return a picture in SVG: lengths from left to right, depths from top to bottom, green where the key was found."""
    lengths = sorted({cell.length for cell in rates})
    width = _LEFT + _CELL * len(lengths) + 10
    height = _TOP + _CELL * len(DEPTHS) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="13" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT + _CELL * len(lengths) / 2}" y="18">tokens of the text</text>',
        f'<text x="{_LEFT / 2 - 5}" y="{_TOP - 10}">depth</text>',
    ]
    for column, length in enumerate(lengths):
        x = _LEFT + _CELL * column
        lines.append(f'<text x="{x + _CELL / 2}" y="{_TOP - 10}">{length:,}</text>')
        for row, depth in enumerate(DEPTHS):
            rate = rates.get(Cell(length, depth))
            if rate is None:
                continue
            y = _TOP + _CELL * row
            hue = round(120 * rate)
            lines.append(f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="hsl({hue},60%,60%)"/>')
            lines.append(f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2 + 5}">{rate:.0%}</text>')
    for row, depth in enumerate(DEPTHS):
        lines.append(f'<text x="{_LEFT / 2 - 5}" y="{_TOP + _CELL * row + _CELL / 2 + 5}">{depth} %</text>')
    return "\n".join([*lines, "</svg>", ""])
