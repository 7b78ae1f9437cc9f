"""Perplexity of wikitext, of any corpus of documents, and of token files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.errors import EvaluationError
from neox.evaluation.detokenize import detokenize_wikitext
from neox.evaluation.formulas import bits_per_byte, count_words, token_perplexity, word_perplexity
from neox.evaluation.result import TaskResult
from neox.evaluation.scoring import ScoringModel, Span, SpanScore, score_spans, windows
from neox.evaluation.texts import is_token_file, read_corpus, read_text, token_documents
from neox.generation import over_replicas
from neox.log import progress
from neox.parallel import ParallelGrid
from neox.tokenizer import Tokenizer


@dataclass(frozen=True)
class Scoring:
    """How texts are scored. window: predicted tokens at once; stride: those of them that are new, None for all."""

    model: ScoringModel
    tokenizer: Tokenizer
    grid: ParallelGrid
    window: int
    stride: int | None = None
    batch_size: int = 8

    def score(self, spans: Sequence[Span], name: str) -> list[SpanScore]:
        """Score spans in batches, with progress shown by rank 0."""
        if self.grid.rank != 0:
            return score_spans(self.model, spans, batch_size=self.batch_size)
        with progress(name, len(spans), "texts") as bar:
            return score_spans(self.model, spans, batch_size=self.batch_size, done=bar.update)


def wikitext(path: str | Path, scoring: Scoring, name: str = "wikitext") -> TaskResult:
    """Score a file in wikitext's form as one text, detokenized.

    `ppl` is per token, `word_ppl` per word of the original file. Raises EvaluationError for a file without text.
    """
    original = read_text(path)
    words = count_words(original)
    text = detokenize_wikitext(original)
    tokens = scoring.tokenizer.encode(text)
    if len(tokens) < 2 or words < 2:
        raise EvaluationError(f"{path}: {words} words and {len(tokens)} tokens are too few for a perplexity")
    loss, scored = _loss([tokens], scoring, name)
    assert scored == len(tokens) - 1
    size = len(original.encode())
    metrics = {
        "ppl": token_perplexity(loss, len(tokens)),
        "word_ppl": word_perplexity(loss, len(tokens), words),
        "loss": loss / scored,
        "bits_per_byte": bits_per_byte(loss, size),
    }
    return TaskResult(name, metrics, {"tokens": len(tokens), "scored": scored, "words": words, "bytes": size})


def corpus_perplexity(path: str | Path, scoring: Scoring, name: str = "perplexity") -> TaskResult:
    """Score documents (`.jsonl`, `.jsonl.zst`, `.txt` and the like), or a token file by its prefix (`.bin` and `.idx`).

    Each document is a text of its own that begins after an end-of-document and ends with one, so every token of it is
    predicted, as in training. A token file made with `--append-eod` gives the scores of the documents it came from,
    without the ones that need their text (`word_ppl`, `bits_per_byte`).
    Raises EvaluationError where there is nothing to score, DataError for files that are broken.
    """
    eod, counts = scoring.tokenizer.eod, {}
    if is_token_file(path):
        texts = list(token_documents(path, scoring.tokenizer))
    else:
        documents = list(read_corpus(path))
        texts = [np.array([eod, *ids, eod], dtype=np.int32) for ids in scoring.tokenizer.encode_batch(documents)]
        counts = {"words": sum(map(count_words, documents)), "bytes": sum(len(text.encode()) for text in documents)}
    loss, scored = _loss(texts, scoring, name)
    metrics = {"ppl": token_perplexity(loss, scored + 1), "loss": loss / scored}
    if counts.get("words", 0) > 1:
        metrics["word_ppl"] = word_perplexity(loss, scored + 1, counts["words"])
        metrics["bits_per_byte"] = bits_per_byte(loss, counts["bytes"])
    return TaskResult(name, metrics, {"documents": len(texts), "scored": scored, **counts})


def _loss(texts: Iterable[Sequence[int] | np.ndarray], scoring: Scoring, name: str) -> tuple[float, int]:
    """Return the summed loss of all texts (ids), and how many tokens were scored."""
    stride = scoring.stride or scoring.window
    spans = [span for text in texts for span in windows(text, scoring.window, stride)]

    def share(mine: Sequence[Span]) -> list[tuple[float, int]]:
        scores = scoring.score(mine, name)
        return [(score.log_probability, score.count) for score in scores]

    scores = over_replicas(spans, share, scoring.grid)
    return -sum(score for score, _ in scores), sum(count for _, count in scores)
