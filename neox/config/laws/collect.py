"""All laws that do not depend on the number of ranks or the tokenizer."""

from __future__ import annotations

from neox.config.keys import UNSUPPORTED
from neox.config.laws.memory_and_precision import memory_and_precision_problems
from neox.config.laws.network import network_problems
from neox.config.laws.run import run_problems
from neox.config.sections import NeoXConfig
from neox.config.wording import place, said


def static_problems(config: NeoXConfig) -> list[str]:
    """Return every violation as a sentence: what, where, why, what to do."""
    return [
        *unsupported_problems(config),
        *network_problems(config),
        *memory_and_precision_problems(config),
        *run_problems(config),
    ]


def unsupported_problems(config: NeoXConfig) -> list[str]:
    """Return a sentence for every given key of gpt-neox that asks for a feature that does not exist here."""
    problems = []
    for name, value in config.to_flat().items():
        key = UNSUPPORTED.get(name)
        if key is not None and key.status == "refused" and not key.is_off(value):
            problems.append(f"{place(config, name)}`{name}: {value}` does not work here: {key.reason}")
    return problems


def unsupported_notes(config: NeoXConfig) -> list[str]:
    """Return a sentence for every given key that changes nothing here: `no effect`, and `dormant` ones."""
    notes = []
    for name, value in config.to_flat().items():
        key = UNSUPPORTED.get(name)
        if key is None or key.status == "refused" or key.is_off(value):
            continue
        reason = f"it is {key.reason}, which is off" if key.status == "dormant" else key.reason
        notes.append(f"{said(config, name, value)} changes nothing: {reason}")
    return notes


def missing_for_training(config: NeoXConfig) -> list[str]:
    """Return a sentence for each key that training needs and that is not given; data and tokenizer are looked for by
    whoever opens them."""
    if config.training.train_iters is None:
        return ["`train_iters` is missing: give the number of training iterations"]
    return []
