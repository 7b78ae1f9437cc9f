"""The optimizer's state in checkpoints of gpt-neox: their layout, and the parameters that the states belong to.

gpt-neox keeps no names. It makes its groups by walking the modules: matrices decay, biases and norms do not, and with a
weight decay of zero there is one group of all. Layer files hold a stage's parameters in the order of that walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from neox.checkpoint.names import mp_rank_file, parse_optimizer_file
from neox.checkpoint.optimizer_formats import Key
from neox.checkpoint.reader import CheckpointReader
from neox.checkpoint.tensor_files import load_file
from neox.config.sections.optimizer_table import WITHOUT_SAVED_OPTIMIZER, optimizer_of_states
from neox.errors import CheckpointError

WRITER = "written by"


def gpt_neox_layout(path: Path) -> dict[str, Any]:
    """Return the layout of a gpt-neox checkpoint whose optimizer state can be loaded.

    Raises:
        CheckpointError: If it has no such state, or in a format that is not supported; the message says what to do.
    """
    weights = CheckpointReader(path)
    files = {entry: parsed for entry in path.iterdir() if (parsed := parse_optimizer_file(entry.name)) is not None}
    first = path / mp_rank_file(0)
    client: Mapping[str, Any] = load_file(first) if first.is_file() else {}
    settings = client.get("ds_config")
    if not isinstance(settings, Mapping) or not weights.pp_size or (not files and client.get("optimizer") is None):
        raise CheckpointError(
            f"{path}: holds no optimizer state, or none in a supported format; {WITHOUT_SAVED_OPTIMIZER}"
        )
    zero = settings.get("zero_optimization") or {}
    stage = int(zero.get("stage", 0)) if isinstance(zero, Mapping) else 0
    if stage == 3:
        raise CheckpointError(
            f"{path}: gpt-neox's optimizer state of ZeRO 3 is not supported; {WITHOUT_SAVED_OPTIMIZER}"
        )
    for file in sorted(files)[:1]:  # refused here, before a model is built
        divided_keys(file, [load_file(file)["optimizer_state_dict"]])
    return {
        WRITER: "gpt-neox",
        "pp": weights.pp_size,
        "mp": weights.tp_size,
        "dp": 1 + max((file.dp_rank for file in files.values()), default=int(client.get("dp_world_size", 1)) - 1),
        "zero_stage": stage,
        "precision": _precision(settings),
        "optimizer": _optimizer(path, client.get("optimizer"), sorted(files)),
    }


def _optimizer(path: Path, whole: Any, files: Sequence[Path]) -> str:
    """Return the optimizer by the names of its states. Raises CheckpointError for an unknown one."""
    state = load_file(files[0])["optimizer_state_dict"]["base_optimizer_state"] if files else whole
    states = state.get("state", {}) if isinstance(state, Mapping) else {}
    names = {name for value in states.values() if isinstance(value, Mapping) for name in value}
    found = optimizer_of_states(names)
    if found is None:
        raise CheckpointError(
            f"{path}: holds the state of an optimizer that is not known here ({', '.join(sorted(names))}); "
            f"{WITHOUT_SAVED_OPTIMIZER}"
        )
    return found


def _precision(settings: Mapping[str, Any]) -> str:
    fp16, bf16 = settings.get("fp16") or {}, settings.get("bf16") or settings.get("bfloat16") or {}
    if bf16.get("enabled") or fp16.get("type") == "bfloat16":
        return "bf16"
    return "fp16" if fp16.get("enabled") or fp16.get("fp16") else "fp32"


def stage_order(path: Path, stage: int, counts: Sequence[Sequence[int]], weights: CheckpointReader) -> list[Key]:
    """Return the parameters of one stage's optimizer, in its order.

    Args:
        path: The checkpoint.
        stage: The pipeline stage.
        counts: Number of parameters in each optimizer group of every stage, from which the stages' layers follow.
        weights: Reader of the checkpoint's weights.

    Raises:
        CheckpointError: If the numbers do not fit the layers.
    """
    keys = [Key(index, name) for index, name in weights.items()]
    tied = not any(key.name == "final_linear.weight" for key in keys)
    pp, position = len(counts), 0
    for number, groups in enumerate(counts):
        here: list[Key] = []
        if tied and pp > 1 and number == pp - 1:  # the embedding's copy, which gpt-neox registers before the layers
            here.append(Key(0, "word_embeddings.weight"))
        taken = sum(groups) - len(here)
        here += keys[position : position + taken]
        position += taken
        ordered = list(_by_group(here, weights)) if len(groups) > 1 else [here]
        if [len(group) for group in ordered] != list(groups):
            raise CheckpointError(
                f"{path}: stage {number} has optimizer groups of {list(groups)} parameters, its layers would give "
                f"{[len(group) for group in ordered]}; {WITHOUT_SAVED_OPTIMIZER}"
            )
        if number == stage:
            return [key for group in ordered for key in group]
    raise CheckpointError(f"{path}: has no stage {stage}")


def group_counts(path: Path, pp: int, mp: int) -> list[list[int]]:
    """Return the sizes of every stage's optimizer groups, from the client state files. Raises CheckpointError."""
    return [
        [len(group["params"]) for group in _whole_state(path / mp_rank_file(stage * mp))["param_groups"]]
        for stage in range(pp)
    ]


def divided_keys(file: Path, states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parameters' names in ZeRO files of one model rank.

    Raises:
        CheckpointError: For the formats of DeepSpeed before 0.7.
    """
    for state in states:
        if "param_slice_mappings" not in state or not isinstance(state.get("base_optimizer_state"), Mapping):
            raise CheckpointError(
                f"{file}: a format of optimizer state that does not name parameters (DeepSpeed before 0.7, "
                f"GPT-NeoX-20B's full weights among them, or its elastic checkpoints); {WITHOUT_SAVED_OPTIMIZER}"
            )
    names = [name for state in states for fragments in state["param_slice_mappings"] for name in fragments]
    return list(dict.fromkeys(names))


def _whole_state(file: Path) -> Mapping[str, Any]:
    state = load_file(file).get("optimizer")
    if not isinstance(state, Mapping) or "param_groups" not in state:
        form = "fp16's flat groups without ZeRO" if isinstance(state, Mapping) else "none"
        raise CheckpointError(
            f"{file}: a format of optimizer state that is not supported ({form}); {WITHOUT_SAVED_OPTIMIZER}"
        )
    return state


def _by_group(keys: Sequence[Key], weights: CheckpointReader) -> Iterator[list[Key]]:
    """Yield the matrices, then the vectors."""
    for wanted in (True, False):
        yield [key for key in keys if (len(weights.parts(*key)[0].shape) > 1) is wanted]
