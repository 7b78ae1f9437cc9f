"""Test of checkpoints under faults: processes killed at random, bits flipped, full disks.

    benchmarks/checkpoint_faults.py [--async-save] [--offload KIND] [--experts] [--kills 100] [--minutes M] [--bits 300]
                                    [--full 20] [--seed 0] [--schedule NAME] [--out FILE.json]

Kills: two ranks train a small model and save every other step; again and again both are killed (SIGKILL) at a random
moment, every other time inside a save, and resumed. After each kill the newest committed checkpoint must be whole and
at least as new as the last one seen before it; at the end the loss curve must be an undisturbed run's, bit for bit.
Bits: each flipped bit of a saved checkpoint must be found. Full disk: a save for which the disk is too small at some
point must fail on all ranks with a message, and the checkpoint before it must still load. With `--async-save` all
saves run beside training, as the key `async_save` has them; with `--offload optimizer` the optimizer is in host memory,
with `--offload weights` the weights are there too (ZeRO 3, without stages), with `--offload files` both are in files.
`--schedule` chooses the pipeline schedule. With `--experts` the model is a mixture whose experts the two ranks divide,
without stages.

The disk is a small tmpfs where mounting is allowed (root); elsewhere a limit on the size of files stands for it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from neox.checkpoint import check_manifest, checkpoint_directories, find_checkpoint, read_manifest, why_incomplete
from neox.config import NeoXConfig
from neox.errors import CheckpointError
from neox.plan import RunPlan, resolve
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES

RANKS, VOCAB, SEQ, SAVE_EVERY = 2, 500, 32, 2
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": tempfile.gettempdir()}
WEIGHTS = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
FILES = {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME, "sub_group_size": 100_000}
EXPERTS: dict[str, Any] = {
    "pipe_parallel_size": 1,
    "expert_model_parallel_size": 2,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_aux_loss_coeff": 0.01,
}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"zero_optimization": {"stage": 1, "offload_optimizer": CPU}},
    "weights": {"zero_optimization": WEIGHTS, "pipe_parallel_size": 1},
    "files": {"zero_optimization": FILES, "pipe_parallel_size": 1},
}

FEWEST_MICRO_BATCHES = {"dualpipev": 4}


@dataclass
class Kills:
    """Kills done, how many of them inside a save, and what went wrong: checkpoints lost or corrupt."""

    kills: int = 0
    inside_a_save: int = 0
    lost: int = 0
    corrupt: int = 0
    same_curve: bool = False


def plan_for(save: Path, iterations: int, keys: Mapping[str, Any]) -> RunPlan:
    """A small tied model on two pipeline stages, ZeRO-1, with further keys."""
    flat: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": SEQ,
        "pos_emb": "rotary",
        "pipe_parallel_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
        "warmup": 0.0,
        "lr_decay_style": "constant",  # the number of iterations is known only at the end
        "train_iters": iterations,
        "keep_last_n_checkpoints": 3,
        "save": str(save),
        "load": str(save),
        **keys,
    }
    return resolve(NeoXConfig.from_flat(flat), RANKS, VOCAB)


def batches(plan: RunPlan, iteration: int) -> Iterator[dict[str, torch.Tensor]]:
    """Micro batches that are a function of the step."""
    while True:
        generator = torch.Generator().manual_seed(iteration)
        for _ in range(plan.batch.gradient_accumulation_steps):
            tokens = torch.randint(0, VOCAB, (plan.batch.train_micro_batch_size_per_gpu, SEQ + 1), generator=generator)
            mask = torch.ones(tokens.shape[0], SEQ)
            yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_mask": mask}
        iteration += 1


def train(save: Path, curve: Path, iterations: int, keys: Mapping[str, Any]) -> None:
    """One rank: resume, train to the end, save every other step; rank 0 appends losses to `curve`."""
    from neox.engine import BackgroundSaves, initialize_distributed, open_engine, save_checkpoint

    torch.set_num_threads(1)
    plan = plan_for(save, iterations, keys)
    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device)
    background = BackgroundSaves(engine) if plan.config.checkpoint.async_save else None
    data = batches(plan, engine.iteration)
    while engine.iteration < iterations:
        loss = engine.train_batch(data).loss
        if grid.rank == 0:
            with open(curve, "a") as stream:
                stream.write(json.dumps([engine.iteration, loss]) + "\n")
        if engine.iteration % SAVE_EVERY == 0:
            background.start(save) if background else save_checkpoint(engine, save)
    if background:
        background.wait()


def fill_and_save(save: Path, total: int, limit_files: bool, keys: Mapping[str, Any]) -> int:
    """One rank: save a good checkpoint, then try to save with less and less room until it failed `total` times; how
    often it failed with a message and left the checkpoint before as the one that loads.

    limit_files: limit the size of files instead of filling the file system that `save` is on.
    """
    from neox.engine import BackgroundSaves, initialize_distributed, open_engine, save_checkpoint

    torch.set_num_threads(1)
    plan = plan_for(save, 1000, keys)
    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device)
    background = BackgroundSaves(engine) if plan.config.checkpoint.async_save else None

    def save_now() -> Path:
        if background is None:
            return save_checkpoint(engine, save)
        background.start(save)
        background.wait()
        return background.take_reports()[0].path

    data = batches(plan, 0)
    engine.train_batch(data)
    good = save_now()
    size = sum(p.stat().st_size for p in good.iterdir())
    largest = max(p.stat().st_size for p in good.iterdir())
    fallbacks, points = 0, total
    while points > 0:
        points -= 1
        engine.train_batch(data)
        room = points / total
        with limited_files(int(room * largest)) if limit_files else filled(save, int(room * size), grid.rank):
            torch.distributed.barrier()
            try:
                good = save_now()
                points += 1  # it did fit: that was no full disk
            except CheckpointError as error:
                whole = find_checkpoint(save) == good and not any(save.glob(".staging-*"))
                fallbacks += whole and any(words in str(error) for words in ("cannot be written", "not committed"))
            torch.distributed.barrier()
    return fallbacks


@contextmanager
def filled(save: Path, leave: int, rank: int) -> Iterator[None]:
    """Leave so many bytes free on the file system (rank 0 fills it)."""
    ballast = save.parent / "ballast"
    if rank == 0:
        free = os.statvfs(save).f_bavail * os.statvfs(save).f_frsize
        with open(ballast, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, max(1, free - leave))
    try:
        yield
    finally:
        if rank == 0:
            ballast.unlink()


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


class Ranks:
    """Two ranks running a function of this file, started from a server that has everything imported."""

    def __init__(self, log: Path, function: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "deepspeed", "neox.engine"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.results = context.SimpleQueue()
        self.processes = [
            context.Process(target=_rank, args=(rank, port, log, self.results, function, args)) for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.join()

    def join(self, timeout: float = 600) -> list[int | None]:
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]


def _rank(rank: int, port: int, log: Path, results: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    answer = function(*args)
    if rank == 0:
        results.put(answer)


def _end_with_parent() -> None:
    """Leave no rank behind when the benchmark itself is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def kill_often(work: Path, kills: int, generator: random.Random, minutes: float = math.inf, **keys: Any) -> Kills:
    """Train with that many kills (fewer when the minutes are over), then to the end; compare with a run without."""
    deadline = time.monotonic() + 60 * minutes
    save, curve, found = work / "killed", work / "killed.jsonl", Kills()
    newest, iterations = 0, 10**6
    save.mkdir()
    while found.kills < kills and time.monotonic() < deadline:
        ranks = Ranks(work / "log", train, save, curve, iterations, keys)
        inside = _wait_for_a_moment(ranks, save, newest, found.kills % 2 == 0, generator)
        if not ranks.alive():
            raise RuntimeError(f"the ranks ended by themselves; see {work / 'log'}")
        newest = _newest(save)
        ranks.kill()
        found.kills += 1
        found.inside_a_save += inside()
        found.corrupt += sum(bool(why_incomplete(path)) for path in checkpoint_directories(save))
        here = int(find_checkpoint(save).name.removeprefix("global_step"))
        found.lost += here < newest
        newest = here
    iterations = newest + 6
    for directory, lines in ((save, curve), (work / "still", work / "still.jsonl")):
        directory.mkdir(exist_ok=True)
        codes = Ranks(work / "log", train, directory, lines, iterations, keys).join()
        if codes != [0, 0]:
            raise RuntimeError(f"a run ended with {codes}; see {work / 'log'}")
    found.same_curve = _losses(curve, iterations) == _losses(work / "still.jsonl", iterations)
    return found


def _wait_for_a_moment(
    ranks: Ranks, save: Path, newest: int, in_save: bool, generator: random.Random
) -> Callable[[], bool]:
    """Wait until this start has made progress, then for a random moment; return a test of "inside a save"."""

    def saving() -> bool:
        return any(path.name.startswith((".staging-", ".latest-")) for path in save.iterdir())

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition() and ranks.alive() and time.monotonic() < deadline:
            time.sleep(0.0005)

    wait(lambda: _newest(save) > newest)
    time.sleep(generator.uniform(0, 0.2))
    if in_save:
        wait(lambda: not saving())
        wait(saving)
        time.sleep(generator.uniform(0, 0.03))
    return saving


def _newest(save: Path) -> int:
    """Iteration of the newest committed checkpoint, 0 without any."""
    committed = checkpoint_directories(save)
    return int(committed[0].name.removeprefix("global_step")) if committed else 0


def _losses(curve: Path, iterations: int) -> list[float]:
    """The loss of every iteration; of an iteration done twice, the later line's."""
    lines = dict(json.loads(line) for line in curve.read_text().splitlines() if line.endswith("]"))
    return [lines[i] for i in range(1, iterations + 1)]


def flip_bits(work: Path, bits: int, generator: random.Random) -> int:
    """How many of that many single flipped bits are found in a saved checkpoint."""
    path = find_checkpoint(work / "killed")
    manifest = read_manifest(path)
    assert manifest is not None
    files = sorted(manifest.files)
    sizes, found = [manifest.files[name].size for name in files], 0
    for _ in range(bits):
        name = generator.choices(files, sizes)[0]
        offset, mask = generator.randrange(manifest.files[name].size), 1 << generator.randrange(8)
        _flip(path / name, offset, mask)
        problems = check_manifest(path, manifest)
        found += len(problems) == 1 and problems[0].startswith(name)
        _flip(path / name, offset, mask)
    if check_manifest(path, manifest):
        raise RuntimeError(f"{path} was not restored")
    return found


def _flip(path: Path, offset: int, mask: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ mask]))


def fill_disk(work: Path, points: int, **keys: Any) -> tuple[int, str]:
    """How many of that many full disks were survived, and what stood for the disk."""
    with small_disk(work / "disk") as mounted:
        save = work / "disk" / "save"
        save.mkdir()
        ranks = Ranks(work / "log", fill_and_save, save, points, not mounted, keys)
        if ranks.join() != [0, 0]:
            raise RuntimeError(f"the ranks failed; see {work / 'log'}")
        return ranks.results.get(), "a small tmpfs" if mounted else "a limit on file sizes"


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """A directory on a file system of 64 MB if one can be mounted; yields whether it could."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)]
    mount = shutil.which("mount")
    mounted = mount is not None and os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--async-save", action="store_true", help="save beside training")
    parser.add_argument("--offload", choices=OFFLOADS, default="none", help="what is kept in host memory")
    parser.add_argument("--experts", action="store_true", help="a mixture whose experts ranks divide")
    parser.add_argument("--kills", type=int, default=100, help="0 leaves out kills and bits")
    parser.add_argument("--bits", type=int, default=300)
    parser.add_argument("--full", type=int, default=20, help="points of a full disk")
    parser.add_argument("--schedule", choices=PIPELINE_SCHEDULES, default="1f1b", help="pipeline schedule")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop killing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    generator = random.Random(args.seed)
    keys = {"async_save": args.async_save, "pipeline_schedule": args.schedule, **OFFLOADS[args.offload]}
    if args.experts:
        keys |= EXPERTS
    keys["gradient_accumulation_steps"] = FEWEST_MICRO_BATCHES.get(args.schedule, 2)
    with tempfile.TemporaryDirectory() as directory:
        work, started, fine = Path(directory), time.monotonic(), True
        numbers: dict[str, Any] = {"seed": args.seed, "date": time.strftime("%Y-%m-%d")}
        numbers |= {"async_save": args.async_save, "offload": args.offload, "schedule": args.schedule}
        numbers["experts"] = args.experts
        if args.kills:
            killed = kill_often(work, args.kills, generator, args.minutes, **keys)
            curve = "the same curve" if killed.same_curve else "ANOTHER CURVE"
            counts = f"{killed.lost} lost, {killed.corrupt} corrupt, {curve}"
            print(f"{killed.kills} kills, {killed.inside_a_save} inside a save: {counts}", flush=True)
            bits = flip_bits(work, args.bits, generator)
            print(f"{args.bits} flipped bits: {bits} found", flush=True)
            numbers |= {**asdict(killed), "bits": args.bits, "bits_found": bits}
            fine = killed.same_curve and not killed.lost + killed.corrupt and bits == args.bits
        if args.full:
            good, disk = fill_disk(work, args.full, **keys)
            print(f"{args.full} points of a full disk ({disk}): {good} good fallbacks")
            numbers |= {"full_disks": args.full, "good_fallbacks": good, "disk": disk}
            fine = fine and good == args.full
        numbers["seconds"] = round(time.monotonic() - started)
    if args.out:
        args.out.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
