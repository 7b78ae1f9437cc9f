"""gpt-neox's name of `tools/preprocess_data.py`, which it runs."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    tool = Path(__file__).resolve().parents[1] / "preprocess_data.py"
    os.execv(sys.executable, [sys.executable, str(tool), *sys.argv[1:]])
