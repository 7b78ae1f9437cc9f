"""Import of a Hugging Face directory (such as Pythia, GPT-NeoX-20B or our own exports) as a checkpoint.

    config.json             `Family.read_config` -> `Architecture` -> YAML keys -> plan on one rank: layers and shapes
    model.safetensors       `HFWeights`: key -> file; `_stored_keys`: each of our parameters -> the keys of its tensors
         |                  layer by layer: tensors -> `from_hf_layout` -> our parameter, cut for the tensor ranks
         v
    OUTPUT/.import-DIGEST   finished layers (`PartialImport`)
         |                  `_commit`: with the tokenizer, generation_config.json and the client state
         v
    OUTPUT/global_step0, latest, tokenizer.json, generation_config.json, config.yml

The same import, started again, resumes after the finished layers.
"""

from __future__ import annotations

import difflib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from neox.architecture import Architecture, LayerPlan, add_adapters, block_kinds
from neox.checkpoint import (
    commit,
    discard,
    identity_state,
    refuse_running,
    stage_directory,
    supersede_all,
    write_client_state,
    write_full_layer,
    write_generation_settings,
)
from neox.checkpoint.identity import ARGS, MODEL
from neox.config import NeoXConfig
from neox.convert.hf_directory import CONFIG, read_json, write_json
from neox.convert.hf_tokenizer import TOKENIZER_FILES, import_tokenizer
from neox.convert.hf_weights import HFWeights, with_own_head
from neox.convert.layouts import from_hf_layout, to_hf_layout
from neox.convert.peft_adapters import further_layers_left_out, prefixes_of_layers, read_peft_adapter
from neox.convert.verification import single_rank_plan
from neox.errors import CheckpointError, ConfigError, ConversionError, os_errors, refusals
from neox.families import FAMILIES, Family, ModelSettings, TensorMapping
from neox.families.wrappers import text_network
from neox.files import fsync_path, replace_file
from neox.log import get_logger, progress
from neox.ops import DTYPES
from neox.plan import Precision, RunPlan, architecture_of, yaml_keys
from neox.tokenizer import GENERATION_CONFIG, build_tokenizer, identify, write_tokenizer_identity
from neox.tokenizer.chat import TEMPLATE_DIRECTORY

_log = get_logger(__name__)
_IMPORT_PREFIX = ".import-"
_DONE = ".done"


@dataclass(frozen=True)
class FromHFResult:
    """Finished import.

    Attributes:
        checkpoint: The committed checkpoint.
        config_file: YAML file of its model.
        parameters: Number of parameters.
    """

    checkpoint: Path
    config_file: Path
    parameters: int


def from_hf(
    hf_dir: str | Path,
    output_dir: str | Path,
    *,
    name: str | None = None,
    model_parallel_size: int = 1,
    precision: Precision | None = None,
    adapter_dir: str | Path | None = None,
    mtp_num_layers: int = 0,
    overwrite: bool = False,
) -> FromHFResult:
    """Write `output_dir/global_step0` in NeoX's layout, with `latest`, `config.yml` and the tokenizer next to it.

    One layer is in memory at a time. An interrupted import resumes after the layers that it has written.

    Args:
        hf_dir: Directory with `config.json` and weights.
        output_dir: Directory of checkpoints.
        name: Name of the model in the file that is written; None takes that of its directory.
        model_parallel_size: Number of tensor ranks of the files. Every degree can load them.
        precision: Precision of the weights; None keeps the source's.
        adapter_dir: Directory of a LoRA adapter that `peft` wrote for this model. The checkpoint then has adapters,
            which are trained on, or added to the weights if it is read without `lora`.
        mtp_num_layers: Number of modules of multi-token prediction that are kept; others are left out.
        overwrite: Whether checkpoints, tokenizer and settings of generation in `output_dir` are moved to `superseded`,
            once the source has been read.

    Raises:
        ConfigError: For a degree that does not divide the network.
        ConversionError: For networks that cannot be expressed here, and for missing, unknown or broken weights.
        CheckpointError: If the disk refuses.
    """
    source = Path(hf_dir)
    output = Path(output_dir)
    _check_format(source)

    # The network, from config.json. What cannot be expressed here is said before any weights are looked for.
    outer = read_json(source / CONFIG)
    hf = text_network(outer) if outer.get("model_type") not in FAMILIES else None
    is_wrapped = hf is not None
    if hf is None:
        hf = outer
    family, architecture, settings = read_family(hf, outer.get("model_type"))
    _config_keys(architecture, settings)

    # Two things only the files know: whether a head said to be tied is one, and how many rows the embedding has.
    weights = HFWeights(source, family, is_wrapped=is_wrapped)
    architecture = with_own_head(architecture, weights)
    stored_modules = architecture.mtp_num_layers  # of multi-token prediction
    if mtp_num_layers > stored_modules:
        number = f"{family.further_layers_key}: {stored_modules}" if family.further_layers_key else "none"
        raise ConversionError(
            f"{source}: {mtp_num_layers} modules of multi-token prediction are asked for, and config.json has {number}"
        )
    architecture = replace(architecture, mtp_num_layers=mtp_num_layers)
    keys = {**_config_keys(architecture, settings), "hf_architecture": family.model_type}
    rows = settings.vocab_size
    (embedding,) = family.tensors["embedding"]["word_embeddings"].modules
    embedding_key = weights.find(f"{embedding}.weight")
    if embedding_key is not None:
        rows = weights.get(embedding_key).shape[0] or rows

    # Every parameter is found before the first one is written.
    plan = single_rank_plan(NeoXConfig.from_flat(keys), rows)
    layers = plan.layers
    stored_keys = _stored_keys(weights, layers, stored_modules)
    _check_copies(weights, layers)
    _check_degree(layers, model_parallel_size)
    adapters: Mapping[int, Mapping[str, Tensor]] = {}
    read_files = [source / CONFIG, *weights.files]
    if adapter_dir is not None:
        adapter = read_peft_adapter(Path(adapter_dir), layers, family, stored_modules)
        layers = add_adapters(layers, adapter.lora)
        adapters = adapter.tensors
        keys["lora"] = adapter.keys
        read_files += Path(adapter_dir).iterdir()

    choices = {"ranks": model_parallel_size, "precision": precision, "modules": mtp_num_layers}
    partial = PartialImport(output, fingerprint(read_files, choices))
    try:
        _write_layers(weights, stored_keys, adapters, layers, partial, model_parallel_size, precision)
    except Exception:
        partial.discard()
        raise
    trained = replace(plan, layers=layers)
    checkpoint, tokenizer = _commit(partial, source, output, trained, model_parallel_size, overwrite=overwrite)

    # The model's keys as YAML, to fine-tune from.
    keys["padded_vocab_size"] = rows  # so that training and exports keep the rows of the embedding
    if tokenizer is not None:
        keys["tokenizer_type"] = "HFTokenizer"
        keys["vocab_file"] = str(tokenizer)
    keys["load"] = str(output)
    keys["finetune"] = True
    header = f"# Imported from {name or source.name}. Add data, batch and optimizer keys to train.\n"
    config_file = output / "config.yml"
    config_file.write_text(header + yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
    return FromHFResult(checkpoint, config_file, layers.numel)


def _commit(
    partial: PartialImport, source: Path, output: Path, plan: RunPlan, ranks: int, *, overwrite: bool
) -> tuple[Path, Path | None]:
    """Write the tokenizer, the settings of generation and the client state of the weights, and commit the checkpoint.

    Nothing in `output` is replaced before the source has been read.

    Args:
        partial: The weights.
        source: Directory with the tokenizer and the settings of generation.
        output: Directory of checkpoints.
        plan: The network.
        ranks: Number of tensor ranks of the files.
        overwrite: Whether older checkpoints and the files next to them are moved to `superseded`.

    Returns:
        The checkpoint, and the tokenizer's file; None if the source has none that can be read.

    Raises:
        ConversionError: For settings of generation that cannot be read.
        CheckpointError: If the disk refuses.
    """
    refuse_running(output)
    staged = stage_directory(output, 0)
    beside = staged.with_name(f"{staged.name}.files")  # those that lie next to the checkpoint
    tokenizer_file = None
    try:
        partial.move_to(staged)
        beside.mkdir()
        copied = import_tokenizer(source, beside)
        write_generation_settings(staged, _import_generation_config(source, beside))

        # The client state names the model as a training's does. What only a run decides is left out.
        identity = identity_state(plan)
        identity[ARGS]["model_parallel_size"] = ranks
        del identity[ARGS]["tokenizer_type"]
        for key in ("vocab_size", "precision", "zero_stage", "data_parallel_size"):
            del identity[MODEL][key]
        if copied is not None:
            tokenizer_file = output / copied.name
            tokenizer = build_tokenizer("HFTokenizer", copied)
            write_tokenizer_identity(staged, identify(tokenizer, tokenizer_file))
            identity[ARGS]["tokenizer_type"] = "HFTokenizer"
            identity[MODEL]["vocab_size"] = min(tokenizer.vocab_size, plan.padded_vocab_size)
        for rank in range(ranks):
            write_client_state(staged, rank, {"iteration": 0, **identity})

        if overwrite:
            supersede_all(output, further_files=(*TOKENIZER_FILES, TEMPLATE_DIRECTORY, GENERATION_CONFIG))
        with os_errors(CheckpointError, f"{output}: files of the import cannot be moved there"):
            for path in beside.iterdir():
                fsync_path(path)
                if path.is_dir():
                    shutil.rmtree(output / path.name, ignore_errors=True)  # a directory only takes an empty one's place
                replace_file(path, output / path.name)
        return commit(staged), tokenizer_file
    except BaseException:
        discard(staged)
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WITHOUT_EFFECT = frozenset({*_SPECIAL_IDS, "_from_model_config", "transformers_version", "use_cache", "max_length"})
_OFF = (None, False)  # transformers writes some of these for every model


def _import_generation_config(source: Path, output: Path) -> dict[str, Any]:
    """Copy the settings of generation, which generation and exports take from there, and return them.

    Without them transformers takes the ids of special tokens from `config.json`, where they may be several, too. A log
    line names the settings, such as those of sampling, that are carried to exports without an effect here.

    Raises:
        ConversionError: If a file cannot be read.
    """
    path = source / GENERATION_CONFIG
    if path.is_file():
        settings = read_json(path)
        carried = sorted(key for key, value in settings.items() if key not in _WITHOUT_EFFECT and value not in _OFF)
        if carried:
            _log.info(
                "%s: exports get %s back; generation here follows the YAML's keys (temperature, top_p, top_k, ...) "
                "instead",
                path,
                ", ".join(carried),
            )
    else:
        config = read_json(source / CONFIG)
        config = text_network(config) or config
        settings = {}
        for key in _SPECIAL_IDS:
            if config.get(key) is not None:
                settings[key] = config[key]
        if not settings:
            return {}
        settings["_from_model_config"] = True
    write_json(output / GENERATION_CONFIG, settings)
    return settings


_OTHER_FORMATS = (
    ("consolidated.*.pth", "Meta's Llama", "llama/convert_llama_weights_to_hf.py"),
    ("**/model_optim_rng.pt", "Megatron-LM", "megatron_gpt2/convert_megatron_gpt2_checkpoint.py"),
)
"""(file, owner of its format, script of transformers 4.57 that converts it)."""


def _check_format(source: Path) -> None:
    """Raise ConversionError for files that are not Hugging Face's. The message names the script that converts them."""
    if (source / CONFIG).exists():
        return
    for pattern, owner, script in _OTHER_FORMATS:
        if next(source.glob(pattern), None) is not None:
            raise ConversionError(
                f"{source} holds a checkpoint in {owner}'s format: convert it to Hugging Face's first, with "
                f"https://github.com/huggingface/transformers/tree/v4.57.6/src/transformers/models/{script} "
                "and transformers 4.57, then import the result"
            )


def read_family(hf: Mapping[str, Any], outer: str | None = None) -> tuple[Family, Architecture, ModelSettings]:
    """Return the family, architecture and settings of a `config.json`.

    Args:
        hf: Its content, or that of the text network inside of it.
        outer: `model_type` of the whole.

    Raises:
        ConversionError: For an unknown family or values that are not supported, with every reason.
    """
    if hf.get("model_type") is None and {"d_model", "n_layer"} <= hf.keys():
        raise ConversionError(
            "config.json has no model_type, but d_model and n_layer: it is a model of the package mamba_ssm (as "
            "state-spaces publishes, and gpt-neox's convert_neox_to_mamba_ssm.py writes); convert it to Hugging Face's "
            "form first, with models/mamba/convert_mamba_ssm_checkpoint_to_pytorch.py of transformers 4.57"
        )
    model_type = str(hf.get("model_type"))
    if model_type not in FAMILIES:
        where = f"model_type {model_type}"
        if outer is not None and outer != model_type:
            where = f"model_type {outer}, around a text network of model_type {model_type}: the network"
        near = difflib.get_close_matches(model_type, FAMILIES, n=3)
        hint = f" (near it: {', '.join(near)})" if near else ""
        raise ConversionError(
            f"config.json: {where} is not supported{hint}; docs/huggingface.md lists the {len(FAMILIES)} families that "
            "are. If this model computes the same as one of them, change model_type, and compare the logits"
        )
    family = FAMILIES[model_type]
    architecture, settings = family.read_config(hf)
    return family, architecture, settings


def _config_keys(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    """Return YAML keys of an imported model. Raises ConversionError for fields that no key can express."""
    keys = yaml_keys(architecture)
    differences = architecture_of(NeoXConfig.from_flat(keys)).differences(asdict(architecture))
    if differences:
        lines = ["this Hugging Face model cannot be expressed here:"]
        for field, theirs, ours in differences:
            lines.append(f"  {field}: {theirs} in the Hugging Face model, only {ours} is supported")
        raise ConversionError("\n".join(lines))
    if not architecture.tie_word_embeddings:
        keys["output_layer_parallelism"] = "column"
    return {
        **keys,
        "attention_dropout": settings.attention_dropout,
        "hidden_dropout": settings.hidden_dropout,
        "precision": settings.dtype,
    }


def _stored_keys(weights: HFWeights, layers: LayerPlan, further_layers: int) -> dict[TensorMapping, list[str]]:
    """Return the stored keys of each parameter.

    Args:
        weights: Weights of the Hugging Face directory.
        layers: Layers of the model.
        further_layers: Number of layers after the last block that the files hold. Those that the model lacks are left
            out.

    Raises:
        ConversionError: If keys are missing or unknown, with their names.
    """
    found: dict[TensorMapping, list[str]] = {}
    missing: list[str] = []
    unknown = set(weights.keys)
    for mapping in weights.family.mappings(layers):
        found[mapping] = []
        for key in mapping.keys:
            stored = weights.find(key)
            if stored is None:
                missing.append(key)
            else:
                found[mapping].append(stored)
                unknown.discard(stored)
    if layers.architecture.tie_word_embeddings:
        unknown -= weights.family.head_keys()  # a copy of the embedding

    for mapping in weights.family.copies(layers):
        unknown.difference_update(mapping.keys)

    # Layers after the last block predict further tokens (DeepSeek-V3). A model may have only some of them, or none.
    lacking = further_layers_left_out(layers, further_layers)
    left_out = {key for key in unknown if key.startswith(prefixes_of_layers(lacking))}
    if left_out:
        _log.warning(
            f"left out {len(left_out)} tensors of the multi-token prediction layers {lacking[0]} to {lacking[-1]}, "
            f"which are not part of the network ({min(left_out)} and others); --mtp-num-layers {further_layers} keeps "
            "them, to train them on"
        )
    unknown -= left_out

    if missing or unknown:
        lines = [f"{weights.directory}: the weights are not those that config.json describes"]
        if missing:
            lines.append(f"  missing: {', '.join(missing[:10])}")
        if unknown:
            lines.append(f"  unknown: {', '.join(sorted(unknown)[:10])}")
        raise ConversionError("\n".join(lines))
    return found


def _check_copies(weights: HFWeights, layers: LayerPlan) -> None:
    """Raise ConversionError if modules of multi-token prediction have another embedding or head than the network."""
    originals = {(mapping.layer, mapping.name): mapping.keys for mapping in weights.family.mappings(layers)}
    for mapping in weights.family.copies(layers):
        (key,) = mapping.keys
        stored = weights.find(key)
        original = weights.find(originals[mapping.layer, mapping.name][0])
        if stored is None or original is None:
            continue
        if not torch.equal(weights.get(stored), weights.get(original)):
            raise ConversionError(
                f"{weights.directory}: {stored} differs from {original}; modules of multi-token prediction have the "
                "network's own embedding and head here, so import it without them (--mtp-num-layers 0)"
            )


def _check_degree(layers: LayerPlan, tp_size: int) -> None:
    """Raise ConfigError if a network cannot be split over so many tensor ranks, naming what cannot be."""
    undivided: set[str] = set()
    for layer in layers.weight_layers:
        for spec in layer.parameters:
            if not spec.is_divisible(tp_size):
                undivided.add(f"{spec.name} {list(spec.shape)}")
    for kind in block_kinds(layers.architecture):
        if kind.attention is None:
            continue
        for name in ("num_attention_heads", "num_kv_heads"):
            heads = getattr(layers.architecture, name)
            if heads % tp_size:
                undivided.add(f"{name} ({heads})")
    if undivided:
        raise ConfigError(f"--model-parallel-size {tp_size} does not divide {', '.join(sorted(undivided))}")


def _write_layers(
    weights: HFWeights,
    stored_keys: Mapping[TensorMapping, list[str]],
    adapters: Mapping[int, Mapping[str, Tensor]],
    layers: LayerPlan,
    partial: PartialImport,
    tp_size: int,
    precision: Precision | None,
) -> None:
    """Write the files of the layers that are not written yet.

    Args:
        weights: Weights of the Hugging Face directory.
        stored_keys: Parameter -> the keys of its tensors there.
        adapters: Layer index -> adapters by name.
        layers: Layers of the model, with adapters.
        partial: Layers that an earlier import has written, and the place for the rest.
        tp_size: Number of tensor ranks.
        precision: Precision of the weights; None keeps the source's.

    Raises:
        ConversionError: If a tensor has another shape than the model's.
    """
    by_layer: dict[int, list[TensorMapping]] = {}
    for mapping in stored_keys:
        by_layer.setdefault(mapping.layer, []).append(mapping)
    with progress("import", layers.numel, unit="parameters") as bar:
        for layer in layers.weight_layers:
            if partial.has(layer.index):
                bar.update(layer.numel)
                continue
            specs = {spec.name: spec for spec in layer.parameters}
            state = dict(adapters.get(layer.index, {}))
            for mapping in by_layer[layer.index]:
                # The shapes that their tensors must have are those of an export of our parameter.
                ours = torch.empty(specs[mapping.name].shape, device="meta")
                expected = to_hf_layout(ours, mapping.source, layers.architecture)
                theirs = []
                for key, wanted in zip(stored_keys[mapping], expected, strict=True):
                    tensor = weights.get(key)
                    fits = tensor.shape == wanted.shape
                    if mapping.source.cut_anywhere:
                        fits = tensor.shape[1:] == wanted.shape[1:]
                    if not fits:
                        raise ConversionError(
                            f"{weights.directory}: {key} has shape {list(tensor.shape)}, but config.json describes a "
                            f"model with {list(wanted.shape)}"
                        )
                    theirs.append(tensor)
                rows = sum(tensor.shape[0] for tensor in theirs)
                if mapping.source.cut_anywhere and rows != ours.shape[0]:
                    keys = ", ".join(stored_keys[mapping])
                    raise ConversionError(
                        f"{weights.directory}: {keys} have {rows} rows, but config.json says {ours.shape[0]}"
                    )
                state[mapping.name] = from_hf_layout(theirs, mapping.source, layers.architecture)
            if precision:
                for name, tensor in state.items():
                    dtype = DTYPES[precision]
                    if specs[name].stays_fp32:
                        dtype = torch.promote_types(tensor.dtype, dtype)  # never rounded
                    state[name] = tensor.to(dtype)
            write_full_layer(partial.directory, layer, state, tp_size)  # cuts each parameter for the tensor ranks
            partial.finish(layer.index)
            bar.update(layer.numel)


def fingerprint(files: Iterable[Path], settings: Mapping[str, Any]) -> str:
    """Return a digest of what an import reads and how it writes it.

    Args:
        files: Files of the model and of an adapter. Their names, sizes and times of change count.
        settings: Further settings as JSON can hold them.
    """
    read = []
    for path in sorted(files):
        status = path.stat()
        read.append([str(path), status.st_size, status.st_mtime_ns])
    described = json.dumps({"files": read, "settings": settings}, sort_keys=True)
    return sha256(described.encode()).hexdigest()[:16]


class PartialImport:
    """A directory next to the checkpoints, with the layers that are written so far.

    A layer is complete if a file with its number says so. That is written after the layer's files are on disk.

    Args:
        output: Directory of checkpoints.
        digest: What `fingerprint` returns. Directories of other imports are removed.

    Attributes:
        directory: The directory.

    Raises:
        CheckpointError: If it cannot be written.
    """

    def __init__(self, output: Path, digest: str) -> None:
        self.directory = output / f"{_IMPORT_PREFIX}{digest}"
        with refusals(), os_errors(CheckpointError, f"{output}: cannot be written"):
            output.mkdir(parents=True, exist_ok=True)
            for other in output.glob(f"{_IMPORT_PREFIX}*"):
                if other != self.directory:
                    shutil.rmtree(other)
            self.directory.mkdir(exist_ok=True)
        done = len(list(self.directory.glob(f"*{_DONE}")))
        if done:
            _log.info("going on with an interrupted import: %d layers are written", done)

    def has(self, layer: int) -> bool:
        """Return whether a layer is complete."""
        return (self.directory / f"{layer}{_DONE}").exists()

    def finish(self, layer: int) -> None:
        """Mark a layer as complete, once its files are on disk. Raises CheckpointError."""
        with os_errors(CheckpointError, f"{self.directory}: cannot be written"):
            for path in self.directory.glob(f"layer_{layer:02d}-*"):
                fsync_path(path)
            (self.directory / f"{layer}{_DONE}").touch()

    def move_to(self, staged: Path) -> None:
        """Move the files of all layers into another directory, and remove this one. Raises CheckpointError."""
        with os_errors(CheckpointError, f"{staged}: cannot be written"):
            for path in self.directory.iterdir():
                if path.suffix != _DONE:
                    path.rename(staged / path.name)
        self.discard()

    def discard(self) -> None:
        """Remove the directory. A failure does no harm: the next import removes it."""
        shutil.rmtree(self.directory, ignore_errors=True)
