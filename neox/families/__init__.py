"""Hugging Face architectures as data: configuration, tensor names and layouts, and what they cannot express.

A family is one module and one entry in `FAMILIES`; `neox.convert` reads and writes its files. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from neox.families.bert import BERT, MEGATRON_BERT
from neox.families.config_json import check_types
from neox.families.family import Family, ModelSettings, TensorMapping, TensorSource
from neox.families.gpt2 import GPT2
from neox.families.gpt_neox import GPT_NEOX
from neox.families.gptj import GPTJ
from neox.families.llama import LLAMA
from neox.families.mistral import MISTRAL
from neox.families.olmo2 import OLMO2
from neox.families.qwen import QWEN2, QWEN3

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (GPT_NEOX, GPT2, GPTJ, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, BERT, MEGATRON_BERT)
    }
)
"""`model_type` of `config.json` -> family, in order of preference."""

__all__ = ["FAMILIES", "Family", "ModelSettings", "TensorMapping", "TensorSource", "check_types"]
