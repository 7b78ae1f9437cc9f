"""Shares of the datasets in each stage of the training data, by weights, sizes, and limits on passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError
from neox.plan.batches.batch_schedule import BatchSchedule
from neox.plan.batches.mixtures import Mixture

_ENOUGH = 1e-9  # part of a stage that may be missing due to rounding


class StageShares(NamedTuple):
    """What is read in a stage.

    Attributes:
        mixture: The stage.
        tokens: Number of tokens of all datasets.
        shares: Share of each dataset in them; their sum is 1.
    """

    mixture: Mixture
    tokens: int
    shares: tuple[float, ...]


def shares_by_weight(mixture: Mixture, sizes: Sequence[int]) -> list[float]:
    """Return the share of each dataset in a stage; their sum is 1.

    Args:
        mixture: The stage.
        sizes: Number of tokens of each dataset.
    """
    weights: Sequence[float] = mixture.weights or [1.0] * len(sizes)
    if mixture.temperature is not None and any(sizes):
        largest = max(sizes)
        weights = [(size / largest) ** (1 / mixture.temperature) for size in sizes]
    total = sum(weights)
    return [weight / total for weight in weights]


def shares_of_stages(
    config: NeoXConfig,
    schedule: BatchSchedule,
    sizes: Sequence[int],
    *,
    pass_tokens: Sequence[int] | None = None,
    read: Sequence[int] | None = None,
    from_step: int = 0,
) -> list[StageShares]:
    """Return what is read in each stage.

    Args:
        config: The configuration.
        schedule: Samples and lengths of each step.
        sizes: Number of tokens of each training dataset.
        pass_tokens: Number of tokens of the samples of one pass over each, padding included; None for `sizes`.
        read: Number of tokens that an earlier part of the run has read of each dataset.
        from_step: First step that is counted. Stages that end before it are left out.

    Raises:
        ConfigError: If `train_data_max_passes` leaves fewer tokens than a stage needs.
    """
    steps = config.training.train_iters or 0
    mixtures = schedule.mixtures
    left = _tokens_left(config, pass_tokens or sizes, read or [0] * len(sizes))
    result = []
    for number, mixture in enumerate(mixtures):
        first = max(mixture.step, from_step)
        last = mixtures[number + 1].step if number + 1 < len(mixtures) else steps
        if last <= first and number + 1 < len(mixtures):
            continue
        tokens = max(0, schedule.samples(last) - schedule.samples(first)) * mixture.seq_length
        shares = _limited(config, mixture, shares_by_weight(mixture, sizes), tokens, left)
        left = [amount - share * tokens for amount, share in zip(left, shares, strict=True)]
        result.append(StageShares(mixture, tokens, tuple(shares)))
    return result


def _tokens_left(config: NeoXConfig, pass_tokens: Sequence[int], read: Sequence[int]) -> list[float]:
    """Return how many tokens of each dataset may be read."""
    passes = config.data.max_passes
    if passes is None:
        return [math.inf] * len(pass_tokens)
    return [max(0.0, limit * size - done) for limit, size, done in zip(passes, pass_tokens, read, strict=True)]


def _limited(
    config: NeoXConfig, mixture: Mixture, shares: Sequence[float], tokens: int, left: Sequence[float]
) -> list[float]:
    """Lower the shares of datasets that have too few tokens left, and raise the others in proportion.

    Args:
        config: The configuration.
        mixture: The stage.
        shares: Share of each dataset that its weight asks for.
        tokens: Number of tokens of the stage.
        left: Number of tokens of each dataset that may be read.

    Raises:
        ConfigError: If all datasets together have too few tokens left.
    """
    limits = [min(1.0, amount / tokens) if tokens else 1.0 for amount in left]
    limited = [0.0] * len(shares)
    unlimited = {number for number, share in enumerate(shares) if share > 0}
    rest = 1.0
    while unlimited:
        scale = rest / sum(shares[number] for number in unlimited)
        over = {number for number in unlimited if shares[number] * scale > limits[number]}
        for number in over or unlimited:
            limited[number] = min(shares[number] * scale, limits[number])
            rest -= limited[number]
        unlimited = unlimited - over if over else set()
    if rest > _ENOUGH:
        rule = f"leaves {1 - rest:.1%} of the {tokens:,} tokens of {mixture.name}; allow more, or read less"
        raise ConfigError(config.problem("train_data_max_passes", rule, "data_stages", "train_iters"))
    total = sum(limited)
    return [share / total for share in limited]
