"""Names and means of an evaluation's scores in metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

from neox.data.run_data import EvaluationSet
from neox.evaluation.results import bits_per_byte, perplexity_of

Scores = Mapping[str, float | None]
"""Scores by name; None where nothing was counted."""
BITS_PER_BYTE = "_bits_per_byte"
"""End of the names of bits per byte."""
CHAR_PPL = "_char_ppl"
"""End of the names of perplexities per character."""
JOINED = (BITS_PER_BYTE, CHAR_PPL)
"""Ends of the names of scalars that are those of joined texts, where there are several sets."""


def set_of_scalar(scalar: str, names: Collection[str]) -> str | None:
    """Return the name of the set that a scalar of an evaluation is of, `KIND/NAME/SCORE`; None if it is of all sets.

    Args:
        scalar: Name of the scalar.
        names: Names of the sets.
    """
    name, slash, _ = scalar.partition("/")[2].partition("/")
    return name if slash and name in names else None


def bytes_unknown(metric: str, data: Collection[str]) -> str:
    """Return why a run cannot be judged by bits per byte, and what to do.

    Args:
        metric: Value of `save_best`.
        data: What the bytes of text are not known of.
    """
    return (
        f"save_best: {metric} is not reported, because the bytes of text of {', '.join(data)} are not known: they are "
        "those of plain texts that our preprocess_data.py has encoded (PREFIX.json); name another metric, such as "
        f"{metric.removesuffix(BITS_PER_BYTE)}, or preprocess the data again"
    )


def evaluation_scalars(
    kind: str,
    sets: Sequence[EvaluationSet],
    scores: Sequence[Scores],
    per_token: Collection[str],
    labels: Sequence[float],
    densities: Sequence[float] = (),
) -> dict[str, float | None]:
    """Return an evaluation's scores and perplexities under their names in metrics.

    The weighted means over all sets that have the score come first, as `KIND/SCORE`. Scores of a set that has a name
    follow, as `KIND/NAME/SCORE`. Bits per byte and perplexities per character of all sets are those of their joined
    text: of the nats of all sets over the bytes or characters of all sets, as in lm-evaluation-harness. Each set counts
    as often as its weight says. The nats of a set are its mean loss times its labels.

    Args:
        kind: What was evaluated: `validation`, `test`, and with `_ema` the average of the weights.
        sets: The sets.
        scores: Scores of each set by name, the trained loss first; None where nothing was counted.
        per_token: Names of the scores that are losses per token.
        labels: Labels of each set that its scores are means over; pairs without losses per token. They weight joined
            texts.
        densities: Tokens per character of each set, for perplexities per character; empty to omit these.
    """
    means: dict[str, float | None] = {}
    for name in scores[0]:
        means[name] = _weighted_mean(sets, list(map(itemgetter(name), scores)))
    scalars = _with_perplexities(kind, means, per_token)
    for item, found in zip(sets, scores, strict=True):
        if item.name is not None:
            scalars |= _with_perplexities(f"{kind}/{item.name}", found, per_token)
    scalars |= _bits_per_byte(kind, sets, scores, per_token, labels)
    scalars |= _amounts(kind, sets, "tokens" if per_token else "pairs", labels)
    if not densities:
        return scalars
    characters = []  # of a token; 0 where no token enters the loss
    for density in densities:
        characters.append(1.0 / density if density else 0.0)
    for name in per_token:
        losses = list(map(itemgetter(name), scores))
        joined = _over_joined_text(sets, losses, characters, labels)
        scalars[f"{kind}/{name}{CHAR_PPL}"] = None if joined is None else perplexity_of(joined)
        for item, loss, density in zip(sets, losses, densities, strict=True):
            if item.name is not None:
                value = None if loss is None else perplexity_of(loss * density)
                scalars[f"{kind}/{item.name}/{name}{CHAR_PPL}"] = value
    return scalars


def _weighted_mean(sets: Sequence[EvaluationSet], values: Sequence[float | None]) -> float | None:
    """Return the weighted mean of a score over the sets that have it; None if none has."""
    total = 0.0
    weights = 0.0
    for item, value in zip(sets, values, strict=True):
        if value is not None:
            total += item.weight * value
            weights += item.weight
    return total / weights if weights else None


def _over_joined_text(
    sets: Sequence[EvaluationSet], losses: Sequence[float | None], sizes: Sequence[float], labels: Sequence[float]
) -> float | None:
    """Return the nats of all sets over the size of all sets: a mean whose weights are sizes of text; None without any.

    Args:
        sets: The sets.
        losses: Nats of a label of each set.
        sizes: Bytes or characters of a token of each set.
        labels: Labels of each set. Padding and tokens without loss are none of them.
    """
    nats = 0.0
    size = 0.0
    for item, loss, own, counted in zip(sets, losses, sizes, labels, strict=True):
        if loss is None:
            continue
        nats += item.weight * counted * loss
        size += item.weight * counted * own
    return nats / size if size else None


def _bits_per_byte(
    kind: str,
    sets: Sequence[EvaluationSet],
    scores: Sequence[Scores],
    per_token: Collection[str],
    labels: Sequence[float],
) -> dict[str, float | None]:
    """Return the bits per byte of text of losses per token, as `KIND/SCORE_bits_per_byte`.

    Runs with other tokenizers can be compared by them. Sets with names have their own, if their bytes are known; that
    of all needs the bytes of all.
    """
    scalars: dict[str, float | None] = {}
    sizes = []
    for item in sets:
        if item.bytes_per_token is not None:
            sizes.append(item.bytes_per_token)
    for name in per_token:
        losses = list(map(itemgetter(name), scores))
        if len(sizes) == len(sets):
            joined = _over_joined_text(sets, losses, sizes, labels)
            scalars[f"{kind}/{name}{BITS_PER_BYTE}"] = None if joined is None else bits_per_byte(joined, 1.0)
        for item, loss in zip(sets, losses, strict=True):
            if item.name is not None and item.bytes_per_token is not None:
                value = None if loss is None else bits_per_byte(loss, item.bytes_per_token)
                scalars[f"{kind}/{item.name}/{name}{BITS_PER_BYTE}"] = value
    return scalars


def _amounts(kind: str, sets: Sequence[EvaluationSet], unit: str, counts: Sequence[float]) -> dict[str, float]:
    """Return what the scores are means over, as `KIND/UNIT`, and `KIND/NAME/UNIT` of each set with a name."""
    scalars = {f"{kind}/{unit}": float(sum(counts))}
    for item, count in zip(sets, counts, strict=True):
        if item.name is not None:
            scalars[f"{kind}/{item.name}/{unit}"] = float(count)
    return scalars


def _with_perplexities(group: str, scores: Scores, per_token: Collection[str]) -> dict[str, float | None]:
    """Return scores, and the perplexities of losses per token, as `GROUP/SCORE`."""
    scalars = {f"{group}/{name}": value for name, value in scores.items()}
    for name in per_token:
        loss = scores[name]
        scalars[f"{group}/{name}_ppl"] = None if loss is None else perplexity_of(loss)
    return scalars
