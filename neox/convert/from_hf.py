"""Import of a Hugging Face directory (such as Pythia, GPT-NeoX-20B or our own exports) as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from neox.architecture import Architecture, LayerPlan, add_adapters
from neox.checkpoint import (
    commit,
    discard,
    identity_state,
    stage_directory,
    write_client_state,
    write_full_layer,
)
from neox.checkpoint.identity import ARGS, MODEL
from neox.config import NeoXConfig
from neox.convert.hf_directory import import_tokenizer
from neox.convert.hf_weights import HFWeights, from_hf_layout, read_json, to_hf_layout
from neox.convert.peft_adapter import read_peft_adapter
from neox.convert.verification import single_rank_plan
from neox.errors import ConfigError, ConversionError
from neox.families import FAMILIES, Family, ModelSettings, TensorMapping
from neox.log import progress
from neox.ops import DTYPES
from neox.plan import Precision, RunPlan, architecture_of, yaml_keys
from neox.tokenizer import build_tokenizer


@dataclass(frozen=True)
class FromHFResult:
    """Finished import: the committed checkpoint, the YAML file of its model and its number of parameters."""

    checkpoint: Path
    config_file: Path
    parameters: int


def from_hf(
    hf_dir: str | Path,
    output_dir: str | Path,
    *,
    model_parallel_size: int = 1,
    precision: Precision | None = None,
    adapter_dir: str | Path | None = None,
) -> FromHFResult:
    """Write `output_dir/global_step0` in NeoX's layout, with `latest`, `config.yml` and the tokenizer beside it.

    One layer is in memory at a time.

    Args:
        hf_dir: Directory with `config.json` and weights.
        output_dir: Directory of checkpoints.
        model_parallel_size: Tensor ranks of the files; every degree can load them.
        precision: Of the weights; None keeps the source's.
        adapter_dir: Directory of a LoRA adapter that `peft` wrote for this model. The checkpoint then has adapters:
            they are trained on, or added to the weights where it is read without `lora`.

    Raises:
        ConfigError: For a degree that does not divide the network.
        ConversionError: For what cannot be expressed here, and for missing, unknown or broken weights.
        CheckpointError: If the disk refuses.
    """
    source, output = Path(hf_dir), Path(output_dir)
    _check_format(source)
    family, architecture, settings = read_family(read_json(source / "config.json"))
    keys = _config_keys(architecture, settings)
    weights = HFWeights(source, family)
    (embedding,) = family.tensors["embedding"]["word_embeddings"].modules
    stored = weights.find(f"{embedding}.weight")
    rows = weights.get(stored).shape[0] if stored else settings.vocab_size
    plan = single_rank_plan(NeoXConfig.from_flat(keys), rows)
    tensors = _stored_keys(weights, plan.layers)
    _check_degree(plan.layers, model_parallel_size)
    adapters: Mapping[int, Mapping[str, Tensor]] = {}
    layers = plan.layers
    if adapter_dir is not None:
        adapter = read_peft_adapter(Path(adapter_dir), layers, family)
        layers, adapters, keys = add_adapters(layers, adapter.lora), adapter.tensors, {**keys, "lora": adapter.keys}
    staged = stage_directory(output, 0)
    try:
        _write_layers(weights, tensors, adapters, layers, staged, model_parallel_size, precision)
        tokenizer = import_tokenizer(source, output)
        client_state = {"iteration": 0, **_identity(replace(plan, layers=layers), tokenizer, model_parallel_size)}
        for rank in range(model_parallel_size):
            write_client_state(staged, rank, client_state)
        checkpoint = commit(staged)
    except BaseException:
        discard(staged)
        raise
    header = f"# Imported from {source.name}, {rows} embedding rows. Add data, batch and optimizer keys to train.\n"
    return FromHFResult(checkpoint, _write_config(output, header, keys, tokenizer), layers.numel)


def _check_format(source: Path) -> None:
    """Raise ConversionError for files that are not Hugging Face's, naming what converts them first."""
    scripts = "https://github.com/huggingface/transformers/tree/v4.57.6/src/transformers/models"
    others = {
        "consolidated.*.pth": ("Meta's Llama", f"{scripts}/llama/convert_llama_weights_to_hf.py"),
        "**/model_optim_rng.pt": ("Megatron-LM", f"{scripts}/megatron_gpt2/convert_megatron_gpt2_checkpoint.py"),
    }
    for pattern, (owner, script) in others.items():
        if not (source / "config.json").exists() and next(source.glob(pattern), None) is not None:
            raise ConversionError(
                f"{source} holds a checkpoint in {owner}'s format: convert it to Hugging Face's first, with {script} "
                "and transformers 4.57, then import the result"
            )


def read_family(hf: Mapping[str, Any]) -> tuple[Family, Architecture, ModelSettings]:
    """Return the family, architecture and settings of a `config.json`.

    Raises:
        ConversionError: For an unknown family or values that are not supported, with every reason.
    """
    model_type = str(hf.get("model_type"))
    if model_type not in FAMILIES:
        raise ConversionError(
            f"config.json: model_type {model_type} is not supported; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    return family, *family.read_config(hf)


def _config_keys(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    """Return YAML keys of an imported model. Raises ConversionError for fields that no key can express."""
    keys = yaml_keys(architecture)
    differences = architecture_of(NeoXConfig.from_flat(keys)).differences(asdict(architecture))
    if differences:
        lines = [f"{d.field}: {d.saved} in the Hugging Face model, only {d.wanted} is supported" for d in differences]
        raise ConversionError("this Hugging Face model cannot be expressed here:\n  " + "\n  ".join(lines))
    return {
        **keys,
        "output_layer_parallelism": "column",
        "attention_dropout": settings.attention_dropout,
        "hidden_dropout": settings.hidden_dropout,
        "precision": settings.dtype,
    }


def _stored_keys(weights: HFWeights, layers: LayerPlan) -> dict[TensorMapping, list[str]]:
    """Return the stored keys of each parameter. Raises ConversionError listing missing and unknown keys."""
    found: dict[TensorMapping, list[str]] = {}
    missing: list[str] = []
    known: set[str] = set()
    for mapping in weights.family.mappings(layers):
        stored = [weights.find(key) for key in mapping.keys]
        missing += [key for key, at in zip(mapping.keys, stored, strict=True) if at is None]
        found[mapping] = [at for at in stored if at is not None]
        known.update(found[mapping])
    if layers.architecture.tie_word_embeddings:
        known |= weights.family.head_keys()  # a copy of the embedding
    unknown = sorted(weights.keys - known)
    if missing or unknown:
        lines = [f"missing: {', '.join(missing[:10])}"] if missing else []
        lines += [f"unknown: {', '.join(unknown[:10])}"] if unknown else []
        listed = "\n  ".join(lines)
        raise ConversionError(f"{weights.directory}: the weights are not those that config.json describes\n  {listed}")
    return found


def _check_degree(layers: LayerPlan, tp_size: int) -> None:
    network = layers.architecture
    bad = {
        f"{p.name} {list(p.shape)}"
        for layer in layers.weight_layers
        for p in layer.parameters
        if not p.is_divisible(tp_size)
    }
    bad |= {
        f"{name} ({getattr(network, name)})"
        for name in ("num_attention_heads", "num_kv_heads")
        if getattr(network, name) % tp_size
    }
    if bad:
        raise ConfigError(f"--model-parallel-size {tp_size} does not divide {', '.join(sorted(bad))}")


def _write_layers(
    weights: HFWeights,
    tensors: Mapping[TensorMapping, list[str]],
    adapters: Mapping[int, Mapping[str, Tensor]],
    layers: LayerPlan,
    directory: Path,
    tp_size: int,
    precision: Precision | None,
) -> None:
    architecture = layers.architecture
    by_layer: dict[int, list[TensorMapping]] = {}
    for mapping in tensors:
        by_layer.setdefault(mapping.layer, []).append(mapping)
    with progress("import", layers.numel, unit="parameters") as bar:
        for layer in layers.weight_layers:
            state = dict(adapters.get(layer.index, {}))
            shapes = {parameter.name: parameter.shape for parameter in layer.parameters}
            for mapping in by_layer[layer.index]:
                stored = {key: weights.get(key) for key in tensors[mapping]}
                wanted = to_hf_layout(torch.empty(shapes[mapping.name], device="meta"), mapping.source, architecture)
                for (key, tensor), part in zip(stored.items(), wanted, strict=True):
                    if tensor.shape != part.shape:
                        raise ConversionError(
                            f"{weights.directory}: {key} has shape {list(tensor.shape)}, but config.json describes a "
                            f"model with {list(part.shape)}"
                        )
                full = from_hf_layout(list(stored.values()), mapping.source, architecture)
                state[mapping.name] = full
            if precision:
                state = {name: tensor.to(DTYPES[precision]) for name, tensor in state.items()}
            write_full_layer(directory, layer, state, tp_size)
            bar.update(layer.numel)


def _identity(plan: RunPlan, tokenizer: Path | None, tp_size: int) -> dict[str, dict[str, Any]]:
    """Return the model's entries of the client state, without those of a training run."""
    state = identity_state(plan)
    state[ARGS]["model_parallel_size"] = tp_size
    del state[ARGS]["tokenizer_type"]
    for key in ("vocab_size", "precision", "zero_stage", "data_parallel_size"):
        del state[MODEL][key]
    if tokenizer is not None:
        state[ARGS]["tokenizer_type"] = "HFTokenizer"
        state[MODEL]["vocab_size"] = build_tokenizer("HFTokenizer", tokenizer).vocab_size
    return state


def _write_config(output: Path, header: str, keys: Mapping[str, Any], tokenizer: Path | None) -> Path:
    """Write the model's keys as YAML, with the tokenizer if there is one, ready to finetune from."""
    flat = dict(keys)
    if tokenizer is not None:
        flat |= {"tokenizer_type": "HFTokenizer", "vocab_file": str(tokenizer)}
    flat |= {"load": str(output), "finetune": True}
    path = output / "config.yml"
    path.write_text(header + yaml.safe_dump(flat, sort_keys=False), encoding="utf-8")
    return path
