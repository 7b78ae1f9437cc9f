# PYTHON_ARGCOMPLETE_OK
"""Show the status of a run or of a sweep (state, progress, speed, what has failed) as text, JSON or a web page.

python tools/status.py runs/20B                # a run: also its hosts and interruptions
python tools/status.py runs/lr                 # a sweep or a ladder: its runs, the best so far, the time that is left
python tools/status.py runs/20B --json
python tools/status.py runs/20B --serve        # a page on http://127.0.0.1:8001/ that updates itself

Only this machine can connect to the page, unless --host is given: the server has no authentication.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.errors import DataError, NeoXError, run_script
from neox.launch.status.run_status import Status, format_status, run_status
from neox.launch.status.status_server import StatusServer, StatusView
from tools.sweep.progress import format_progress, progress_json, sweep_progress
from tools.sweep.record import is_sweep


def _run_status(directory: Path) -> Status:
    """Return the status of a run. Raises DataError if the path names none; then sweeps below it are named as well."""
    try:
        return run_status(directory)
    except DataError as error:
        sweeps = list(filter(is_sweep, sorted(directory.glob("*/"))))
        if not sweeps:
            raise
        raise DataError(f"{error}, or a sweep, of which {', '.join(map(str, sweeps))} are here") from error


_RUN_VIEW = StatusView(_run_status, "run")
_SWEEP_VIEW = StatusView(lambda directory: progress_json(sweep_progress(directory)), "sweep")


def serve(directory: Path, view: StatusView, host: str, port: int, allowed: list[str]) -> None:
    """Serve the page until Ctrl-C. Raises NeoXError if the server cannot listen on the address."""
    try:
        server = StatusServer(directory, (host, port), (host, *allowed), view)
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
        "directory",
        type=Path,
        help="log_dir of a run, its metrics.jsonl, the directory above, or its checkpoints; or the directory of a "
        "sweep or a ladder",
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
    directory = arguments.directory
    view = _SWEEP_VIEW if is_sweep(directory) else _RUN_VIEW
    status = view.read(directory)
    if arguments.serve:
        serve(directory, view, arguments.host, arguments.port, arguments.allow_host)
    elif arguments.json:
        print(json.dumps(status))
    elif view is _SWEEP_VIEW:
        print(format_progress(sweep_progress(directory)))
    else:
        print(format_status(status))
    return 0


if __name__ == "__main__":
    run_script(main)
