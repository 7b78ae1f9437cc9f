"""Shares: of documents between train, validation and test, and of several datasets in a blend."""

from __future__ import annotations

import math
from collections.abc import Sequence

from neox.errors import DataError

_SURPLUS = 1.005  # gpt-neox's: a blend is only as even as whole samples allow, so each part has half a percent to spare


def split_shares(split: str) -> list[float]:
    """The shares of train, validation and test in NeoX's `split` ("969, 30, 1"; also with `/`; missing parts are 0).

    They add up to 1. Raises DataError for parts that are not numbers, are negative, or add up to nothing.
    """
    separator = "," if "," in split else "/"
    try:
        parts = ([float(part) for part in split.split(separator)] + [0.0, 0.0])[:3]
    except ValueError:
        parts = []
    if not parts or min(parts) < 0 or not 0 < sum(parts) < math.inf:
        raise DataError(f'"split" is {split!r}; it is up to three shares like "969, 30, 1", at least one above 0')
    total = sum(parts)
    return [part / total for part in parts]


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Divide documents [0, documents) by NeoX's `split`, in its way of rounding. Raises DataError as `split_shares`."""
    edges = [0]
    for share in split_shares(split):
        edges.append(edges[-1] + round(share * documents))
    surplus = edges[-1] - documents  # of rounding; gpt-neox takes it from the first part
    edges[1:] = [max(0, edge - surplus) for edge in edges[1:]]
    return range(edges[0], edges[1]), range(edges[1], edges[2]), range(edges[2], edges[3])


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that add up to 1. Raises DataError for negative ones, or none above 0."""
    total = sum(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise DataError(f"weights of a blend must not be negative and not all be 0: {list(weights)}")
    return [weight / total for weight in weights]


def samples_of_each(weights: Sequence[float], num_samples: int) -> list[int]:
    """How many samples each part of a blend must be able to give for `num_samples` in all (weights add up to 1)."""
    return [math.ceil(num_samples * weight * _SURPLUS) for weight in weights]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """NeoX's `weight_by_num_documents`: p ~ n ** alpha, times 1 - n / sum(n), normalized.

    The first factor lifts small sets (https://arxiv.org/abs/1911.02116); the second is NeoX's own.
    One dataset alone has weight 1 (NeoX's formula divides by zero there).
    """
    if len(documents) == 1:
        return [1.0]
    total = sum(documents)
    if total == 0:
        raise DataError("weight_by_num_documents needs documents, and the datasets have none")
    shares = [n / total for n in documents]
    lifted = [share**alpha for share in shares]
    scale = sum(lifted)
    return normalized([lift / scale * (1 - share) for lift, share in zip(lifted, shares, strict=True)])
