"""A Hugging Face GPT-NeoX directory (Pythia, 20B, our own exports) as a NeoX checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from neox.architecture import LayerPlan
from neox.checkpoint import (
    commit,
    discard,
    identity_state,
    stage_directory,
    write_client_state,
    write_full_layer,
)
from neox.checkpoint.identity import ARGS, MODEL
from neox.config import NeoXConfig, Precision, RunPlan
from neox.convert.hf_config import neox_keys
from neox.convert.name_table import NamePair, name_pairs
from neox.convert.plain_model import plain_plan
from neox.convert.weights_in import HFWeights, read_json
from neox.errors import ConversionError
from neox.log import progress
from neox.ops import DTYPES
from neox.tokenizer import build_tokenizer


@dataclass(frozen=True)
class FromHFResult:
    """What an import made: the committed checkpoint, the config of its model, and the number of parameters."""

    checkpoint: Path
    config_file: Path
    parameters: int


def from_hf(
    hf_dir: str | Path,
    output_dir: str | Path,
    *,
    model_parallel_size: int = 1,
    precision: Precision | None = None,
) -> FromHFResult:
    """Write `output_dir/global_step0` in NeoX's layout, with `latest`, `config.yml` and the tokenizer beside it.

    One layer is in memory at a time. model_parallel_size: tensor ranks of the files (any degree loads them).
    precision: of the weights; None keeps the source's. Raises ConversionError with what cannot be expressed or is
    missing, CheckpointError when the disk refuses.
    """
    source, output = Path(hf_dir), Path(output_dir)
    keys = neox_keys(read_json(source / "config.json"))
    weights = HFWeights(source)
    embedding = _key(weights, "gpt_neox.embed_in.weight")
    rows = weights.get(embedding).shape[0]
    config = NeoXConfig.from_flat(keys)
    plan = plain_plan(config, rows)
    pairs = _paired(weights, plan.layers)
    _check_degree(plan.layers, model_parallel_size)
    staged = stage_directory(output, 0)
    try:
        _write_layers(weights, pairs, plan.layers, staged, model_parallel_size, precision)
        client_state = {"iteration": 0, **_identity(plan, source, model_parallel_size)}
        for rank in range(model_parallel_size):
            write_client_state(staged, rank, client_state)
        checkpoint = commit(staged)
    except BaseException:
        discard(staged)
        raise
    return FromHFResult(checkpoint, _write_config(source, output, keys, rows), plan.layers.numel)


def _paired(weights: HFWeights, layers: LayerPlan) -> dict[NamePair, str]:
    """Our parameters and the keys that hold them. Raises ConversionError listing missing and unknown keys."""
    pairs = {pair: _key(weights, pair.hf) for pair in name_pairs(layers)}
    missing = [pair.hf for pair, key in pairs.items() if key not in weights.names]
    known = set(pairs.values())
    if layers.architecture.tie_word_embeddings:
        known |= {"embed_out.weight", "lm_head.weight"}  # a tied head's copy of the embedding
    unknown = sorted(weights.names - known)
    if missing or unknown:
        lines = [f"missing: {', '.join(missing[:10])}"] if missing else []
        lines += [f"unknown: {', '.join(unknown[:10])}"] if unknown else []
        listed = "\n  ".join(lines)
        raise ConversionError(f"{weights.directory}: not the weights its config.json describes\n  {listed}")
    return pairs


def _key(weights: HFWeights, name: str) -> str:
    """The key under which a directory holds what the name table calls `name` (a bare GPTNeoXModel has no prefix)."""
    for candidate in (name, name.removeprefix("gpt_neox."), name.replace("embed_out.", "lm_head.")):
        if candidate in weights.names:
            return candidate
    return name


def _check_degree(layers: LayerPlan, tp_size: int) -> None:
    bad = sorted(
        {
            f"{p.name} ({p.shape[p.partition_dim]})"
            for layer in layers.weight_layers
            for p in layer.parameters
            if p.partition_dim is not None and p.shape[p.partition_dim] % tp_size
        }
    )
    if layers.architecture.num_attention_heads % tp_size:
        bad.append(f"attention heads ({layers.architecture.num_attention_heads})")
    if bad:
        raise ConversionError(f"model_parallel_size {tp_size} does not divide {', '.join(bad)}")


def _write_layers(
    weights: HFWeights,
    pairs: Mapping[NamePair, str],
    layers: LayerPlan,
    directory: Path,
    tp_size: int,
    precision: Precision | None,
) -> None:
    with progress("import", layers.numel, unit="parameters") as bar:
        for layer in layers.weight_layers:
            state: dict[str, Tensor] = {}
            for pair, key in pairs.items():
                if pair.layer != layer.index:
                    continue
                tensor = weights.get(key)
                state[pair.name] = tensor.to(DTYPES[precision]) if precision else tensor
            for parameter in layer.parameters:
                found = tuple(state[parameter.name].shape)
                if found != parameter.shape:
                    raise ConversionError(
                        f"{weights.directory}: layer {layer.index} {parameter.name} has shape {list(found)}, "
                        f"config.json says {list(parameter.shape)}"
                    )
            write_full_layer(directory, layer, state, tp_size)
            bar.update(layer.numel)


def _identity(plan: RunPlan, source: Path, tp_size: int) -> dict[str, dict[str, Any]]:
    """What the client state says about the model, less the facts about a run: there was none."""
    state = identity_state(plan)
    state[ARGS]["model_parallel_size"] = tp_size
    del state[ARGS]["tokenizer_type"]
    for key in ("vocab_size", "precision", "zero_stage", "data_parallel_size"):
        del state[MODEL][key]
    if (tokenizer := source / "tokenizer.json").is_file():
        state[ARGS]["tokenizer_type"] = "HFTokenizer"
        state[MODEL]["vocab_size"] = build_tokenizer("HFTokenizer", tokenizer).vocab_size
    return state


def _write_config(source: Path, output: Path, keys: Mapping[str, Any], rows: int) -> Path:
    """Write the model's keys as YAML, with the tokenizer where there is one, ready to finetune from."""
    flat = dict(keys)
    tokenizer = source / "tokenizer.json"
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, output / "tokenizer.json")
        flat |= {"tokenizer_type": "HFTokenizer", "vocab_file": str(output / "tokenizer.json")}
    flat |= {"load": str(output), "finetune": True}
    path = output / "config.yml"
    head = f"# Imported from {source.name}, {rows} embedding rows. Add data, batch and optimizer keys to train.\n"
    path.write_text(head + yaml.safe_dump(flat, sort_keys=False), encoding="utf-8")
    return path
