"""The `split` key: parts of a data set for training, validation and test."""

from __future__ import annotations

from neox.errors import ConfigError


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the three fractions of `969,30,1`, `90/5/5` or `1`; missing parts are 0. Raises ConfigError."""
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"`split: {split}` should be numbers such as 969,30,1") from None
    if not 1 <= len(parts) <= 3 or any(part < 0 for part in parts) or sum(parts) <= 0:
        raise ConfigError(f"`split: {split}` should be one to three numbers that are not negative, such as 969,30,1")
    total = sum(parts)
    train, valid, test = ([part / total for part in parts] + [0.0, 0.0])[:3]
    return train, valid, test


def split_problem(split: str) -> str | None:
    """Return what is wrong with a split, or None."""
    try:
        parse_split(split)
    except ConfigError:
        return "should be one to three numbers that are not negative, such as 969,30,1"
    return None
