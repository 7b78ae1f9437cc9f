"""Identity of a run: its network and its start. Checkpoints carry it, so that no run replaces another one's.

A run is the same if its network is the same and it starts from the same weights: initial ones of the same seed, or the
weights of the same `load`. Data, schedule, batch and degrees may change when a run resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from neox.checkpoint_files.finding import newest_checkpoint, search_checkpoint, step_of
from neox.checkpoint_files.manifest import read_manifest
from neox.config.neox_config import NeoXConfig
from neox.config.sections.optimizer_table import MuonParams
from neox.config.yaml_file import read_file
from neox.errors import CheckpointError, ConfigError
from neox.files import read_json_object
from neox.plan.devices.precision import Precision, choose_precision
from neox.plan.network.architecture import architecture_of
from neox.plan.run_start import FIRST_LOAD_KEYS, StartMode, requested_start
from neox.storage import cache_folder, cached_address, is_remote, named_checkpoint

RUN_FILE = "run.json"
"""Name of the file in a checkpoint that holds the identity of its run."""

_STEP = "global_step"
# What may change when a run resumes, and is worth a note: sections whose keys change what is learned.
_LEARNING_SECTIONS = ("data", "training", "schedule", "optimizer", "tokenizer", "model")
_BATCH_KEYS = ("train_batch_size", "gradient_clipping")
_MOST_DIFFERENCES = 4
_SAMPLES = "samples_per_step"
_WARMUP = "lr_warmup_iters"
_SPLIT_FUSED = "optimizer.params.split_fused"


@dataclass(frozen=True)
class RunIdentity:
    """What makes a run this run.

    Attributes:
        run_id: Hash of network and start, 16 hexadecimal digits.
        start: The start in words, for messages.
    """

    run_id: str
    start: str


@dataclass(frozen=True)
class FoundRun:
    """The run whose checkpoints a directory holds.

    Attributes:
        checkpoint: The newest checkpoint, or the one that `latest` names.
        iteration: Number of steps that it has seen.
        identity: Its run; None if another program or an older version wrote it.
        samples_per_step: Samples of its steps; None if they are not recorded.
        incomplete: Why no checkpoint of the directory can be loaded, for each that was tried; empty if this one can.
    """

    checkpoint: Path
    iteration: int
    identity: RunIdentity | None
    samples_per_step: int | None = None
    incomplete: tuple[str, ...] = ()

    @cached_property
    def saved_config(self) -> NeoXConfig | None:
        """The configuration that the checkpoint holds; None if it cannot be read."""
        return saved_config(self.checkpoint)

    @property
    def precision(self) -> Precision | None:
        """The precision of the checkpoint; None if another program wrote it."""
        return None if self.saved_config is None else choose_precision(self.saved_config, [])

    def is_run_of(self, config: NeoXConfig) -> bool:
        """Return whether it is the run that a configuration starts; False if its run is not recorded.

        The hash of a run depends on the version of this program, which may have given networks another property since
        then. So the network of the checkpoint's configuration decides if only the hash differs.
        """
        if self.identity is None:
            return False
        ours = run_identity(config)
        if self.identity.run_id == ours.run_id:
            return True
        starts = (ours.start, _start_of(config, by_copy=True))
        saved = self.saved_config
        return saved is not None and self.identity.start in starts and _trained(saved) == _trained(config)


def run_identity(config: NeoXConfig) -> RunIdentity:
    """Return the identity of the run that a configuration starts."""
    start = _start_of(config)
    described = {**_trained(config), "start": start}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=list).encode()).hexdigest()
    return RunIdentity(digest[:16], start)


def _trained(config: NeoXConfig) -> dict[str, Any]:
    """Return what a run trains: its network, and adapters if it has any."""
    network = architecture_of(config).to_dict()
    network.pop("max_positions", None)  # a longer context resumes with the same weights
    lora = config.training.lora
    return {"network": network, "lora": None if lora is None else lora.model_dump(mode="json")}


def saved_config(checkpoint: Path) -> NeoXConfig | None:
    """Return the configuration that a checkpoint holds; None if it cannot be read."""
    try:
        return NeoXConfig.from_flat(read_file(checkpoint / "configs" / "config.yml").values)
    except ConfigError:
        return None


def _start_of(config: NeoXConfig, *, by_copy: bool = False) -> str:
    """Return the start of a run in words.

    Args:
        config: The configuration.
        by_copy: Whether a checkpoint in object storage is named by the path of its copy, as older versions did.
    """
    asked = requested_start(config)
    if asked.load is None or asked.own_directory:
        return f"initial weights of seed {config.training.seed}"
    load = Path(asked.load)
    iteration = asked.iteration
    cache = config.checkpoint.checkpoint_cache_dir
    if is_remote(asked.load):  # not fetched yet; afterwards `load` is the copy's directory
        root, named = named_checkpoint(asked.load)
        load = cache_folder(root, cache)
        if named is not None:
            iteration = named
    source = None
    if not by_copy:
        source = cached_address(load, cache)  # the same on all machines
    if source is None:
        source = str(load.resolve())
    if iteration is not None:
        source += f", iteration {iteration}"
    if asked.mode is StartMode.FINETUNE:
        return f"the weights of {source} (finetune)"
    return f"a continuation of {source}"


def starting_weights(config: NeoXConfig) -> str:
    """Return the weights that a training starts from, in words: the checkpoint itself if it is on this machine."""
    asked = requested_start(config)
    if asked.load is None:
        return f"initial weights of seed {config.training.seed}"
    step = None if asked.iteration is None else f"{_STEP}{asked.iteration}"
    if is_remote(asked.load):
        chosen = asked.load if step is None else f"{asked.load}, {step}"
    else:
        chosen = str(newest_checkpoint(asked.load, asked.iteration) or Path(asked.load, step or ""))
    if asked.own_directory:
        return f"goes on from {chosen}, or initial weights if it holds no checkpoint"
    if asked.mode is StartMode.FINETUNE:
        return f"weights of {chosen}; steps are counted from 0 (finetune)"
    return f"goes on from {chosen}"


def find_run(directory: Path, iteration: int | None = None, without: Collection[Path] = ()) -> FoundRun | None:
    """Return the run whose checkpoints a directory contains; None if it contains none.

    It is that of the checkpoint that a start loads; if none is complete, that of the one that is tried first.

    Args:
        directory: The directory. It may be missing.
        iteration: The only step that counts; None for any.
        without: Checkpoints that are known to be damaged.
    """
    search = search_checkpoint(directory, iteration, without=without)
    if search.found is not None:
        return found_run(search.found, _steps(search.found))
    if not search.candidates:
        return None
    first = search.candidates[0]
    reasons = [f"{path.name}: {'; '.join(why)}" for path, why in search.incomplete.items()]
    return replace(found_run(first, _steps(first)), incomplete=tuple(reasons))


def _steps(checkpoint: Path) -> int:
    """Return the number of steps of a checkpoint, which may have any name; 0 if nothing tells it."""
    step = step_of(checkpoint.resolve())
    if step is not None:
        return step
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError:
        return 0
    return 0 if manifest is None else manifest.iteration


def found_run(checkpoint: Path, iteration: int) -> FoundRun:
    """Return the run of a checkpoint that has seen a number of steps."""
    fields = _run_file(checkpoint)
    samples = fields.get(_SAMPLES)
    return FoundRun(checkpoint, iteration, _identity(fields), samples if isinstance(samples, int) else None)


def read_identity(checkpoint: Path) -> RunIdentity | None:
    """Return the identity that a checkpoint carries; None if it has none."""
    return _identity(_run_file(checkpoint))


def _identity(fields: Mapping[str, Any]) -> RunIdentity | None:
    """Return the identity in the fields of a run file; None if it has none."""
    if "run_id" not in fields or "start" not in fields:
        return None
    return RunIdentity(str(fields["run_id"]), str(fields["start"]))


def _run_file(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of its run; nothing if the file is missing or damaged."""
    return read_json_object(checkpoint / RUN_FILE)


def identity_text(identity: RunIdentity, samples_per_step: int | None = None) -> str:
    """Return the content of `RUN_FILE`.

    Args:
        identity: The run.
        samples_per_step: Samples of a step, which follow from the degrees if `train_batch_size` is not given.
    """
    fields: dict[str, Any] = asdict(identity)
    if samples_per_step is not None:
        fields[_SAMPLES] = samples_per_step
    return json.dumps(fields, indent=2) + "\n"


def other_run_message(config: NeoXConfig, found: FoundRun, address: str | None = None) -> str:
    """Return why a run must not write into a directory that holds another one's checkpoints, and the ways out.

    Args:
        config: The configuration of the run.
        found: The run whose checkpoints are there.
        address: Address of the directory if it is in object storage.
    """
    save = address or config.checkpoint.save
    move = "--overwrite to move its checkpoints to superseded/"
    if address is not None:
        move = "--overwrite, with which its checkpoints stay there and no longer count"
    ours = run_identity(config).start
    if found.identity is not None and found.identity.start == ours:
        differences = list(islice(network_changes(config, found), _MOST_DIFFERENCES))
        named = f" ({'; '.join(differences)})" if differences else ""
        return (
            f"{save} holds {found.checkpoint.name} of a run with another network, or with other adapters (`lora`)"
            f"{named}. Give another `save`, or {move}"
        )
    if found.identity is None:
        theirs = "whose run is not recorded"
    else:
        theirs = f"of another run, which starts from {found.identity.start}"
    resume = f"`load: {save}` without finetune to resume it"
    return (
        f"{save} holds {found.checkpoint.name} {theirs}; this one starts from {ours}. Give another `save`, {resume}, "
        f"or {move}"
    )


def changed_keys(config: NeoXConfig, found: FoundRun) -> Iterator[str]:
    """Yield the keys that change what is learned, if they differ from the checkpoint's, with both values."""
    saved = found.saved_config
    yield from _changed_keys(config, saved, _is_learning_key)
    # Versions that did not record samples had no `split_fused` either, and did what false does now.
    params = config.optimizer.optimizer.params
    if found.samples_per_step is None and saved is not None and isinstance(params, MuonParams):
        if params.split_fused:
            yield f"{_SPLIT_FUSED} false -> true (`false` goes on as before)"
        if config.optimizer.use_mup:
            yield "Muon's learning rate under use_mup 1 / m -> 1 / sqrt(m) (docs/upgrading.md)"


def all_changes(config: NeoXConfig, found: FoundRun) -> Iterator[str]:
    """Yield the keys that differ from the checkpoint's, with both values, but for hosts and where the run starts."""
    yield from _changed_keys(config, found.saved_config, _is_key_of_run)


def learning_changes(before: NeoXConfig, now: NeoXConfig) -> Iterator[str]:
    """Yield the keys that change what is learned, if two configurations differ in them, with both values."""
    yield from _changed_keys(now, before, _is_learning_key)


def network_changes(config: NeoXConfig, found: FoundRun) -> Iterator[str]:
    """Yield the keys of the network and of adapters that differ from the checkpoint's, with both values."""
    yield from _changed_keys(config, found.saved_config, _is_network_key)


def _changed_keys(config: NeoXConfig, saved: NeoXConfig | None, counts: Callable[[str], bool]) -> Iterator[str]:
    if saved is None:
        return
    before = dict(_leaves(saved.to_flat()))
    now = dict(_leaves(config.to_flat()))
    if now.get("precision") == "auto":  # a resume keeps the checkpoint's
        now["precision"] = before.get("precision")
    if config.source(_WARMUP).decided:  # likewise its steps
        before[_WARMUP] = now[_WARMUP]
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and counts(key.partition(".")[0]):
            yield f"{key} {before.get(key, 'unset')} -> {now.get(key, 'unset')}"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested blocks by their dotted paths."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_learning_key(key: str) -> bool:
    return key in _BATCH_KEYS or any(_is_key_of(section, key) for section in _LEARNING_SECTIONS)


def _is_key_of_run(key: str) -> bool:
    return key not in ("load", "overwrite", *FIRST_LOAD_KEYS) and not _is_key_of("runner", key)


def _is_network_key(key: str) -> bool:
    return key == "lora" or (key != "precision" and _is_key_of("model", key))


def _is_key_of(section: str, key: str) -> bool:
    return key in NeoXConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
