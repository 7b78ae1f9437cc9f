"""Names, epsilons and places of norms by the keys of the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from neox.architecture import NORMS
from neox.architecture.choices import TRANSFORMER_ENGINE_NORMS

EPSILONS: Final = tuple(dict.fromkeys(norm.epsilon_key for norm in NORMS.values() if norm.epsilon_key is not None))
"""Keys of epsilons. The first one is older than the others, so every checkpoint stores it."""


RESIDUAL_OF_PLACEMENT: Final[Mapping[str, str]] = MappingProxyType(
    {"input": "sequential", "output": "sublayer_output_norm", "both": "sandwich", "post": "post_norm"}
)
"""Value of `norm_placement` -> the residual, if it is not parallel."""


def plain_norm(name: str) -> str:
    """Return the norm that a norm of Transformer Engine computes; other norms are themselves."""
    return TRANSFORMER_ENGINE_NORMS.get(name, name)


def epsilon_key(norm: str) -> str | None:
    """Return the key of a norm's epsilon; None for a norm without one."""
    return NORMS[plain_norm(norm)].epsilon_key


def read_epsilon(norm: str, *epsilons: float) -> float:
    """Return the epsilon of a norm, of the values of all `EPSILONS`; 0 for a norm without one."""
    key = epsilon_key(norm)
    if key is None:
        return 0.0
    return epsilons[EPSILONS.index(key)]
