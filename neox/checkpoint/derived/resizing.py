"""New rows of the vocabulary's tensors for tokens that a tokenizer has gained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from neox.architecture import VOCABULARY, ParameterSpec, build_layer_plan
from neox.checkpoint.derived.rewriting import identity_of, rewrite
from neox.checkpoint.identity import ARGS, MODEL
from neox.checkpoint.weights.reader import CheckpointReader
from neox.checkpoint.weights.shards import fit_vocabulary
from neox.checkpoint.weights.tensor_files import load_file
from neox.errors import CheckpointError
from neox.tokenizer import TokenizerIdentity

NewRows = Callable[[str, Tensor], Tensor]
"""(name of a parameter, its rows of old tokens in fp32 [V, ...]) -> rows of new tokens [N, ...]."""


class VocabularySize(NamedTuple):
    """Numbers of ids before and after a change, and rows of the result.

    Attributes:
        before: Ids of the checkpoint.
        after: Ids of the tokenizer.
        padded: Rows of the result, padding included.
    """

    before: int
    after: int
    padded: int


def mean_of_all(number: int) -> NewRows:
    """Return new rows that all are the mean of the old ones."""

    def rows(_: str, old: Tensor) -> Tensor:
        return old.mean(0, keepdim=True).expand(number, *old.shape[1:])

    return rows


def mean_of_pieces(pieces: Sequence[Sequence[int]]) -> NewRows:
    """Return new rows that each are the mean of some old ones: of the ids that stood for the token's text before."""

    def rows(_: str, old: Tensor) -> Tensor:
        return torch.stack([old[list(ids)].mean(0) for ids in pieces])

    return rows


def rows_of_file(path: Path, number: int) -> NewRows:
    """Return new rows that a file of `torch.save` holds by the names of parameters, such as `word_embeddings.weight`.

    Raises:
        CheckpointError: If the file holds no dictionary; later, if it lacks a parameter or has another shape.
    """
    given = load_file(path)
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{path}: holds no dictionary of tensors by parameter name")

    def rows(name: str, old: Tensor) -> Tensor:
        found = given.get(name)
        shape = (number, *old.shape[1:])
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            there = "nothing" if not isinstance(found, Tensor) else f"shape {list(found.shape)}"
            raise CheckpointError(f"{path}: {name} should have shape {list(shape)}; the file has {there}")
        return found.float()

    return rows


def resize_vocabulary(
    reader: CheckpointReader,
    save: Path,
    size: VocabularySize,
    new_rows: NewRows,
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer: TokenizerIdentity | None = None,
) -> Path:
    """Write a checkpoint with rows for new tokens as `save/global_stepN`, and commit it.

    Rows of old tokens stay as they are, bit for bit. Rows that pad the vocabulary are made as in a run with another
    padding. The result has the degrees of the original, and no optimizer state and no random states.

    Args:
        reader: The original, opened with its layers.
        save: Directory of checkpoints to write into.
        size: Size of the vocabulary.
        new_rows: Rows of new tokens.
        config: Keys of the run, which are stored next to the weights; None to store none.
        tokenizer: Identity of the tokenizer with the new tokens; None if unknown.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: If the original has no new tokens to get or is damaged, or the disk refuses.
    """
    old_layers = reader.layers
    assert old_layers is not None
    if size.after <= size.before:
        raise CheckpointError(
            f"{reader.path} has rows for {size.before} tokens, and the tokenizer has {size.after}: none is new"
        )
    parallelism: Literal["row", "column"] = "column"
    for spec in old_layers.parameters:
        if spec.name == "final_linear.weight" and spec.partition_dim == 1:
            parallelism = "row"
    layers = build_layer_plan(old_layers.architecture, size.padded, head_parallelism=parallelism)

    def value(index: int, spec: ParameterSpec) -> Tensor:
        full = reader.full(index, spec.name)
        if spec.name not in VOCABULARY:
            return full
        used = full[: size.before]
        grown = torch.cat([used, new_rows(spec.name, used.float()).to(full.dtype), full[size.after :]])
        return fit_vocabulary(spec, grown, size.after)

    tp_size = reader.tp_size
    pp_size = reader.pp_size or 1
    identity = identity_of(reader, tp_size, pp_size)
    identity[ARGS]["padded_vocab_size"] = size.padded
    identity.setdefault(MODEL, {})["vocab_size"] = size.after
    return rewrite(
        reader,
        save,
        layers,
        value,
        identity=identity,
        tp_size=tp_size,
        pp_size=pp_size,
        config=config,
        tokenizer=tokenizer,
    )
