"""Plans of the shipped configurations."""

from __future__ import annotations

from pathlib import Path

from neox.plan import RunPlan, config_from_files, resolve

CONFIGS = Path(__file__).parents[3] / "configs"


def shipped(name: str, world: int, *overrides: str) -> RunPlan:
    """Return the plan of a configuration under configs/ with the tokenizer of GPT-NeoX-20B."""
    return resolve(config_from_files([name], conf_dir=CONFIGS, overrides=overrides), world, 50277)
