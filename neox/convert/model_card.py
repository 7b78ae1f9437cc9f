"""Model card (`README.md`) of an export."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.convert.exported_weights import Export
from neox.convert.verification import Verification
from neox.families import Family

_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rotary_pct",
    "use_parallel_residual",
    "tie_word_embeddings",
    "hidden_act",
)
"""Entries of `config.json` that the card shows."""
_TASKS = MappingProxyType(
    {
        "AutoModelForCausalLM": "text-generation",
        "AutoModelForPreTraining": "fill-mask",
        "AutoModelForSequenceClassification": "text-classification",
    }
)
"""transformers' class of a model -> its task on the hub."""


def model_card(
    *,
    name: str,
    family: Family,
    hf: Mapping[str, Any],
    export: Export,
    iteration: int | None,
    check: Verification | None,
) -> str:
    """Return the model card: architecture, origin and check of the weights, and how to load them.

    Args:
        name: Name of the directory.
        family: Family of the export.
        hf: Contents of `config.json`.
        export: Weights that were written.
        iteration: Training step of the checkpoint, if known.
        check: Result of the verification, if there was one.
    """
    rows = "\n".join(f"| {key} | {hf[key]} |" for key in _KEYS if key in hf)
    auto_class = family.auto_class(hf)
    task = _TASKS[auto_class]
    kind = "reward model" if task == "text-classification" else "language model"
    dtype = str(export.dtype).removeprefix("torch.")
    size = f"{export.parameters:,} parameters"
    if iteration is not None:
        size += f" after {iteration:,} training steps"
    checked = "The logits were not compared with the training code's on export."
    if check is not None:
        checked = (
            f"On export, this directory's logits in `transformers` were compared with the training code's: {check}."
        )
    return f"""---
library_name: transformers
pipeline_tag: {task}
tags:
- {family.model_type}
---

# {name}

A {family.title} {kind} of {size}, exported by `neox` from its training checkpoint:
{export.tensors} tensors, {export.total_bytes:,} bytes, {dtype}.

| | |
|---|---|
{rows}

{checked}

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""
