"""The layer plan of a checkpoint whose config is not at hand, from its files' names and shapes."""

from __future__ import annotations

from typing import Literal

from neox.checkpoint.reader import CheckpointReader
from neox.config import LayerPlan, build_layer_plan
from neox.errors import CheckpointError


def infer_layer_plan(reader: CheckpointReader, *, gpt_j_residual: bool | None = None) -> LayerPlan:
    """Build the layer plan of what a reader (without a plan) found.

    gpt_j_residual: whether row-parallel biases of several tensor ranks are summed; None takes what the checkpoint
    stores about itself, and raises CheckpointError where that matters and is not stored.
    """
    indices = set(reader.indices)
    if 0 not in indices or 2 not in indices:
        raise CheckpointError(f"{reader.path}: has no embedding (layer 0) or no first block (layer 2)")
    blocks = next(i for i in range(2, max(indices) + 2) if i not in indices) - 2
    embedding = reader.shape(0, "word_embeddings.weight")
    head = blocks + 4
    untied = head in indices and "final_linear.weight" in reader.names(head)
    if gpt_j_residual is None:
        gpt_j_residual = reader.args.get("gpt_j_residual")
    if gpt_j_residual is None:
        if reader.tp_size > 1:
            raise CheckpointError(
                f"{reader.path}: {reader.tp_size} tensor ranks, and nothing tells whether their row-parallel biases "
                "are summed (gpt_j_residual); give the run's config"
            )
        gpt_j_residual = False  # one rank: the same values either way
    parallelism: Literal["row", "column"] = "column"
    if untied and reader.spec(head, "final_linear.weight").partition_dim == 1:
        parallelism = "row"
    return build_layer_plan(
        num_layers=blocks,
        hidden_size=embedding[1],
        num_attention_heads=int(reader.args.get("num_attention_heads", 1)),
        padded_vocab_size=embedding[0],
        gpt_j_residual=gpt_j_residual,
        no_weight_tying=untied,
        output_layer_parallelism=parallelism,
    )
