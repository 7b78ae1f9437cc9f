"""LoRA adapters in the files of the package `peft`: written from a checkpoint, read beside a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from neox.architecture import ADAPTER, BLOCK_OFFSET, LayerPlan, Lora, add_adapters
from neox.checkpoint import CheckpointReader, check_same_model, checkpoint_at
from neox.config import NeoXConfig
from neox.convert.hf_directory import new_directory, read_json, write_json
from neox.convert.to_hf import choose_family
from neox.convert.verification import single_rank_plan
from neox.errors import ConversionError
from neox.families import Family

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
}
"""Values of `adapter_config.json` without which the adapter is another function."""
_EMPTY = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "target_parameters")


def write_peft_adapter(
    input_dir: str | Path, config: NeoXConfig, output_dir: str | Path, *, base: str, overwrite: bool = False
) -> Path:
    """Write a checkpoint's adapters alone, as `peft` loads them onto the exported base model.

    Args:
        input_dir: `global_stepN` directory of a run with `lora`, or one that holds some.
        config: The run's configuration.
        output_dir: Directory to create.
        base: Name or path of the base model, which peft finds in the adapter.
        overwrite: Replace `output_dir`.

    Returns:
        The directory.

    Raises:
        ConversionError: The checkpoint has no adapters, or the family holds a layer in another form.
        CheckpointError: If the checkpoint cannot be read or belongs to another model.
    """
    from safetensors.torch import save_file

    path, output = checkpoint_at(Path(input_dir)), Path(output_dir)
    stored = CheckpointReader(path)
    if stored.args.get("lora") is None:
        raise ConversionError(f"{path} holds no adapters: it was not trained with `lora`")
    lora = Lora(**{**stored.args["lora"], "targets": tuple(stored.args["lora"]["targets"])})
    plan = single_rank_plan(config, stored.vocabulary_rows)
    check_same_model(path, stored.args, plan)
    reader = CheckpointReader(path, add_adapters(plan.layers, lora))
    tensors = {
        _key(module, part): reader.full(index, f"{name}{ADAPTER}{part}").contiguous()
        for index, name, module in _adapted(plan.layers, lora, choose_family(config))
        for part in ("lora_A", "lora_B")
    }
    settings = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": config.training.lora.dropout if config.training.lora else 0.0,
        "target_modules": list(lora.targets),
        "inference_mode": True,
    }
    with new_directory(output, overwrite=overwrite) as partial:
        write_json(partial / CONFIG, settings)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    return output


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter's settings, and its tensors by layer index and our names."""

    lora: Lora
    dropout: float
    tensors: Mapping[int, Mapping[str, Tensor]]

    @property
    def keys(self) -> dict[str, Any]:
        """The YAML's `lora`."""
        return {
            "r": self.lora.rank,
            "alpha": self.lora.alpha,
            "dropout": self.dropout,
            "target": list(self.lora.targets),
        }


def read_peft_adapter(directory: Path, layers: LayerPlan, family: Family) -> PeftAdapter:
    """Read an adapter that `peft` has written, of a model with these layers.

    Raises:
        ConversionError: For settings that are not supported, each by name, and for missing or unknown tensors.
    """
    from safetensors.torch import load_file

    settings = read_json(directory / CONFIG)
    problems = [f"{key}: {settings[key]}" for key, value in _PLAIN.items() if settings.get(key, value) != value]
    problems += [f"{key}: {settings[key]}" for key in _EMPTY if settings.get(key)]
    known = {spec.name.split(".")[-2] for spec in layers[BLOCK_OFFSET].parameters if len(spec.shape) == 2}
    targets = settings.get("target_modules") or ()
    if not isinstance(targets, list) or not set(targets) <= known:
        problems.append(f"target_modules: {targets} (supported are {', '.join(sorted(known))})")
    if problems:
        raise ConversionError(f"{directory / CONFIG}: {'; '.join(problems)} is not supported")
    lora = Lora(int(settings["r"]), float(settings["lora_alpha"]), tuple(sorted(targets)))
    file = directory / WEIGHTS
    if not file.is_file():
        raise ConversionError(f"{file} does not exist; save the adapter with safe_serialization=True")
    stored = load_file(file)
    shapes = {(layer.index, p.name): p.shape for layer in add_adapters(layers, lora) for p in layer.parameters}
    tensors: dict[int, dict[str, Tensor]] = {}
    for index, name, module in _adapted(layers, lora, family):
        for part in ("lora_A", "lora_B"):
            tensor = stored.pop(_key(module, part), None)
            if tensor is None:
                raise ConversionError(f"{file}: {_key(module, part)} is missing")
            ours = f"{name}{ADAPTER}{part}"
            if tensor.shape != shapes[index, ours]:
                raise ConversionError(
                    f"{file}: {_key(module, part)} has shape {list(tensor.shape)}, this model's is "
                    f"{list(shapes[index, ours])}"
                )
            tensors.setdefault(index, {})[ours] = tensor
    if stored:
        raise ConversionError(f"{file}: unknown tensors {', '.join(sorted(stored)[:5])}")
    return PeftAdapter(lora, float(settings.get("lora_dropout") or 0.0), tensors)


def _key(module: str, part: str) -> str:
    return f"{_PREFIX}{module}.{part}.weight"


def _adapted(layers: LayerPlan, lora: Lora, family: Family) -> list[tuple[int, str, str]]:
    """Return (layer index, our module, their module) of every adapter. Raises ConversionError for other layouts."""
    adapted = add_adapters(layers, lora)
    names = ((layer.index, spec.name) for layer in adapted for spec in layer.parameters if ADAPTER in spec.name)
    modules = {(index, name.partition(ADAPTER)[0]) for index, name in names}
    found = []
    for mapping in family.mappings(layers):
        name = mapping.name.removesuffix(".weight")
        if (mapping.layer, name) in modules:
            if not mapping.is_copy:
                raise ConversionError(
                    f"{family.title} holds {name} in another form, so that its adapter is none of peft's; "
                    "convert the merged model instead (without --adapter)"
                )
            found.append((mapping.layer, name, mapping.keys[0].removesuffix(".weight")))
    return found
