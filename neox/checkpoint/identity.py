"""Which model a checkpoint is of: what is stored about it, and a table of differences from the one that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neox.config import RunPlan, network_settings
from neox.errors import CheckpointError

# gpt-neox compares exactly its own names with its arguments and stops at one it does not know: ours stand apart.
ARGS, MODEL = "args", "model_identity"
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")  # among gpt-neox's names


class Difference(NamedTuple):
    """One field that differs."""

    field: str
    saved: Any
    wanted: Any


def identity_state(plan: RunPlan) -> dict[str, dict[str, Any]]:
    """The client state that says which model this is: gpt-neox's `args`, and what else decides the function."""
    model = plan.config.model
    return {
        ARGS: {
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "max_position_embeddings": model.max_position_embeddings or model.seq_length,
            "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
            "padded_vocab_size": plan.padded_vocab_size,
            "tokenizer_type": plan.config.tokenizer.tokenizer_type,
            "model_parallel_size": plan.grid.tp_size,
        },
        MODEL: {
            **{key: value for key, value in network_settings(plan.config).items() if key not in _SIZES},
            "vocab_size": plan.vocab_size,
            "pipe_parallel_size": plan.grid.pp_size,
            "data_parallel_size": plan.grid.dp_size,
            "zero_stage": plan.config.deepspeed.zero_optimization.stage,
            "precision": plan.precision,
        },
    }


def model_differences(args: Mapping[str, Any], plan: RunPlan) -> list[Difference]:
    """Fields in which a checkpoint's model (`CheckpointReader.args`) is another one than the plan's.

    Fields that the checkpoint does not store are not compared. Degrees, precision and vocabulary padding may differ.
    """
    return [
        Difference(field, args[field], value)
        for field, value in network_settings(plan.config).items()
        if field in args and args[field] != value
    ]


def check_same_model(path: Path, args: Mapping[str, Any], plan: RunPlan) -> None:
    """Raise CheckpointError with a table of the fields that differ, if any do."""
    differences = model_differences(args, plan)
    if not differences:
        return
    rows = [("field", "checkpoint", "this run"), *((d.field, str(d.saved), str(d.wanted)) for d in differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = "\n".join(
        ("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip() for row in rows
    )
    raise CheckpointError(f"{path} is of another model:\n{table}\ngive the checkpoint's values, or another checkpoint")


def padding_note(args: Mapping[str, Any], plan: RunPlan) -> str | None:
    """What to tell a user whose vocabulary is padded otherwise than the checkpoint's, None where it is not."""
    saved, here = args.get("padded_vocab_size"), plan.padded_vocab_size
    if saved is None or saved == here:
        return None
    keep = saved % plan.grid.tp_size == 0 and saved >= plan.vocab_size
    advice = f"; `padded_vocab_size: {saved}` keeps them and the loss as they were" if keep else ""
    return f"the vocabulary is padded to {here} rows instead of the checkpoint's {saved}, which moves the loss{advice}"
