"""Export of a checkpoint's LoRA adapters in the files of the package `peft`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from neox.architecture import ADAPTER, Lora, add_adapters
from neox.checkpoint import CheckpointReader, check_same_model, checkpoint_at
from neox.config import NeoXConfig
from neox.convert.hf_directory import new_directory, refuse_used_directory, write_json
from neox.convert.layouts import to_hf_layout
from neox.convert.peft_names import CONFIG, WEIGHTS, adaptable_weights, layout_of_b, modules_of, target_of, tensor_key
from neox.convert.to_hf import choose_family
from neox.convert.verification import single_rank_plan
from neox.errors import ConversionError, TokenizerError, refusals
from neox.families import TensorMapping
from neox.tokenizer import other_tokenizer, tokenizer_of


def write_peft_adapter(
    input_dir: str | Path,
    config: NeoXConfig,
    output_dir: str | Path,
    *,
    base: str,
    overwrite: bool = False,
    hf_architecture: str | None = None,
) -> Path:
    """Write a checkpoint's adapters without its weights, as `peft` loads them onto the exported base model.

    Args:
        input_dir: `global_stepN` directory of a run with `lora`, or one that holds some.
        config: The run's configuration.
        output_dir: Directory to create.
        base: Name or path of the base model, which peft finds in the adapter.
        overwrite: Whether `output_dir` is replaced.
        hf_architecture: Key of `FAMILIES`, that of the base model; None takes the first that can express the model.

    Returns:
        The directory.

    Raises:
        ConfigError: If no family can express the model.
        ConversionError: If the checkpoint has no adapters, or was trained with another tokenizer.
        CheckpointError: If the checkpoint cannot be read or belongs to another model.
    """
    from safetensors.torch import save_file

    path = checkpoint_at(Path(input_dir))
    output = Path(output_dir)
    refuse_used_directory(output, overwrite=overwrite)
    stored = CheckpointReader(path)
    _refuse_other_tokenizer(config, path)
    settings = stored.args.get("lora")
    if settings is None:
        raise ConversionError(f"{path} holds no adapters: it was not trained with `lora`")
    lora = Lora(settings["rank"], settings["alpha"], tuple(settings["targets"]))
    family = choose_family(config, hf_architecture)
    plan = single_rank_plan(config, stored.vocabulary_rows)
    check_same_model(path, stored.args, plan)
    if plan.architecture.score_head:
        raise ConversionError(
            f"{path} is a reward model, whose whole head was trained in addition to the adapters: export it without "
            "--adapter, which merges the adapters into the weights"
        )
    reader = CheckpointReader(path, add_adapters(plan.layers, lora))
    tensors: dict[str, Tensor] = {}
    adapted: list[str] = []
    transposed = False
    for mapping in adaptable_weights(plan.layers, family):
        if target_of(mapping) not in lora.targets:
            continue
        adapted += modules_of(mapping)
        transposed = mapping.source.transpose
        adapter = mapping.name.removesuffix(".weight") + ADAPTER
        a = reader.full(mapping.layer, f"{adapter}lora_A")
        b = reader.full(mapping.layer, f"{adapter}lora_B")
        rows = to_hf_layout(b, layout_of_b(mapping.source), plan.architecture)
        for module, part in zip(modules_of(mapping), rows, strict=True):
            tensors[tensor_key(module, "A")] = a.clone()
            tensors[tensor_key(module, "B")] = part.contiguous()
    peft_settings = {
        "peft_type": "LORA",
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "task_type": None if family.is_encoder else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": config.training.lora.dropout if config.training.lora else 0.0,
        "target_modules": _target_modules(adapted, family.mappings(plan.layers)),
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
    with new_directory(output, overwrite=overwrite) as partial:
        write_json(partial / CONFIG, peft_settings)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    return output


def _refuse_other_tokenizer(config: NeoXConfig, checkpoint: Path) -> None:
    """Raise ConversionError if the configuration's tokenizer can be built and is not that of the training."""
    try:
        tokenizer = tokenizer_of(config)
    except TokenizerError:
        return
    difference = other_tokenizer(config, tokenizer, checkpoint)
    if difference is not None:
        with refusals():
            raise ConversionError(difference)


def _target_modules(adapted: Sequence[str], mappings: Iterable[TensorMapping]) -> list[str]:
    """Return names for `target_modules`, which peft compares with the ends of all modules' names.

    Args:
        adapted: Modules that have adapters.
        mappings: All parameters of the network.

    Returns:
        The shortest ends that no other module has; a whole name if another module has each of its ends.
    """
    others: set[str] = set()
    for mapping in mappings:
        others.update(modules_of(mapping))
    others.difference_update(adapted)
    found = set()
    for module in adapted:
        words = module.split(".")
        end = words.pop()
        while words and any(f".{other}".endswith(f".{end}") for other in others):
            end = f"{words.pop()}.{end}"
        found.add(end)
    return sorted(found)
