"""Identity of a checkpoint's model: the settings that are stored, and their comparison with those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neox.architecture import NetworkFields
from neox.errors import CheckpointError
from neox.plan import RunPlan, architecture_settings, setting_differences

ARGS = "args"
"""Key of the settings under gpt-neox's names. gpt-neox compares them with its own and stops at a name that it lacks."""
MODEL = "model_identity"
"""Key of our further settings. Every training of this program writes it, and none of gpt-neox."""


def identity_state(plan: RunPlan) -> dict[str, dict[str, Any]]:
    """Return the part of the client state that identifies the model: gpt-neox's `args`, and our further settings."""
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
    further = {key: value for key, value in architecture_settings(plan.config).items() if key not in args}
    further |= {
        "lora": _adapters_of(plan),
        "vocab_size": plan.vocab_size,
        "pipe_parallel_size": plan.grid.pp_size,
        "data_parallel_size": plan.grid.dp_size,
        "zero_stage": plan.config.deepspeed.zero_optimization.stage,
        "precision": plan.precision,
    }
    return {ARGS: args, MODEL: further}


def _adapters_of(plan: RunPlan) -> dict[str, Any] | None:
    """Return the adapters that a run trains, as a checkpoint stores them; None without adapters."""
    if plan.layers.lora is None:
        return None
    return asdict(plan.layers.lora)


def check_same_model(
    path: Path, args: Mapping[str, Any], plan: RunPlan, *, finetune: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Compare a checkpoint's network with the plan's, as far as the checkpoint stores it.

    Degrees, precision and vocabulary padding may differ.

    Args:
        path: The checkpoint, for messages.
        args: The model's settings in the checkpoint (`CheckpointReader.args`).
        plan: The run that loads it.
        finetune: Whether positions, attention and head may differ.

    Returns:
        The settings that may differ and do: YAML key -> (the checkpoint's value, the run's).

    Raises:
        CheckpointError: With a table of the settings that differ and must not.
    """
    refused = setting_differences(args, plan.config, NetworkFields.FIXED if finetune else NetworkFields.ALL)
    if refused:
        raise CheckpointError(
            f"{path} is of another model:\n{_difference_table(refused)}\n"
            "give the checkpoint's values, or another checkpoint"
        )
    return setting_differences(args, plan.config, NetworkFields.ADJUSTABLE)


def _difference_table(differences: Mapping[str, tuple[Any, Any]]) -> str:
    """Return a table of settings with the checkpoint's values and the run's."""
    rows = [("key", "checkpoint", "this run")]
    for key, (saved, wanted) in differences.items():
        rows.append((key, str(saved), str(wanted)))
    key_width = max(len(row[0]) for row in rows)
    saved_width = max(len(row[1]) for row in rows)
    lines = []
    for key, saved, wanted in rows:
        lines.append(f"  {key.ljust(key_width)}  {saved.ljust(saved_width)}  {wanted}")
    return "\n".join(lines)


def check_trained_model(
    path: Path, args: Mapping[str, Any], plan: RunPlan, *, finetune: bool, knows_vocabulary: bool = True
) -> dict[str, tuple[Any, Any]]:
    """Compare what a checkpoint stores of its model with that of a training: network, tokens with rows, adapters.

    Args:
        path: The checkpoint, for messages.
        args: The model's settings in the checkpoint (`CheckpointReader.args`).
        plan: The training that loads it.
        finetune: Whether positions, attention and head may differ.
        knows_vocabulary: Whether the vocabulary of the plan is that of a tokenizer, and not an assumed one.

    Returns:
        As `check_same_model`.

    Raises:
        CheckpointError: If it is another model.
    """
    differing = check_same_model(path, args, plan, finetune=finetune)
    if knows_vocabulary:
        check_vocabulary(path, args, plan.vocab_size)
    check_same_adapters(path, args, plan, finetune=finetune)
    return differing


def check_same_adapters(path: Path, args: Mapping[str, Any], plan: RunPlan, *, finetune: bool) -> None:
    """Compare a checkpoint's adapters with those that a run trains.

    Args:
        path: The checkpoint, for messages.
        args: The model's settings in the checkpoint.
        plan: The run that trains.
        finetune: Whether the run may add adapters to a model without them, or train all weights of a model with them.

    Raises:
        CheckpointError: If the checkpoint has other adapters.
    """
    saved = args.get("lora")
    if saved is not None:
        saved = {**saved, "targets": tuple(saved["targets"])}
    wanted = _adapters_of(plan)
    if saved == wanted:
        return
    if finetune and (saved is None or wanted is None):
        return
    has = f"the adapters {saved}" if saved else "no adapters"
    trains = f"the adapters {wanted}" if wanted else "all weights"
    way_out = "export it (tools/convert_to_hf.py) and import it" if finetune else "set `finetune: true`"
    raise CheckpointError(f"{path} has {has}, and this run trains {trains}; give the same `lora`, or {way_out}")


def check_vocabulary(path: Path, args: Mapping[str, Any], vocab_size: int) -> None:
    """Check that a checkpoint has trained rows for all ids of a tokenizer.

    Args:
        path: The checkpoint.
        args: The model's settings in the checkpoint; gpt-neox's have only the padded size.
        vocab_size: Number of ids that text may have.

    Raises:
        CheckpointError: If the tokenizer has grown.
    """
    sizes = [args[key] for key in ("vocab_size", "padded_vocab_size") if args.get(key) is not None]
    if not sizes or vocab_size <= min(sizes):
        return
    known = min(sizes)
    raise CheckpointError(
        f"{path} was trained with a tokenizer of {known} ids, and this one has {vocab_size}: the others have no "
        f"trained rows. `python tools/resize_vocabulary.py --input_dir {path} --output_dir NEW --config_file "
        "YOUR.yml` makes a checkpoint that has; then set `load: NEW`. Or set vocab_file and added_tokens (and "
        "hf_architecture and padded_vocab_size, if config.yml of an import has them) to the checkpoint's"
    )


def padding_note(args: Mapping[str, Any], plan: RunPlan) -> str | None:
    """Return a note if the vocabulary is padded to another size than the checkpoint's, else None."""
    saved = args.get("padded_vocab_size")
    here = plan.padded_vocab_size
    if saved is None or saved == here:
        return None
    note = f"the vocabulary is padded to {here} rows instead of the checkpoint's {saved}, which changes the loss"
    if saved % plan.grid.tp_size == 0 and saved >= plan.vocab_size:
        note += f"; `padded_vocab_size: {saved}` keeps them and the loss as they were"
    return note
