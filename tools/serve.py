# PYTHON_ARGCOMPLETE_OK
r"""Serve a checkpoint to OpenAI clients and to a browser, from one process, to try out a model.

python tools/serve.py -d configs MODEL.yml
curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "max_tokens": 32}'
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "How many?"}]}'

Only this machine can connect, unless --host is given: the server has no authentication.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType

import _checkout  # noqa: F401
import torch

from neox.arguments import ScriptParser
from neox.errors import ConfigError, NeoXError, install_command, refusals, run_script
from neox.generation.chat_format import find_chat_format
from neox.generation.load import load_model
from neox.generation.request_fields import RequestLimits
from neox.generation.server import make_app
from neox.generation.startup import add_plan_arguments, choose_checkpoint, plan_from_arguments, use_end_ids
from neox.log import get_logger, setup_logging
from neox.parallel import ParallelGrid

_CONNECTIONS = 256  # open connections; more are refused
_SHUTDOWN_SECONDS = 3  # for running answers when the server is stopped


def open_socket(host: str, port: int) -> socket.socket:
    """Bind the address before the model is loaded, which may take minutes. Raises NeoXError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        raise NeoXError(
            f"--host {host} --port {port}: cannot listen on this address ({error}); give another with --port"
        ) from error
    return taken


def main() -> None:
    limits = RequestLimits()
    parser = ScriptParser(description=__doc__)
    add_plan_arguments(parser, "-o")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument("--allow_host", action="append", default=[], help="another host name that clients may use")
    parser.add_argument("--max_tokens", type=int, default=limits.max_tokens, help="most new tokens per request")
    parser.add_argument("--max_sequences", type=int, default=limits.sequences, help="most sequences per request")
    parser.add_argument("--max_seconds", type=float, default=limits.seconds, help="most seconds per generation")
    parser.add_argument(
        "--max_waiting", type=int, default=limits.waiting, help="most waiting requests; more are refused"
    )
    args = parser.parse_intermixed_args()
    setup_logging()
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise NeoXError(f"the package {package} is missing: {install_command('requirements-serve.txt')}")
    import uvicorn

    plan, tokenizer = plan_from_arguments(args)
    if plan.grid.world_size > 1:
        raise ConfigError("serving takes one process: python tools/serve.py -d configs MODEL.yml, without deepy.py")
    address = open_socket(args.host, args.port)
    with refusals():
        checkpoint = choose_checkpoint(plan, tokenizer)
    use_end_ids(plan, checkpoint, tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chat = find_chat_format(plan.config, checkpoint, tokenizer)
    model = load_model(plan, checkpoint, ParallelGrid.single(), device)
    shown = f"[{args.host}]" if ":" in args.host else args.host
    closing = threading.Event()
    app = make_app(
        model,
        tokenizer,
        name=checkpoint.resolve().name,
        chat=chat,
        limits=replace(
            limits,
            max_tokens=args.max_tokens,
            sequences=args.max_sequences,
            seconds=args.max_seconds,
            waiting=args.max_waiting,
        ),
        hosts=(shown, *args.allow_host),
        closing=closing,
    )
    get_logger(f"neox.{Path(__file__).stem}").info(
        "http://%s:%d/ serves %s%s",
        shown,
        address.getsockname()[1],
        checkpoint,
        "" if chat else " (no chat template: it continues texts, and answers no conversations)",
    )
    settings = uvicorn.Config(
        app, log_level="warning", limit_concurrency=_CONNECTIONS, timeout_graceful_shutdown=_SHUTDOWN_SECONDS
    )
    server = uvicorn.Server(settings)
    answer_signal = server.handle_exit

    def end(number: int, frame: FrameType | None) -> None:
        closing.set()
        answer_signal(number, frame)

    server.handle_exit = end  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        server.run(sockets=[address])


if __name__ == "__main__":
    run_script(main)
