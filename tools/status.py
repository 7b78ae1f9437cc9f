# PYTHON_ARGCOMPLETE_OK
"""Show the status of a run (state, progress, speed, hosts, interruptions) as text, JSON or a web page.

python tools/status.py runs/20B
python tools/status.py runs/20B --json
python tools/status.py runs/20B --serve            # a page on http://127.0.0.1:8001/ that updates itself

Only this machine can connect to the page, unless --host is given: the server has no authentication.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.errors import NeoXError, run_script
from neox.launch.status.run_status import format_status, run_status
from neox.launch.status.status_server import StatusServer


def serve(directory: Path, host: str, port: int, allowed: list[str]) -> None:
    """Serve the page until Ctrl-C. Raises NeoXError if the server cannot listen on the address."""
    try:
        server = StatusServer(directory, (host, port), (host, *allowed))
    except (OSError, OverflowError) as error:
        raise NeoXError(
            f"--host {host} --port {port}: cannot listen on this address ({error}); choose another one with --port"
        ) from error
    print(f"http://{host}:{server.server_address[1]}/ shows {directory}", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to end it
        server.serve_forever()


def main() -> int:
    """Run the tool."""
    parser = ScriptParser(description=__doc__)
    parser.add_argument(
        "run_directory", type=Path, help="log_dir of a run, its metrics.jsonl, the directory above, or its checkpoints"
    )
    parser.add_argument("--json", action="store_true", help="print the status as one JSON object")
    parser.add_argument("--serve", action="store_true", help="serve a web page with the status")
    parser.add_argument("--host", default="127.0.0.1", help="with --serve: address to listen on")
    parser.add_argument("--port", type=int, default=8001, help="with --serve: port to listen on (default: 8001)")
    parser.add_argument(
        "--allow_host",
        action="append",
        default=[],
        help="with --serve: further host name that clients may use; may be repeated",
    )
    arguments = parser.parse_args()
    status = run_status(arguments.run_directory)
    if arguments.serve:
        serve(arguments.run_directory, arguments.host, arguments.port, arguments.allow_host)
    elif arguments.json:
        print(json.dumps(status))
    else:
        print(format_status(status))
    return 0


if __name__ == "__main__":
    run_script(main)
