#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Inspect, verify, merge and split token datasets: the command of the package `tools/dataset/`.

`import tools.dataset` finds the package: Python looks for a directory before it looks for a file of the same name.
"""

from __future__ import annotations

import _checkout  # noqa: F401

from neox.errors import run_script
from tools.dataset.command import main

if __name__ == "__main__":
    run_script(main)
