"""Order of the rows of fused queries, keys and values with grouped heads in gpt-neox's files.

With fewer key heads than query heads, one tensor rank's rows of `attention.query_key_value` stand in one of two orders:

    blocks   q q q q q q q q | k k k k | v v v v               here, and gpt-neox since pull request 1315
    heads    q q q q k k v v | q q q q k k v v                 gpt-neox before

In the older one, each query head is followed by its share of the key rows and of the value rows. The picture has N = 2
query heads of D = 4 rows and K = 1 key head, so that the share is D K / N = 2 rows. Nothing in gpt-neox's files names
the order. With as many key heads as query heads, it never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from neox.architecture import Architecture
from neox.config.keys import NEOX_KEYS
from neox.config.yaml_file import read_file
from neox.errors import CheckpointError, ConfigError

RowOrder = Literal["blocks", "heads"]

FUSED = "attention.query_key_value."
"""Beginning of the names of fused queries, keys and values."""

_TRAINING_CHANGED = date(2024, 11, 14)  # pull request 1315
_CONVERTER_CHANGED = date(2025, 5, 9)  # pull request 1345: what convert_hf_llama_to_neox.py writes

_NAMES_OF_HEADS = ("mlp.w1.", "mlp.dense_h_to_4h.", "attention.rotary_emb.inv_freq")
"""Names until pull request 1212 (2024-09-07). Its converter of Llama's own weights still writes `mlp.w1`, and this
order."""

_OLDER_KEYS = frozenset({"mlp_type"})  # without effect since pull request 1212, removed by 1276 (2024-09-10)
_LATER_KEYS = frozenset(key for key, row in NEOX_KEYS.items() if row.added and row.added > _TRAINING_CHANGED)
_LATER_DEEPSPEED = (0, 16)  # released on 2024-11-25


class KnownOrder(NamedTuple):
    """How a checkpoint's fused rows are ordered, and how this is known."""

    order: RowOrder
    reason: str


def known_order(
    path: Path,
    architecture: Architecture,
    stored_names: Iterable[str],
    state: Mapping[str, Any],
    declared: date | None,
) -> KnownOrder:
    """Return the order of the fused rows of grouped heads in a checkpoint of gpt-neox.

    Args:
        path: The checkpoint.
        architecture: The network that reads.
        stored_names: Names of a block's tensors as they are in its file.
        state: Content of model rank 0's `mp_rank` file, with DeepSpeed's entries.
        declared: Date of the gpt-neox that wrote the files, as the user gives it; None if it is not given.

    Raises:
        CheckpointError: If nothing tells the order.
    """
    names = tuple(stored_names)
    if declared is not None:
        changed = _CONVERTER_CHANGED if _is_converted(state) else _TRAINING_CHANGED
        return KnownOrder("heads" if declared < changed else "blocks", f"gpt_neox_version is {declared}")
    surest = next(_signs_in_files(path, names, state), None)
    if surest is None:
        raise CheckpointError(_question(path, architecture))
    return surest


def _signs_in_files(path: Path, names: tuple[str, ...], state: Mapping[str, Any]) -> Iterator[KnownOrder]:
    """Yield the signs by which the files of a checkpoint tell the age of its gpt-neox, the surest one first."""
    for name in names:
        if name.startswith(_NAMES_OF_HEADS):
            yield KnownOrder("heads", f"its name {name} is older than the change")
    keys = _saved_keys(path)
    for key in sorted(keys & _OLDER_KEYS):
        yield KnownOrder("heads", f"its configuration has {key}, which is older than the change")
    for key in sorted(keys & _LATER_KEYS):
        yield KnownOrder("blocks", f"its configuration has {key}, which is younger than the change")
    version = str(state.get("ds_version", ""))
    major_and_minor = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if major_and_minor >= _LATER_DEEPSPEED:
        yield KnownOrder("blocks", f"it was written with DeepSpeed {version}, which is younger than the change")


def _is_converted(state: Mapping[str, Any]) -> bool:
    """Return whether gpt-neox's converters of Llama wrote a client state: it has made-up counters and no arguments."""
    return "args" not in state and state.get("skipped_steps") == state.get("global_steps") == 1


def _saved_keys(path: Path) -> set[str]:
    """Return the keys of the configurations that gpt-neox stores in a checkpoint."""
    keys: set[str] = set()
    for file in sorted(path.glob("configs/*")):
        try:
            keys.update(key.replace("-", "_") for key in read_file(file).values)
        except ConfigError:
            continue  # not a configuration
    return keys


def _question(path: Path, architecture: Architecture) -> str:
    """Return the message that asks for the date of the gpt-neox that wrote a checkpoint."""
    return (
        f"{path}: the rows of {FUSED}* are of {architecture.num_attention_heads} query heads and "
        f"{architecture.num_kv_heads} key heads, and no file says in which order. gpt-neox before "
        f"{_TRAINING_CHANGED} (its pull request 1315) wrote the queries, keys and values of each head next to each "
        "other; since then it writes all queries, then all keys, then all values. Give the date of the gpt-neox that "
        f"wrote the checkpoint: `gpt_neox_version: 2024-11-13` or earlier for the former, `gpt_neox_version: "
        f"{_TRAINING_CHANGED}` or later for the latter (gpt-neox's convert_hf_llama_to_neox.py changed on "
        f"{_CONVERTER_CHANGED}). A wrong date gives a model that computes nonsense"
    )


def to_blocks(rows: Tensor, order: RowOrder, architecture: Architecture) -> Tensor:
    """Return one tensor rank's fused rows as blocks of queries, keys and values.

    Args:
        rows: Rows of a weight or bias, or the optimizer's states of them [(N + 2 K) D / ranks, ...].
        order: Their order.
        architecture: The network. Rows of another one are returned as they are: their shape is refused later.
    """
    if order == "blocks":
        return rows
    dim = architecture.head_dim
    heads = architecture.num_attention_heads
    kv_heads = architecture.num_kv_heads
    ranks, rest = divmod((heads + 2 * kv_heads) * dim, rows.shape[0])
    if rest or kv_heads % ranks:
        return rows
    share = dim * kv_heads // heads  # key rows of one query head
    by_head = rows.unflatten(0, (heads // ranks, dim + 2 * share))  # [query heads here, rows of one, ...]
    queries, keys, values = by_head.split((dim, share, share), dim=1)
    return torch.cat([queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)])
