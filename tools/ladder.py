#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Predict the loss and the learning rate of a large run from a family of small ones: the command of `tools/ladder/`.

`import tools.ladder` finds the package: Python looks for a directory before it looks for a file of the same name.
"""

from __future__ import annotations

import _checkout  # noqa: F401

from neox.errors import run_script
from tools.ladder.command import main

if __name__ == "__main__":
    run_script(main)
