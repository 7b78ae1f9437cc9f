"""Import path of the tools: the library of this checkout, whether or not it is installed.

Every tool imports this module before `neox`. The folder of the tools becomes the last entry of the path, because
`evaluate` and `datasets` are names of packages as well. Worker processes inherit the path and import the tool again.
"""

import sys
from pathlib import Path

_TOOLS = Path(__file__).resolve().parent
_OTHERS = [entry for entry in sys.path if Path(entry).resolve() != _TOOLS]
sys.path[:] = [str(_TOOLS.parent), *_OTHERS, str(_TOOLS)]
