"""Names and means of an evaluation's scores in metrics."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from neox.data.run_data import EvaluationSet
from neox.evaluation.results import bits_per_byte, perplexity_of


def evaluation_scalars(
    kind: str,
    sets: Sequence[EvaluationSet],
    scores: Sequence[Mapping[str, float]],
    per_token: Collection[str],
    densities: Sequence[float] = (),
) -> dict[str, float]:
    """Return an evaluation's scores and perplexities under their names in metrics.

    The weighted means over all sets come first, as `KIND/SCORE`. Scores of a set that has a name follow, as
    `KIND/NAME/SCORE`.

    Args:
        kind: What was evaluated: `validation`, `test`, and with `_ema` the average of the weights.
        sets: The sets.
        scores: Mean scores of each set by name, the trained loss first.
        per_token: Names of the scores that are losses per token.
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
    scalars |= _bits_per_byte(kind, sets, scores, per_token)
    scalars |= _tokens(kind, sets)
    if not densities:
        return scalars
    per_character = dict.fromkeys(per_token, 0.0)  # mean of the sets, as of bits per byte
    for item, own, found in zip(sets, densities, scores, strict=True):
        for name in per_token:
            per_character[name] += item.weight / total * found[name] * own
        if item.name is not None:
            scalars |= _by_character(f"{kind}/{item.name}", found, per_token, own)
    return scalars | _by_character(kind, per_character, per_token, 1.0)


def _bits_per_byte(
    kind: str, sets: Sequence[EvaluationSet], scores: Sequence[Mapping[str, float]], per_token: Collection[str]
) -> dict[str, float]:
    """Return the bits per byte of text of losses per token, as `KIND/SCORE_bits_per_byte`.

    Runs with other tokenizers can be compared by them. Sets with names have their own. None are returned if the bytes
    of a set are not known.
    """
    total = sum(item.weight for item in sets)
    scalars = {}
    for name in per_token:
        mean = 0.0
        for item, found in zip(sets, scores, strict=True):
            if item.bytes_per_token is None:
                return {}
            own = bits_per_byte(found[name], item.bytes_per_token)
            mean += item.weight / total * own
            if item.name is not None:
                scalars[f"{kind}/{item.name}/{name}_bits_per_byte"] = own
        scalars[f"{kind}/{name}_bits_per_byte"] = mean
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


def _by_character(
    group: str, scores: Mapping[str, float], per_token: Collection[str], density: float
) -> dict[str, float]:
    """Return perplexities per character as `GROUP/SCORE_char_ppl`, with gpt-neox's formula."""
    scalars = {}
    for name in per_token:
        scalars[f"{group}/{name}_char_ppl"] = perplexity_of(scores[name] * density)
    return scalars


def _with_perplexities(group: str, scores: Mapping[str, float], per_token: Collection[str]) -> dict[str, float]:
    """Return scores, and the perplexities of losses per token, as `GROUP/SCORE`."""
    scalars = {f"{group}/{name}": value for name, value in scores.items()}
    for name in per_token:
        scalars[f"{group}/{name}_ppl"] = perplexity_of(scores[name])
    return scalars
