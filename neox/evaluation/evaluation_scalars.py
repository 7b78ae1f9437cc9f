"""Names and means of an evaluation's scores in metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter

from neox.data.run_data import EvaluationSet
from neox.evaluation.results import bits_per_byte, perplexity_of

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
    scores: Sequence[Mapping[str, float]],
    per_token: Collection[str],
    labels: Sequence[float],
    densities: Sequence[float] = (),
) -> dict[str, float]:
    """Return an evaluation's scores and perplexities under their names in metrics.

    The weighted means over all sets come first, as `KIND/SCORE`. Scores of a set that has a name follow, as
    `KIND/NAME/SCORE`. Bits per byte and perplexities per character of all sets are those of their joined text: of the
    nats of all sets over the bytes or characters of all sets, as in lm-evaluation-harness. Each set counts as often as
    its weight says. The nats of a set are its mean loss times its labels.

    Args:
        kind: What was evaluated: `validation`, `test`, and with `_ema` the average of the weights.
        sets: The sets.
        scores: Mean scores of each set by name, the trained loss first.
        per_token: Names of the scores that are losses per token.
        labels: Labels of each set that its scores are means over, in any unit: they weight joined texts.
        densities: Tokens per character of each set, for perplexities per character; empty to omit these.
    """
    total = sum(item.weight for item in sets)
    means = dict.fromkeys(scores[0], 0.0)
    for item, found in zip(sets, scores, strict=True):
        for name, value in found.items():
            means[name] += item.weight / total * value
    scalars = _with_perplexities(kind, means, per_token)
    for item, found in zip(sets, scores, strict=True):
        if item.name is not None:
            scalars |= _with_perplexities(f"{kind}/{item.name}", found, per_token)
    scalars |= _bits_per_byte(kind, sets, scores, per_token, labels)
    scalars |= _tokens(kind, sets)
    if not densities:
        return scalars
    characters = []  # of a token; 0 where no token enters the loss
    for density in densities:
        characters.append(1.0 / density if density else 0.0)
    for name in per_token:
        losses = list(map(itemgetter(name), scores))
        scalars[f"{kind}/{name}{CHAR_PPL}"] = perplexity_of(_over_joined_text(sets, losses, characters, labels))
        for item, loss, density in zip(sets, losses, densities, strict=True):
            if item.name is not None:
                scalars[f"{kind}/{item.name}/{name}{CHAR_PPL}"] = perplexity_of(loss * density)
    return scalars


def _over_joined_text(
    sets: Sequence[EvaluationSet], losses: Sequence[float], sizes: Sequence[float], labels: Sequence[float]
) -> float:
    """Return the nats of all sets over the size of all sets: a mean whose weights are sizes of text.

    Args:
        sets: The sets.
        losses: Nats of a label of each set.
        sizes: Bytes or characters of a token of each set.
        labels: Labels of each set. Padding and tokens without loss are none of them.
    """
    nats = 0.0
    size = 0.0
    for item, loss, own, counted in zip(sets, losses, sizes, labels, strict=True):
        nats += item.weight * counted * loss
        size += item.weight * counted * own
    return nats / size if size else 0.0


def _bits_per_byte(
    kind: str,
    sets: Sequence[EvaluationSet],
    scores: Sequence[Mapping[str, float]],
    per_token: Collection[str],
    labels: Sequence[float],
) -> dict[str, float]:
    """Return the bits per byte of text of losses per token, as `KIND/SCORE_bits_per_byte`.

    Runs with other tokenizers can be compared by them. Sets with names have their own, if their bytes are known; that
    of all needs the bytes of all.
    """
    scalars = {}
    sizes = []
    for item in sets:
        if item.bytes_per_token is not None:
            sizes.append(item.bytes_per_token)
    for name in per_token:
        losses = list(map(itemgetter(name), scores))
        if len(sizes) == len(sets):
            joined = _over_joined_text(sets, losses, sizes, labels)
            scalars[f"{kind}/{name}{BITS_PER_BYTE}"] = bits_per_byte(joined, 1.0)
        for item, loss in zip(sets, losses, strict=True):
            if item.name is not None and item.bytes_per_token is not None:
                scalars[f"{kind}/{item.name}/{name}{BITS_PER_BYTE}"] = bits_per_byte(loss, item.bytes_per_token)
    return scalars


def _tokens(kind: str, sets: Sequence[EvaluationSet]) -> dict[str, float]:
    """Return the tokens that the scores are of, as `KIND/tokens`, and `KIND/NAME/tokens` of each set with a name."""
    total = 0
    scalars = {}
    for item in sets:
        if item.tokens is None:
            return {}
        total += item.tokens
        if item.name is not None:
            scalars[f"{kind}/{item.name}/tokens"] = float(item.tokens)
    return {f"{kind}/tokens": float(total)} | scalars


def _with_perplexities(group: str, scores: Mapping[str, float], per_token: Collection[str]) -> dict[str, float]:
    """Return scores, and the perplexities of losses per token, as `GROUP/SCORE`."""
    scalars = {f"{group}/{name}": value for name, value in scores.items()}
    for name in per_token:
        scalars[f"{group}/{name}_ppl"] = perplexity_of(scores[name])
    return scalars
