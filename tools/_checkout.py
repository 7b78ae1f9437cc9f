"""Import path of the tools: the library of the checkout they lie in, whether or not it is installed.

Every tool imports this module before `neox`. The tools' own folder leaves the path: `evaluate` and `datasets` are names
of packages as well.
"""

import sys
from pathlib import Path

_TOOLS = Path(__file__).resolve().parent
sys.path[:] = [str(_TOOLS.parent), *(entry for entry in sys.path if Path(entry).resolve() != _TOOLS)]
