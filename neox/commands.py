"""Commands of an installed package: `deepy` for `python deepy.py`, and `neox TOOL` for `python tools/TOOL.py`."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from typing import NoReturn

from neox.errors import ConfigError, run_script
from neox.preflight import main
from neox.shipped_files import scripts_root, tool_names


def deepy() -> NoReturn:
    """Run `deepy.py`."""
    run_script(main, unload=False)


def tool() -> NoReturn:
    """Replace this process by the tool that the first argument names."""
    run_script(_run_tool)


def _run_tool() -> int:
    words = sys.argv[1:]
    names = tool_names()
    if not words or words[0] in ("-h", "--help"):
        print("usage: neox TOOL ...\n\ntools: " + ", ".join(names) + "\n\nruns and plans: deepy --help")
        return 0
    name = words[0].removesuffix(".py")
    if name not in names:
        close = get_close_matches(name, names, n=1) or ["neox --help, which lists them"]
        raise ConfigError(f"{words[0]} is not a tool of neox; did you mean {close[0]}?")
    path = scripts_root() / "tools" / f"{name}.py"
    os.execv(sys.executable, [sys.executable, str(path), *words[1:]])
