"""Serve a checkpoint to OpenAI clients and to a browser, from this process: for looking at a training run.

python tools/serve.py -d configs MODEL.yml
curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "max_tokens": 32}'

Only this machine can reach it, unless --host says otherwise: there are no passwords here.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from neox.errors import ConfigError, NeoXError, run_script
from neox.generation import add_plan_arguments, choose_checkpoint, load_model, plan_from_arguments, tokenizer_of
from neox.generation.completions_api import Limits
from neox.generation.server import make_app
from neox.log import get_logger, setup_logging
from neox.parallel import ParallelGrid

_CONNECTIONS = 256  # open at once, before further ones are refused


def main() -> None:
    limits = Limits()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_plan_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--allow_host", action="append", default=[], help="a name that clients call this server by")
    parser.add_argument("--max_tokens", type=int, default=limits.max_tokens, help="most new tokens of a request")
    parser.add_argument("--max_sequences", type=int, default=limits.sequences, help="most sequences of a request")
    parser.add_argument("--max_seconds", type=float, default=limits.seconds, help="most seconds of a generation")
    parser.add_argument("--max_waiting", type=int, default=limits.waiting, help="requests in line before others wait")
    args = parser.parse_intermixed_args()
    setup_logging()
    if missing := [package for package in ("starlette", "uvicorn") if importlib.util.find_spec(package) is None]:
        raise NeoXError(f"{' and '.join(missing)} missing: pip install -r requirements/requirements-serve.txt")
    import uvicorn

    plan = plan_from_arguments(args)
    if plan.grid.world > 1:
        raise ConfigError("serving takes one process: python tools/serve.py -d configs MODEL.yml, without deepy.py")
    tokenizer = tokenizer_of(plan.config)
    checkpoint = choose_checkpoint(plan)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(plan, checkpoint, ParallelGrid.single(), device)
    app = make_app(
        model,
        tokenizer,
        name=checkpoint.resolve().name,
        limits=replace(
            limits,
            max_tokens=args.max_tokens,
            sequences=args.max_sequences,
            seconds=args.max_seconds,
            waiting=args.max_waiting,
        ),
        hosts=(args.host, *args.allow_host),
    )
    get_logger(f"neox.{Path(__file__).stem}").info("http://%s:%d/ serves %s", args.host, args.port, checkpoint)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", limit_concurrency=_CONNECTIONS)


if __name__ == "__main__":
    run_script(main)
