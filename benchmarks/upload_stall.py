"""Steps of a training while a checkpoint goes to object storage over a slow link, and without an upload, in turn.

    nice -n 5 python benchmarks/upload_stall.py --turns 4 --mb-per-s 0.2

One rank trains. A server of the S3 protocol (moto) runs in another process and answers no faster than the link. In each
turn the steps of an upload are followed by as many without one. Prints the time that a save waits for the mirror, and
the time of a step with and without an upload: the median, and the 10th percentile, which other work moves less. The
processor time of this process per step includes the thread of the upload, and does not depend on other work.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan
from tests.unit.corpus.s3_server import KEYS

MODEL = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "train_batch_size": 4}


Steps = list[tuple[float, float]]
"""Seconds of each step, and those of the processor."""


class SlowLink:
    """WSGI application that takes the bodies of requests at the speed of a link."""

    def __init__(self, app: Any, bytes_per_second: float) -> None:
        self._app = app
        self._rate = bytes_per_second

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        time.sleep(int(environ.get("CONTENT_LENGTH") or 0) / self._rate)
        return self._app(environ, start_response)


def serve(bytes_per_second: float) -> None:
    """Serve a bucket, and print the port."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = SlowLink(DomainDispatcherApplication(create_backend_app), bytes_per_second)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


def measure(turns: int, directory: Path) -> list[tuple[float, Steps, Steps]]:
    """Seconds that each save waited, and those of the steps with an upload and without one."""
    import fsspec

    from neox.engine import SaveReport, TrainState, initialize_distributed, initialize_engine, save_checkpoint
    from neox.features.mirror_uploads.run import MirrorUploads

    fsspec.filesystem("s3").mkdir("bucket")
    plan = tiny_plan(1, save=str(directory), **MODEL)
    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    data = batches(plan, grid.dp_rank)
    path = save_checkpoint(engine, directory)
    for _ in range(5):
        engine.train_batch(data)
    rows = []
    for turn in range(turns):
        mirrored = tiny_plan(1, save=str(directory), checkpoint_mirror=f"s3://bucket/{turn}", **MODEL)
        uploads = MirrorUploads(mirrored)
        uploads.on_start(TrainState())
        started = time.perf_counter()
        uploads.on_save(TrainState(), SaveReport(path, engine.iteration, 0.0, 0.0))
        waited = time.perf_counter() - started
        end = threading.Thread(target=uploads.on_exit)
        end.start()
        busy = []
        while end.is_alive():
            busy.append(timed_step(engine, data))
        rows.append((waited, busy, [timed_step(engine, data) for _ in busy]))
    return rows


def timed_step(engine: Any, data: Any) -> tuple[float, float]:
    """Train a step, and return its seconds, and those of the processor in this process."""
    started = time.perf_counter()
    used = time.process_time()
    engine.train_batch(data)
    return time.perf_counter() - started, time.process_time() - used


def compared(busy: Steps, quiet: Steps) -> str:
    """Return times of steps with and without an upload, as text."""
    parts = []
    for name, number in (("10th percentile", 9), ("median", 49)):
        pair = [statistics.quantiles([step[0] for step in steps], n=100)[number] for steps in (busy, quiet)]
        parts.append(f"{name} {pair[0] * 1e3:.2f} and {pair[1] * 1e3:.2f} ms, ratio {pair[0] / pair[1]:.3f}")
    used = [sum(step[1] for step in steps) / len(steps) for steps in (busy, quiet)]
    parts.append(f"processor {used[0] * 1e3:.2f} and {used[1] * 1e3:.2f} ms, ratio {used[0] / used[1]:.3f}")
    return "; ".join(parts)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--mb-per-s", type=float, default=0.2, help="speed of the link")
    parser.add_argument("--dir", type=Path, help="where checkpoints go; a temporary directory otherwise")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.mb_per_s * 1e6)
        return 0
    command = [sys.executable, __file__, "--serve", "--mb-per-s", str(args.mb_per_s)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        os.environ.update({**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}"})
        with tempfile.TemporaryDirectory(dir=args.dir) as directory:
            rows = run_ranks(1, measure, args.turns, Path(directory), timeout=900)[0]
            size = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
    finally:
        server.kill()
        server.wait()
    print(f"{size / 1e6:,.1f} MB a checkpoint, {args.mb_per_s} MB/s, load {os.getloadavg()[0]:.0f}")
    for waited, busy, quiet in rows:
        print(f"save waited {waited * 1e3:.2f} ms; {len(busy)} steps each, {compared(busy, quiet)}")
    busy, quiet = ([step for row in rows for step in row[side]] for side in (1, 2))
    print(f"all turns: {compared(busy, quiet)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
