"""Import path of the tools, for the tests that load one into their own process."""

import sys
from pathlib import Path

_TOOLS = str(Path(__file__).parents[3] / "tools")
sys.path.insert(0, _TOOLS)
__import__("_checkout")  # which takes the folder of the tools from the path again
