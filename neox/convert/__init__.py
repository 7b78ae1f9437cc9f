"""Conversion between our checkpoints and Hugging Face directories, for every family of `neox.families`."""

from neox.convert.from_hf import FromHFResult, from_hf
from neox.convert.hub import find_source, upload
from neox.convert.peft_adapters import write_peft_adapter
from neox.convert.to_hf import ToHFResult, choose_family, to_hf

__all__ = [
    "FromHFResult",
    "ToHFResult",
    "choose_family",
    "find_source",
    "from_hf",
    "to_hf",
    "upload",
    "write_peft_adapter",
]
