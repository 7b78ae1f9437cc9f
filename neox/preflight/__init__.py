"""Preflight: the command `deepy.py`, which plans a run, checks it, and shows or starts it.

Before ranks start, it asks data, tokenizer, generation and evaluation what they would refuse. It never imports torch.
"""

from neox.preflight.command import main

__all__ = ["main"]
