"""Features of an engine in tests."""

from __future__ import annotations

from typing import TypeVar

from neox.engine import Engine, Feature

F = TypeVar("F", bound=Feature)


def feature_of(engine: Engine, kind: type[F]) -> F:
    """Return the engine's feature of a kind."""
    (found,) = (feature for feature in engine.features if isinstance(feature, kind))
    return found
