"""Step `decontaminate`: cuts texts of evaluation sets out of documents.

The method is that of Megatron-LM's OpenWebText recipe (its `filter_ngrams.py`), after Brown et al. 2020, appendix C.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from neox.corpus import expand_inputs, read_documents
from neox.errors import ConfigError
from neox.files import sha256_of
from neox.log import get_logger
from tools.web_text.documents import ChunkWork, map_documents
from tools.web_text.step import DocumentFunction, Job, Outcome, Record, Settings, Step
from tools.web_text.words import SENTENCE_END, Words, half_words

_log = get_logger(f"neox.{__name__}")
_LEAST_WORDS = 8


class DecontaminateSettings(Settings):
    """Cut out of documents what evaluation sets contain.

    Words are runs of letters, marks and digits, in lower case. In scripts without blanks (Chinese, Japanese, Thai), two
    characters are a word. Forms of Unicode and invisible characters make no difference. A match is cut with some
    characters on each side, up to the ends of sentences. The pieces that remain become documents with a `piece` number.
    """

    evaluation: tuple[Path, ...] = Field(min_length=1)
    """Files or directories with the texts of evaluation sets, in any format that documents have."""

    ngram: int = Field(13, ge=_LEAST_WORDS, le=13)
    """Number of words in a row that are a match. An evaluation text of 8 or more, but fewer words, must match whole.
    The report counts those of fewer than 8 words, which are ignored, by file (`evaluation_too_short`)."""

    margin: int = Field(200, ge=0)
    """Characters that are cut on each side of a match, and then up to the end of a sentence."""

    least_characters: int = Field(200, ge=1)
    """Shorter pieces are dropped."""

    most_pieces: int = Field(10, ge=1)
    """Documents that fall into more pieces are dropped."""

    RUNTIME: ClassVar[frozenset[str]] = Settings.RUNTIME | {"evaluation"}

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the settings that determine the output's bytes, with the contents of the evaluation files."""
        files = expand_inputs(self.evaluation)
        return {**super().fingerprint(), "evaluation": [[Path(file).name, sha256_of(Path(file))] for file in files]}


class EvaluationGrams:
    """Word n-grams of evaluation files."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._names: dict[str, str] = {}
        self._prefixes: set[int] = set()
        self._lengths: set[int] = set()

    def add(self, name: str, text: str) -> bool:
        """Add an evaluation text. Return whether it has at least 8 words; a shorter one is not added."""
        words = Words.of(text).words
        sizes = list(map(half_words, words))
        wanted = min(2 * self._ngram, sum(sizes))
        if wanted < 2 * _LEAST_WORDS:
            return False
        stop = 0
        size = 0
        for start in range(len(words)):
            while size < wanted and stop < len(words):
                size += sizes[stop]
                stop += 1
            if size < wanted:
                break
            gram = words[start:stop]
            self._lengths.add(len(gram))
            self._names.setdefault(" ".join(gram), name)
            self._prefixes.add(hash(tuple(gram[:_LEAST_WORDS])))
            size -= sizes[start]
        return True

    def __len__(self) -> int:
        return len(self._names)

    def find(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield the matches in a text: first character, the one after the last, and the name of the evaluation set."""
        found = Words.of(text)
        words = found.words
        windows = zip(*(words[skip:] for skip in range(_LEAST_WORDS)), strict=False)
        starts = [start for start, window in enumerate(windows) if hash(window) in self._prefixes]
        if not starts:
            return
        spans = found.spans()
        for start in starts:
            for length in self._lengths:
                name = self._names.get(" ".join(words[start : start + length]))
                if name is not None and start + length <= len(words):
                    yield spans[start][0], spans[start + length - 1][1], name


def cut_intervals(text: str, matches: Iterable[tuple[int, int]], margin: int) -> list[tuple[int, int]]:
    """Return what is cut: each match with its margins, up to the ends of sentences. Overlapping cuts are joined.

    Args:
        text: Text of a document.
        matches: First character, and the one after the last, of each match.
        margin: Characters on each side.
    """
    ends = [0, *(match.end() for match in SENTENCE_END.finditer(text)), len(text)]
    cuts: list[tuple[int, int]] = []
    for first, last in sorted(matches):
        start = ends[bisect_right(ends, max(first - margin, 0)) - 1]
        stop = ends[bisect_left(ends, min(last + margin, len(text)))]
        if cuts and start <= cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(stop, cuts[-1][1]))
        else:
            cuts.append((start, stop))
    return cuts


def read_grams(settings: DecontaminateSettings) -> tuple[EvaluationGrams, Counter[str]]:
    """Return the n-grams of the evaluation files, and the number of texts that are too short in each."""
    grams = EvaluationGrams(settings.ngram)
    too_short: Counter[str] = Counter()
    for file in expand_inputs(settings.evaluation):
        name = Path(file).name
        for document in read_documents(file):
            if not grams.add(name, document.text):
                too_short[name] += 1
    return grams, too_short


def build_decontaminate(settings: DecontaminateSettings) -> DocumentFunction:
    """Return the function that cuts a document into pieces."""
    grams, _ = read_grams(settings)
    if not len(grams):
        raise ConfigError(f"decontaminate: the evaluation files have no text of at least {_LEAST_WORDS} words")

    def cut(record: Record) -> list[Outcome]:
        text: str = record["text"]
        matches = list(grams.find(text))
        if not matches:
            return [Outcome(record)]
        cuts = cut_intervals(text, [match[:2] for match in matches], settings.margin)
        borders = [0]
        for interval in cuts:
            borders += interval
        borders.append(len(text))
        left = [text[start:stop].strip() for start, stop in zip(borders[::2], borders[1::2], strict=True)]
        pieces = [piece for piece in left if len(piece) >= settings.least_characters]
        if len(pieces) > settings.most_pieces:
            return [Outcome(record, dropped=f"over {settings.most_pieces} pieces")]
        if not pieces:
            return [Outcome(record, dropped=f"no piece of {settings.least_characters} characters")]
        changed = tuple(sorted({f"cut: {name}" for _, _, name in matches}))
        outcomes = []
        for number, piece in enumerate(pieces):
            outcomes.append(Outcome({**record, "text": piece, "piece": number}, changed=changed))
            changed = ()  # the changes of a document are counted with its first piece
        return outcomes

    return cut


def decontaminate(job: Job[DecontaminateSettings]) -> None:
    """Write the pieces of a job's documents, and report the evaluation texts that are too short to be found."""
    map_documents(job, ChunkWork(build_decontaminate, job.settings, identity=job.identity))
    if job.shard is not None:
        return
    _, too_short = read_grams(job.settings)
    if too_short:
        job.counts.details["evaluation_too_short"] = dict(too_short)
        named = ", ".join(f"{count:,} in {name}" for name, count in too_short.items())
        _log.warning("texts of fewer than %d words cannot be found and are ignored: %s", _LEAST_WORDS, named)


DECONTAMINATE = Step(
    "decontaminate",
    DecontaminateSettings,
    decontaminate,
    build=build_decontaminate,
    packages=("regex",),
    sharded=True,
)
