"""The layer plan of a checkpoint whose config is not at hand, from its files' names and shapes."""

from __future__ import annotations

from typing import Literal

from neox.architecture import BLOCK_OFFSET, Architecture, LayerPlan, build_layer_plan
from neox.checkpoint.reader import CheckpointReader
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
    hidden = embedding[1]
    architecture = Architecture(
        num_layers=blocks,
        hidden_size=hidden,
        num_attention_heads=int(reader.args.get("num_attention_heads", 1)),
        mlp_width=reader.shape(BLOCK_OFFSET, "mlp.dense_4h_to_h.weight")[1],
        activation="gelu",  # what has no parameters leaves no trace in the files: any value serves here
        norm="layernorm",
        norm_epsilon=1e-5,
        positions="none",
        rotary_ndims=0,
        rotary_base=0.0,
        max_positions=0,
        attention=("global",) * blocks,
        parallel_residual=gpt_j_residual,
        tie_word_embeddings=not untied,
    )
    return build_layer_plan(architecture, embedding[0], head_parallelism=parallelism)
