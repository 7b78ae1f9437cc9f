"""One table of names between NeoX's layers and Hugging Face's GPT-NeoX, read both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from neox.architecture import LayerPlan

# kind of layer -> prefix of our parameter names -> Hugging Face's prefix; `{i}` is the block's number from 0.
# A prefix is followed by the same rest (`weight`, `bias`) on both sides.
NAME_TABLE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "embedding": {"word_embeddings.": "gpt_neox.embed_in."},
        "block": {
            "input_layernorm.": "gpt_neox.layers.{i}.input_layernorm.",
            "attention.query_key_value.": "gpt_neox.layers.{i}.attention.query_key_value.",
            "attention.dense.": "gpt_neox.layers.{i}.attention.dense.",
            "post_attention_layernorm.": "gpt_neox.layers.{i}.post_attention_layernorm.",
            "mlp.dense_h_to_4h.": "gpt_neox.layers.{i}.mlp.dense_h_to_4h.",
            "mlp.dense_4h_to_h.": "gpt_neox.layers.{i}.mlp.dense_4h_to_h.",
        },
        "norm": {"norm.": "gpt_neox.final_layer_norm."},
        "head": {"final_linear.": "embed_out."},
    }
)


class NamePair(NamedTuple):
    """One parameter: its layer and name here, and its key in Hugging Face's files."""

    layer: int
    name: str
    hf: str


def name_pairs(layers: LayerPlan) -> Iterator[NamePair]:
    """Every parameter of a model under both names, in the order of the layers."""
    for layer in layers.weight_layers:
        table = NAME_TABLE[layer.kind]
        for parameter in layer.parameters:
            ours = next(prefix for prefix in table if parameter.name.startswith(prefix))
            hf = table[ours].format(i=layer.index - 2) + parameter.name[len(ours) :]
            yield NamePair(layer.index, parameter.name, hf)
