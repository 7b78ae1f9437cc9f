"""gpt-neox's name of `tools/dataset.py merge`, which it runs."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    tool = Path(__file__).resolve().with_name("dataset.py")
    os.execv(sys.executable, [sys.executable, str(tool), "merge", *sys.argv[1:]])
