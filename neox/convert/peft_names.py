"""Names in the files of the package `peft`: its two files, and the modules that have adapters.

Both sides compute y = W x + scale B A x. One linear layer of ours may be several modules there: queries, keys and
values, or the two products of a gated MLP. Then all of them have our A, and each has its rows of our B:

    ours                      theirs
    A [r, inputs]             A [r, inputs] of each module
    B [outputs, r]            B [outputs of this module, r]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from neox.architecture import LayerPlan
from neox.families import Family, TensorMapping, TensorSource

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Beginning of the names of all modules."""


def adaptable_weights(layers: LayerPlan, family: Family) -> Iterator[TensorMapping]:
    """Yield the weights of blocks that can have adapters."""
    for mapping in family.mappings(layers):
        layer = layers[mapping.layer]
        if layer.kind != "block":
            continue
        spec = next(spec for spec in layer.parameters if spec.name == mapping.name)
        if spec.is_matrix and not spec.experts:
            yield mapping


def target_of(mapping: TensorMapping) -> str:
    """Return the name of a linear layer among the targets of `lora`."""
    return mapping.name.removesuffix(".weight").rpartition(".")[2]


def modules_of(mapping: TensorMapping) -> list[str]:
    """Return the Hugging Face modules of a parameter."""
    return [key.rpartition(".")[0] for key in mapping.keys]


def layout_of_b(source: TensorSource) -> TensorSource:
    """Return the layout of B, whose rows are those of the weight. Like A, it is never stored transposed."""
    return replace(source, transpose=False)


def tensor_key(module: str, part: str) -> str:
    """Return peft's key of A or B of a module."""
    return f"{PREFIX}{module}.lora_{part}.weight"
