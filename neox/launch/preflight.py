"""What must exist before ranks are worth starting: found on the head node, named with the command that makes it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from neox.config import NeoXConfig, architecture_keys, architecture_of, architecture_settings, saved_architecture
from neox.config.wording import place, said
from neox.config.yaml_file import read_file
from neox.errors import ConfigError, install_command
from neox.launch.saved_optimizer import optimizer_problem

_CHECKPOINT_CONFIG = "configs/config.yml"  # what `neox.checkpoint.write_config` writes beside the weights


def data_prefixes(config: NeoXConfig) -> dict[str, str]:
    """Token files of a configuration: prefix -> the key that names it."""
    data = config.data
    prefixes = {data.data_path: "data_path"} if data.data_path else {}
    for key in ("train_data_paths", "valid_data_paths", "test_data_paths"):
        prefixes.update(dict.fromkeys(getattr(data, key) or (), key))
    return prefixes


def missing_data(config: NeoXConfig) -> list[str]:
    """One sentence for each `.bin/.idx` that training needs and that is not there."""
    prefixes = data_prefixes(config)
    if not prefixes:
        return [
            "no training data is given: set data_path to the prefix of a .bin/.idx pair "
            "(tools/preprocess_data.py writes them)"
        ]
    problems = []
    for prefix, key in prefixes.items():
        absent = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
        if absent:
            made = prefix.removesuffix("_document").removesuffix("_text")
            command = f"python tools/preprocess_data.py --input FILE.jsonl.zst --output-prefix {quote(made)} ..."
            problems.append(
                f"{config.source(key)}: {key} is {prefix!r}, but {' and '.join(prefix + s for s in absent)} "
                f"{'does' if len(absent) == 1 else 'do'} not exist; make them with "
                f"`{'make quickstart' if is_of_quickstart(prefix) else command}`"
            )
    return problems


def is_of_quickstart(path: str) -> bool:
    """Whether a file is one of those that `make quickstart` makes."""
    return Path(path).parts[-3:-1] == ("data", "quickstart")


def missing_packages(config: NeoXConfig) -> list[str]:
    """One sentence for each optional package that training is asked to use and that is not installed."""
    keys = config.logging
    harness = [task for task in config.generation.eval_tasks or () if "=" not in task]
    wanted = (
        (bool(keys.use_wandb), "use_wandb", "wandb", "requirements-wandb.txt"),
        (keys.tensorboard_dir is not None, "tensorboard_dir", "tensorboard", "requirements-tensorboard.txt"),
        (bool(harness), "eval_tasks", "lm_eval", "requirements-eval.txt"),
    )
    return [
        f"{place(config, key)}`{key}` needs the package {package}, which is not installed: "
        f"{install_command(file)}, or unset {key}"
        for asked, key, package, file in wanted
        if asked and find_spec(package) is None
    ]


def checkpoint_problems(config: NeoXConfig, *, training: bool) -> list[str]:
    """What can be seen of the checkpoint to load without reading weights: that it is there, and of this model.

    Training that goes on in its own `save` directory starts there too; other scripts read `save` where `load` is not
    given. Whether files are whole is for the ranks to find out.
    """
    keys = config.checkpoint
    directory, key = (keys.load, "load") if training or keys.load else (keys.save, "save")
    if directory is None:
        return [] if training else ["neither `load` nor `save` is given: --set load=DIRECTORY names a checkpoint"]
    load = Path(directory)
    own = training and keys.save is not None and load.absolute() == Path(keys.save).absolute()  # a first start, maybe
    if not load.is_dir():
        return [] if own else [f"{place(config, key)}`{key}: {directory}` is no directory: nothing to load"]
    if not own and not any(any(load.glob(sign)) for sign in ("*global_step*", "*.pt", _CHECKPOINT_CONFIG)):
        return [f"{place(config, key)}`{key}: {directory}` holds no checkpoint: no global_stepN directory"]
    chosen = load / f"global_step{keys.iteration}" if keys.iteration is not None else _newest(load)
    if keys.iteration is not None and not chosen.is_dir() and load.name != chosen.name:
        found = ", ".join(sorted(path.name for path in load.glob("global_step*"))) or "no checkpoint"
        return [f"{place(config, 'iteration')}`iteration: {keys.iteration}`: {load} has {found}"]
    if training and (problem := optimizer_problem(chosen, config)) is not None:
        return [f"{place(config, key)}{problem}"]
    try:
        saved = architecture_settings(NeoXConfig.from_flat(read_file(chosen / _CHECKPOINT_CONFIG).values))
        wanted = architecture_of(config)
    except (ConfigError, TypeError):  # another program's checkpoint: the ranks compare what it holds
        return []
    finetune = False if config.checkpoint.finetune else None  # then positions, attention and head may differ
    settings = architecture_settings(config)
    differing = [
        f"{key} is {saved[key]} there, {said(config, key, settings[key])} here"
        for difference in wanted.differences(saved_architecture(saved), finetune=finetune)
        for key in architecture_keys(difference.field)
        if saved[key] != settings[key]
    ]
    advice = "give the checkpoint's values, or another directory"
    differing = list(dict.fromkeys(differing))
    return [f"{place(config, key)}{chosen} is of another model: {'; '.join(differing)}; {advice}"] if differing else []


def _newest(load: Path) -> Path:
    """The checkpoint that `latest` names; the directory itself where it has none."""
    try:
        return load / (load / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return load
