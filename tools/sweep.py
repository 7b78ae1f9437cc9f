#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Train one configuration with several values of its keys, and compare the runs: the command of `tools/sweep/`.

`import tools.sweep` finds the package: Python looks for a directory before it looks for a file of the same name.
"""

from __future__ import annotations

import _checkout  # noqa: F401

from neox.errors import run_script
from tools.sweep.command import main

if __name__ == "__main__":
    run_script(main)
