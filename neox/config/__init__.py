"""Configuration: YAML files and overrides to a `NeoXConfig`, which is what the user asked for. Without torch."""

from neox.config.decision import NOTHING, Decided, Decision, apply_decisions
from neox.config.loader import LoadedConfig, load_config
from neox.config.neox_config import NeoXConfig, for_inference

__all__ = [
    "NOTHING",
    "Decided",
    "Decision",
    "LoadedConfig",
    "NeoXConfig",
    "apply_decisions",
    "for_inference",
    "load_config",
]
