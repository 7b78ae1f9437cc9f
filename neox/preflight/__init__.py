"""Preflight: the command `deepy.py`, which plans a run, checks it, and shows or starts it.

It asks data, tokenizer, generation and evaluation what they would refuse, before ranks start; without torch.
"""

from neox.preflight.command import main

__all__ = ["main"]
