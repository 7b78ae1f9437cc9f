"""Identity of a checkpoint's model: what is stored about it, and how it is compared with the model that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neox.errors import CheckpointError
from neox.plan import RunPlan, architecture_settings, setting_differences

# gpt-neox compares exactly its own names with its arguments and stops at one it does not know: ours stand apart.
ARGS, MODEL = "args", "model_identity"


def identity_state(plan: RunPlan) -> dict[str, dict[str, Any]]:
    """Return the client state that identifies the model: gpt-neox's `args`, and what else decides its function."""
    model = plan.config.model
    args = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "padded_vocab_size": plan.padded_vocab_size,
        "tokenizer_type": plan.config.tokenizer.tokenizer_type,
        "model_parallel_size": plan.grid.tp_size,
    }
    return {
        ARGS: args,
        MODEL: {
            **{key: value for key, value in architecture_settings(plan.config).items() if key not in args},
            "lora": None if plan.layers.lora is None else asdict(plan.layers.lora),
            "vocab_size": plan.vocab_size,
            "pipe_parallel_size": plan.grid.pp_size,
            "data_parallel_size": plan.grid.dp_size,
            "zero_stage": plan.config.deepspeed.zero_optimization.stage,
            "precision": plan.precision,
        },
    }


def check_same_model(
    path: Path, args: Mapping[str, Any], plan: RunPlan, *, finetune: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Compare a checkpoint's network with the plan's over what the checkpoint stores.

    Degrees, precision and vocabulary padding may differ.

    Args:
        path: The checkpoint, for messages.
        args: What it stores of its model (`CheckpointReader.args`).
        plan: The run that loads it.
        finetune: Whether positions, attention and head may differ.

    Returns:
        The settings that differ and may: YAML key -> (the checkpoint's value, the run's).

    Raises:
        CheckpointError: With a table of the settings that differ and may not.
    """
    refused = setting_differences(args, plan.config, finetune=False if finetune else None)
    if refused:
        rows = [("key", "checkpoint", "this run"), *((key, str(a), str(b)) for key, (a, b) in refused.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = "\n".join(
            ("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip() for row in rows
        )
        raise CheckpointError(
            f"{path} is of another model:\n{table}\ngive the checkpoint's values, or another checkpoint"
        )
    return setting_differences(args, plan.config, finetune=True)


def check_same_adapters(path: Path, args: Mapping[str, Any], plan: RunPlan, *, finetune: bool) -> None:
    """Compare a checkpoint's adapters with those that a run trains.

    Args:
        path: The checkpoint, for messages.
        args: What it stores of its model.
        plan: The run that trains.
        finetune: Whether the run may add adapters to a model without them, or train a model with them whole.

    Raises:
        CheckpointError: If the checkpoint has other adapters.
    """
    saved, lora = args.get("lora"), plan.layers.lora
    wanted = None if lora is None else asdict(lora)
    saved = None if saved is None else {**saved, "targets": tuple(saved["targets"])}
    if saved == wanted or (finetune and None in (saved, wanted)):
        return
    way_out = "export it (tools/convert_to_hf.py) and import it" if finetune else "set `finetune: true`"
    raise CheckpointError(
        f"{path} has {f'the adapters {saved}' if saved else 'no adapters'}, and this run trains "
        f"{f'the adapters {wanted}' if wanted else 'all weights'}; give the same `lora`, or {way_out}"
    )


def padding_note(args: Mapping[str, Any], plan: RunPlan) -> str | None:
    """Return a note if the vocabulary is padded to another size than the checkpoint's, else None."""
    saved, here = args.get("padded_vocab_size"), plan.padded_vocab_size
    if saved is None or saved == here:
        return None
    keep = saved % plan.grid.tp_size == 0 and saved >= plan.vocab_size
    advice = f"; `padded_vocab_size: {saved}` keeps them and the loss as they were" if keep else ""
    return (
        f"the vocabulary is padded to {here} rows instead of the checkpoint's {saved}, which changes the loss{advice}"
    )
