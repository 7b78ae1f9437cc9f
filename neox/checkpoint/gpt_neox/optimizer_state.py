"""The optimizer's state in checkpoints of gpt-neox: their layout, and the parameters that the states belong to.

gpt-neox keeps no names. It makes its groups by walking the modules: matrices decay, biases and norms do not. With a
weight decay of zero there is one group of all. Layer files hold a stage's parameters in the order of that walk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neox.architecture import WORD_EMBEDDINGS
from neox.checkpoint.optimizer.file_formats import Key
from neox.checkpoint.weights.reader import CheckpointReader
from neox.checkpoint.weights.tensor_files import load_file
from neox.checkpoint_files.names import OptimizerFile, mp_rank_file, parse_optimizer_file
from neox.config.sections.optimizer_table import WITHOUT_SAVED_OPTIMIZER, optimizer_of_states
from neox.errors import CheckpointError

_EXCEPTIONS: Mapping[str, bool] = MappingProxyType({"mixer.A_log": False, "att.ln_x.weight": True})
"""Parameters whose decay does not follow from their shape: Mamba's decays, and RWKV's norm of heads."""

WRITER = "written by"
"""Key of a layout that is not ours."""


def gpt_neox_layout(path: Path) -> dict[str, Any]:
    """Return the layout of a gpt-neox checkpoint whose optimizer state can be loaded.

    Raises:
        CheckpointError: If it has no such state, or has it in a format that is not supported. The message gives a way
            out.
    """
    weights = CheckpointReader(path)
    files: dict[Path, OptimizerFile] = {}
    for file in sorted(path.iterdir()):
        parsed = parse_optimizer_file(file.name)
        if parsed is not None:
            files[file] = parsed
    client: Mapping[str, Any] = {}
    if (path / mp_rank_file(0)).is_file():
        client = load_file(path / mp_rank_file(0))
    settings = client.get("ds_config")
    has_state = bool(files) or client.get("optimizer") is not None
    if not has_state or not isinstance(settings, Mapping) or not weights.pp_size:
        raise CheckpointError(
            f"{path}: holds no optimizer state, or none in a supported format; {WITHOUT_SAVED_OPTIMIZER}"
        )
    zero_stage = _zero_stage(settings)
    if zero_stage == 3:
        raise CheckpointError(
            f"{path}: gpt-neox's optimizer state of ZeRO 3 is not supported; {WITHOUT_SAVED_OPTIMIZER}"
        )
    if files:
        first = next(iter(files))
        state = load_file(first)["optimizer_state_dict"]
        divided_keys(first, [state])  # refused here, before a model is built
        states = state["base_optimizer_state"]
        data_ranks = 1 + max(file.dp_rank for file in files.values())
    else:
        states = client["optimizer"]
        data_ranks = int(client.get("dp_world_size", 1))
    return {
        WRITER: "gpt-neox",
        "pp": weights.pp_size,
        "mp": weights.tp_size,
        "dp": data_ranks,
        "zero_stage": zero_stage,
        "precision": _precision(settings),
        "optimizer": _optimizer(path, states),
    }


def _zero_stage(settings: Mapping[str, Any]) -> int:
    """Return the ZeRO stage in DeepSpeed's configuration."""
    zero = settings.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return 0
    return int(zero.get("stage", 0))


def _optimizer(path: Path, state: Any) -> str:
    """Return the name of the optimizer that has a state dict's states. Raises CheckpointError for an unknown one."""
    names: set[str] = set()
    if isinstance(state, Mapping):
        for value in state.get("state", {}).values():
            if isinstance(value, Mapping):
                names.update(value)
    found = optimizer_of_states(names)
    if found is None:
        raise CheckpointError(
            f"{path}: holds the state of an optimizer that is not known here ({', '.join(sorted(names))}); "
            f"{WITHOUT_SAVED_OPTIMIZER}"
        )
    return found


def _precision(settings: Mapping[str, Any]) -> str:
    """Return the precision in DeepSpeed's configuration."""
    fp16 = settings.get("fp16") or {}
    bf16 = settings.get("bf16") or settings.get("bfloat16") or {}
    if bf16.get("enabled") or fp16.get("type") == "bfloat16":
        return "bf16"
    if fp16.get("enabled") or fp16.get("fp16"):
        return "fp16"
    return "fp32"


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
    stored = [Key(index, name) for index, name in weights.items()]
    is_tied = not any(key.name == "final_linear.weight" for key in stored)
    here: list[Key] = []
    if is_tied and len(counts) > 1 and stage == len(counts) - 1:
        # The embedding's copy, which gpt-neox registers before the layers. No layer file holds it again.
        here.append(Key(0, WORD_EMBEDDINGS))
    first = sum(map(sum, counts[:stage]))
    here += stored[first : first + sum(counts[stage]) - len(here)]
    groups = [here]
    if len(counts[stage]) > 1:
        groups = _by_decay(here, weights)
    sizes = list(map(len, groups))
    if sizes != list(counts[stage]):
        raise CheckpointError(
            f"{path}: stage {stage} has optimizer groups of {list(counts[stage])} parameters, its layers would give "
            f"{sizes}; {WITHOUT_SAVED_OPTIMIZER}"
        )
    order: list[Key] = []
    for group in groups:
        order += group
    return order


def _by_decay(keys: Sequence[Key], weights: CheckpointReader) -> list[list[Key]]:
    """Return the two groups of an optimizer with weight decay: matrices, then vectors, but for `_EXCEPTIONS`."""
    decayed: list[Key] = []
    others: list[Key] = []
    for key in keys:
        decays = _EXCEPTIONS.get(key.name, weights.parts(*key)[0].dim() > 1)
        group = decayed if decays else others
        group.append(key)
    return [decayed, others]


def group_counts(path: Path, pp: int, tp: int) -> list[list[int]]:
    """Return the sizes of every stage's optimizer groups, from the client state files. Raises CheckpointError."""
    counts = []
    for stage in range(pp):
        groups = _whole_state(path / mp_rank_file(stage * tp))["param_groups"]
        counts.append([len(group["params"]) for group in groups])
    return counts


def divided_keys(file: Path, states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parameters' names in ZeRO files of one model rank, each once.

    Raises:
        CheckpointError: For the formats of DeepSpeed before 0.7.
    """
    names: dict[str, None] = {}
    for state in states:
        if "param_slice_mappings" not in state or not isinstance(state.get("base_optimizer_state"), Mapping):
            raise CheckpointError(
                f"{file}: a format of optimizer state that does not name parameters (DeepSpeed before 0.7, "
                f"GPT-NeoX-20B's full weights among them, or its elastic checkpoints); {WITHOUT_SAVED_OPTIMIZER}"
            )
        for fragments in state["param_slice_mappings"]:
            names.update(dict.fromkeys(fragments))
    return list(names)


def _whole_state(file: Path) -> Mapping[str, Any]:
    """Return torch's state dict in an `mp_rank` file. Raises CheckpointError for another format."""
    state = load_file(file).get("optimizer")
    if isinstance(state, Mapping) and "param_groups" in state:
        return state
    form = "fp16's flat groups without ZeRO" if isinstance(state, Mapping) else "none"
    raise CheckpointError(
        f"{file}: a format of optimizer state that is not supported ({form}); {WITHOUT_SAVED_OPTIMIZER}"
    )
