"""Checks by the launcher of the checkpoint that a run loads, without reading weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from neox.architecture import NetworkFields
from neox.checkpoint_files.contents import pickle_mentions
from neox.checkpoint_files.finding import (
    Search,
    contains_checkpoints,
    names_of_checkpoints,
    newest_checkpoint,
    search_checkpoint,
)
from neox.config import NeoXConfig
from neox.config.sections.optimizer_table import WITHOUT_SAVED_OPTIMIZER, goes_on, other_optimizer
from neox.errors import ConfigError
from neox.plan import RunPlan, architecture_settings, setting_differences
from neox.plan.run_identity import saved_config
from neox.plan.run_start import StartMode, requested_start
from neox.problems import Missing, Problem
from neox.storage import is_remote

_UNIVERSAL = "_universal"


def checkpoint_problems(config: NeoXConfig, *, training: bool, damaged: Collection[Path] = ()) -> list[Problem]:
    """Return what is wrong with the checkpoint to load, as far as it shows without reading weights.

    A training whose `load` and `save` are the same directory starts there if it holds no checkpoint yet. Other scripts
    read `save` if `load` is not given. The ranks check later whether the files are complete.

    Args:
        config: The configuration.
        training: Whether the model is trained, not only run.
        damaged: Checkpoints that earlier starts have found damaged.
    """
    keys = config.checkpoint
    key = key_of_checkpoint(config, training=training)
    if config.value(key) is None and not training:
        message = "neither `load` nor `save` is given: --set load=DIRECTORY names a checkpoint"
        return [Missing(("load", "save"), message)]
    load = _local_directory(config, key)
    if load is None:
        return []
    may_be_first_start = training and _saves_to(config, load)
    if not load.is_dir():
        if may_be_first_start:
            return []
        problem = config.problem(key, "is no directory: nothing to load")
        return [problem] if load.exists() else [*Missing.of([problem])]
    search = search_checkpoint(load, keys.iteration, without=damaged)
    chosen = search.found
    if chosen is None:
        if keys.iteration is not None and not search.candidates and contains_checkpoints(load):
            names = names_of_checkpoints(load) or load.resolve().name
            return [config.problem("iteration", f"is not in {load}, which has {names}", key)]
        if search.candidates and training:  # `choose_checkpoint` says it
            return []
        if search.candidates:
            return [_incomplete_problem(config, key, search)]
        if may_be_first_start:
            return []
        return [config.problem(key, f"holds no checkpoint: {_kind_of_files(load)}")]
    return [
        *_averages_problems(config, chosen, training=training),
        *_contents_problems(config, key, chosen, training=training),
    ]


def layer_problems(
    plan: RunPlan, *, training: bool, damaged: Collection[Path] = (), knows_vocabulary: bool = True
) -> list[Problem]:
    """Return why the network cannot be filled from the layer files of the checkpoint to load.

    Names and shapes of all tensors are compared, and no weight is read.

    Args:
        plan: The plan.
        training: Whether the model is trained, not only run.
        damaged: Checkpoints that earlier starts have found damaged.
        knows_vocabulary: Whether the vocabulary of the plan is that of a tokenizer, and not an assumed one.
    """
    config = plan.config
    key = key_of_checkpoint(config, training=training)
    load = _local_directory(config, key)
    if load is None or not load.is_dir():
        return []
    keys = config.checkpoint
    search = search_checkpoint(load, keys.iteration, without=damaged)
    checkpoint = search.found
    if checkpoint is None and search.candidates:
        return [_incomplete_problem(config, key, search)]
    if checkpoint is None:
        return []
    if not any(checkpoint.glob("layer_*.pt")) and not any(checkpoint.glob("mp_rank_*.pt")):
        return []
    from neox.checkpoint import why_unfit  # torch, which a plan without a checkpoint does not need

    finetune = training and requested_start(config).mode is StartMode.FINETUNE
    unfit = why_unfit(checkpoint, plan, training=training, finetune=finetune, knows_vocabulary=knows_vocabulary)
    return [config.problem_about(reason, key) for reason in unfit]


def _incomplete_problem(config: NeoXConfig, key: str, search: Search) -> Problem:
    """Return the problem that a directory contains checkpoints, and none is complete."""
    reasons = []
    for path, why in search.incomplete.items():
        reasons.append(f"{path.name}: {'; '.join(why)}")
    return config.problem(key, f"has no complete checkpoint: {'; '.join(reasons)}", "iteration")


def key_of_checkpoint(config: NeoXConfig, *, training: bool) -> str:
    """Return the key that names the directory to load from."""
    if training or config.checkpoint.load:
        return "load"
    return "save"


def _local_directory(config: NeoXConfig, key: str) -> Path | None:
    """Return the directory that a key names, if one is given on this machine. A dry run fetches nothing."""
    directory = config.value(key)
    if directory is None or is_remote(directory):
        return None
    return Path(directory)


def _averages_problems(config: NeoXConfig, checkpoint: Path, *, training: bool) -> list[Problem]:
    """Return why the average of a checkpoint's weights cannot be loaded."""
    if config.checkpoint.load_weights != "ema":
        return []
    if training and requested_start(config).mode is not StartMode.FINETUNE:
        rule = "does not resume a training, whose optimizer has the trained weights; set finetune, or remove it"
        return [config.problem("load_weights", rule, "finetune")]
    if not any(checkpoint.glob("averaged_dp_*")):
        rule = f"asks for the average of the weights, and {checkpoint} has none: its run had no ema_decay"
        return [config.problem("load_weights", rule, "load")]
    return []


def finetune_notes(config: NeoXConfig) -> list[str]:
    """Return the settings of the network in which fine-tuning differs from its checkpoint, of those that may differ."""
    asked = requested_start(config)
    if asked.mode is not StartMode.FINETUNE or asked.load is None:
        return []
    chosen = newest_checkpoint(asked.load, asked.iteration)
    if chosen is None:
        return []
    differing = _differences(saved_config(chosen), config, NetworkFields.ADJUSTABLE)
    return [f"finetune: {difference} ({chosen})" for difference in differing.values()]


def _saves_to(config: NeoXConfig, load: Path) -> bool:
    save = config.checkpoint.save
    return save is not None and load.absolute() == Path(save).absolute()


def _kind_of_files(directory: Path) -> str:
    """Return what a directory without a checkpoint holds, and what to do with it."""
    if (directory / "config.json").is_file():
        convert = f"python tools/convert_from_hf.py --input_dir {directory} --output_dir NEW"
        return f"it is a Hugging Face directory; `{convert}` makes a checkpoint of it"
    if any(directory.glob("pytorch_model*.bin")):
        return (
            "it has no global_stepN directory, and pytorch_model.bin (as zero_to_fp32.py writes it) does not describe "
            "its layers; give the directory of the run that it was made from"
        )
    if any(directory.glob(f"*{_UNIVERSAL}")):
        return "it has only DeepSpeed's universal form; give the global_stepN directory that it was made from"
    if any(directory.glob("iter_*")) or (directory / "latest_checkpointed_iteration.txt").is_file():
        return "it is Megatron-LM's; convert it to Hugging Face's format there, then with tools/convert_from_hf.py"
    return "no global_stepN directory"


def _contents_problems(config: NeoXConfig, key: str, checkpoint: Path, *, training: bool) -> list[Problem]:
    """Return the problem that a checkpoint is of another optimizer or another model."""
    saved = saved_config(checkpoint)
    if training:
        problem = _optimizer_problem(checkpoint, saved, config)
        if problem is not None:
            return [config.problem_about(problem, key, "optimizer.type")]
    finetunes = training and requested_start(config).mode is StartMode.FINETUNE
    among = NetworkFields.FIXED if finetunes else NetworkFields.ALL
    differing = _differences(saved, config, among)
    if not differing:
        return []
    advice = "give the checkpoint's values, or another directory"
    message = f"{checkpoint} is of another model: {'; '.join(differing.values())}; {advice}"
    return [config.problem_about(message, key, *differing)]


def _differences(saved: NeoXConfig | None, config: NeoXConfig, among: NetworkFields) -> dict[str, str]:
    """Return the settings of the network in which a checkpoint of this program differs, with both values as text.

    Args:
        saved: The checkpoint's configuration; None for a checkpoint of another program, whose tensors the ranks
            compare.
        config: The configuration that loads it.
        among: The fields of the network whose settings are compared.
    """
    if saved is None:
        return {}
    try:
        found = setting_differences(architecture_settings(saved), config, among)
    except (ConfigError, TypeError):
        return {}
    differing = {}
    for key, (there, _) in found.items():
        differing[key] = f"{key} is {there} there, {config.describe_setting(key)} here"
    return differing


def _optimizer_problem(checkpoint: Path, saved: NeoXConfig | None, config: NeoXConfig) -> str | None:
    """Return why training cannot resume from the optimizer state of a checkpoint, and the ways out; None if it can.

    The names of files and the words in their pickles decide. Without files of its own (ZeRO), the state is in the
    client files in torch's form, which has `param_groups`.
    """
    if requested_start(config).mode is not StartMode.RESUME:
        return None
    if not any(checkpoint.glob("layer_*.pt")):  # an unknown layout: the ranks look closer
        return None
    zero_files = sorted(checkpoint.glob("*zero_pp_rank_*_optim_states.pt"))
    if zero_files:
        has_places = (checkpoint / "manifest.json").is_file() or pickle_mentions(zero_files[0], b"param_slice_mappings")
        if not has_places:
            return (
                f"{checkpoint} holds an optimizer state that does not say where parameters lie, as DeepSpeed before "
                f"0.7 wrote it (GPT-NeoX-20B's full weights are of that kind); {WITHOUT_SAVED_OPTIMIZER}"
            )
    elif not any(pickle_mentions(file, b"param_groups") for file in checkpoint.glob("mp_rank_*.pt")):
        return f"{checkpoint} holds no optimizer state to resume from; {WITHOUT_SAVED_OPTIMIZER}"
    if saved is None:
        return None
    there = saved.optimizer.optimizer.name
    here = config.optimizer.optimizer.name
    if goes_on(there, here):
        return None
    return other_optimizer(checkpoint, there, here)
