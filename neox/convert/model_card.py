"""The model card (`README.md`) of an export."""

from __future__ import annotations

from typing import Any

from neox.convert.verifying import Verification
from neox.convert.weights_out import Export


def model_card(
    *, name: str, hf: dict[str, Any], export: Export, iteration: int | None, parameters: int, check: Verification | None
) -> str:
    """Text of the card: the architecture, where the weights come from, how they were checked, how to load them."""
    rows = "\n".join(f"| {key} | {hf[key]} |" for key in _SHOWN)
    trained = "" if iteration is None else f" after {iteration:,} training steps"
    checked = (
        f"On export, this directory's logits in `transformers` were compared with the training code's: {check}."
        if check is not None
        else "The logits were not compared with the training code's on export."
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt_neox
---

# {name}

A GPT-NeoX language model of {parameters:,} parameters{trained}, exported by `neox` from its training checkpoint:
{export.tensors} tensors, {export.total_bytes:,} bytes, {str(export.dtype).removeprefix("torch.")}.

| | |
|---|---|
{rows}

{checked}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


_SHOWN = (
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
