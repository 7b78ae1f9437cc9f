#!/usr/bin/env python3
"""Pretrain or finetune: the script of every rank. Start it with `python deepy.py train.py -d configs FILE.yml`."""

from __future__ import annotations

import shlex
import sys

from neox.arguments import ScriptParser
from neox.errors import run_script
from neox.log import setup_logging
from neox.plan import decode_payload


def main() -> int:
    """Read the plan that deepy.py made, and train."""
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--payload", help="the plan, as deepy.py encodes it")
    parser.add_argument("--local_rank", type=int, help="set by some launchers; LOCAL_RANK is what counts")
    arguments, others = parser.parse_known_args()
    if arguments.payload is None or others:
        parser.error(f"deepy.py starts this script: python deepy.py {shlex.join(['train.py', *sys.argv[1:]])}")
    setup_logging()
    plan = decode_payload(arguments.payload)
    from neox.train import pretrain  # seconds of imports, after the plan is known to be sound

    return pretrain(plan)


if __name__ == "__main__":
    run_script(main, unload=False)  # all is saved and closed
