"""gpt-neox's flat keys: type, default, status here, and alternative spellings.

The table is `neox_keys.tsv`: every key of gpt-neox v2.0 and later with gpt-neox's own type and default (as JSON), and
the section of `neox.config.sections` it belongs to. Its column `status` says what happens to the key here:

- `works`: a field of that section.
- `alias`: another spelling of a setting (see `ALIASES`).
- `refused`: an error with the reason, unless the value means off.
- `dormant`: read by gpt-neox only together with a refused feature. Loads, with a note unless it is the default.
- `no effect`: gpt-neox's way of doing something that is done differently here. Loads, with a note likewise.

A key that is a field of a section and not in the table is this project's own.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class NeoXKey:
    """One row of the table: a flat key of gpt-neox, and what happens to it here."""

    key: str
    section: str
    type: str
    default: Any
    since: str
    status: str
    reason: str

    def is_off(self, value: Any) -> bool:
        """Whether a value asks for nothing: gpt-neox's default, None, or a block that is empty or not enabled."""
        if value is None or value == self.default:
            return True
        return self.type == "dict" and isinstance(value, Mapping) and not value.get("enabled", bool(value))


@dataclass(frozen=True)
class Alias:
    """The setting that an alternative spelling stands for.

    gpt-neox derives these keys from their targets and silently overwrites what the user wrote; here they set the
    target, and a contradiction is refused.

    Attributes:
        target: Flat key, or dotted path into a block.
        values: For a key that implies a value rather than carries it: given value -> the target's values that agree
            with it, the first of which is set where the target is absent. None: the value itself.
    """

    target: str
    values: Mapping[Any, tuple[Any, ...]] | None = None

    def agreeing(self, value: Any) -> tuple[Any, ...]:
        """Return the target's values that agree with a given value; none where it implies nothing."""
        if self.values is None:
            return (value,)
        return self.values.get(value, ()) if isinstance(value, bool) else ()


def _read_table() -> dict[str, NeoXKey]:
    with Path(__file__).with_name("neox_keys.tsv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {row["key"]: NeoXKey(**{**row, "default": json.loads(row["default"])}) for row in rows}


NEOX_KEYS: Mapping[str, NeoXKey] = MappingProxyType(_read_table())

UNSUPPORTED: Mapping[str, NeoXKey] = MappingProxyType(
    {name: key for name, key in NEOX_KEYS.items() if key.status not in ("works", "alias")}
)

ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "batch_size": Alias("train_micro_batch_size_per_gpu"),
        "gas": Alias("gradient_accumulation_steps"),
        "clip_grad": Alias("gradient_clipping"),
        "optimizer_type": Alias("optimizer.type"),
        "lr": Alias("optimizer.params.lr"),
        "zero_stage": Alias("zero_optimization.stage"),
        "zero_reduce_scatter": Alias("zero_optimization.reduce_scatter"),
        "zero_contiguous_gradients": Alias("zero_optimization.contiguous_gradients"),
        "zero_reduce_bucket_size": Alias("zero_optimization.reduce_bucket_size"),
        "zero_allgather_bucket_size": Alias("zero_optimization.allgather_bucket_size"),
        "loss_scale": Alias("fp16.loss_scale"),
        "loss_scale_window": Alias("fp16.loss_scale_window"),
        "min_scale": Alias("fp16.min_loss_scale"),
        "hysteresis": Alias("fp16.hysteresis"),
        "dynamic_loss_scale": Alias("fp16.loss_scale", {True: (0, 0.0)}),
        "deepspeed_slurm": Alias("launcher", {True: ("slurm",)}),
        "deepspeed_mpi": Alias("launcher", {True: ("openmpi", "mvapich")}),
        "is_pipe_parallel": Alias("pipe_parallel_size", {}),  # compared by `validation`
        "save_interval": Alias("checkpoint_factor"),
    }
)


def alias_target(key: str) -> str:
    """Return the dotted path that a key sets: another one than its name if it is an alias."""
    return ALIASES[key].target if key in ALIASES else key
