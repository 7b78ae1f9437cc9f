"""The same weights under Hugging Face's names: `to_hf`, `from_hf`, and one table of names read both ways."""

from neox.convert.expressible import inexpressible, refuse_inexpressible
from neox.convert.flat_keys import read_flat
from neox.convert.from_hf import FromHFResult, from_hf
from neox.convert.name_table import NAME_TABLE, name_pairs
from neox.convert.to_hf import ToHFResult, to_hf
from neox.convert.uploading import upload

__all__ = [
    "NAME_TABLE",
    "FromHFResult",
    "ToHFResult",
    "from_hf",
    "inexpressible",
    "name_pairs",
    "read_flat",
    "refuse_inexpressible",
    "to_hf",
    "upload",
]
