"""Divide documents into train, validation and test sets: `tools/web_text.py split` by a name of its own.

python tools/split_json.py --input pages.jsonl.zst --output split/pages.jsonl.zst --test-percent 5 --dev-percent 5
"""

from __future__ import annotations

import sys

import _checkout  # noqa: F401

from neox.errors import run_script
from tools.web_text.command import main

if __name__ == "__main__":
    sys.argv[1:] = ["split", *sys.argv[1:]]
    run_script(main)
