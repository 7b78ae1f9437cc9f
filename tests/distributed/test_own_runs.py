"""Commands that are typed again: a run resumes its own checkpoints, and none is replaced by another one in silence."""

from __future__ import annotations

import hashlib
import json
import random
import re
import signal
from pathlib import Path

import pytest

from tests.distributed.spawn import run_and_kill, run_ranks
from tests.distributed.training_runs import batches, tiny_plan


def train(engine_plan, save, steps):
    """On this rank: open the engine as a training does, take some steps and save; return where it started."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    grid, device = initialize_distributed(engine_plan)
    engine = open_engine(engine_plan, grid, device)
    first = engine.iteration
    data = batches(engine_plan, 0, start=first * engine_plan.batch.gradient_accumulation_steps)
    for _ in range(steps):
        engine.train_batch(data)
    save_checkpoint(engine, save)
    return first, engine.iteration


def walk(directory, number, length, notes=None):
    """On one rank: a random sequence of commands over three `save` directories; return what contradicts the rules.

    A command is a start from scratch, a fine-tuning of another directory, a resume, a rollback or `overwrite`, with
    other seeds and schedules, and is often typed twice. notes: a file to which the checkpoints are added after each
    command.
    """
    from neox.errors import CheckpointError

    draw = random.Random(number)
    root = Path(directory)
    wrong = []
    last = None
    for _ in range(length):
        command = last if last is not None and draw.random() < 0.4 else draw_command(draw, root)
        last = command
        save = Path(command["save"])
        before = fingerprints(root)
        plan = tiny_plan(1, train_batch_size=2, num_layers=1, train_micro_batch_size_per_gpu=2, **command)
        refused = False
        try:
            train(plan, save, draw.randrange(1, 3))
        except CheckpointError:
            refused = True
        after = fingerprints(root)
        if notes is not None:
            with open(notes, "a") as file:
                file.write(json.dumps(sorted(after)) + "\n")
        lost = {found for found in before if found not in after}
        if lost:
            wrong.append((command, "lost", lost))
        if refused and before != after:
            wrong.append((command, "changed by a refused start"))
    return wrong


def draw_command(draw, root):
    """Draw the keys of a command."""
    names = ["a", "b", "c"]
    command = {"save": str(root / draw.choice(names)), "seed": draw.choice([1, 2]), "train_iters": draw.randrange(3, 9)}
    kind = draw.choice(["scratch", "finetune", "continue", "resume", "overwrite"])
    if kind in ("finetune", "continue"):
        command["load"] = str(root / draw.choice(names))
        command["finetune"] = kind == "finetune"
    if kind == "resume":
        command["load"] = command["save"]
        if draw.random() < 0.3:
            command["iteration"] = draw.randrange(1, 4)
    if kind == "overwrite":
        command["overwrite"] = True
    return command


def fingerprints(root):
    """Hashes of all weights in checkpoints, wherever they are.

    One that a save was replacing when it was killed counts: the next start puts it back.
    """
    found = set()
    for path in root.rglob("*global_step*"):
        name = re.match(r"(?:\.replaced-)?(global_step\d+)", path.name)
        files = sorted(path.glob("layer_*.pt"))
        if name is not None and files:
            content = b"".join(file.read_bytes() for file in files)
            found.add((name[1], hashlib.sha256(content).hexdigest()))
    return found


def walk_until_killed(directory, number):
    """Start a sequence of commands, and kill it at a random moment with a random signal; return what it had noted."""
    draw = random.Random(-number - 1)
    notes = directory.parent / f"{directory.name}.notes"
    seconds = draw.uniform(0.0, 3.0)
    signum = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    begun = notes.exists

    run_and_kill(walk, str(directory), 1000 + number, 50, str(notes), begun=begun, seconds=seconds, signum=signum)
    found = set()
    for line in notes.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # a killed process may have written a part
            found |= {tuple(entry) for entry in json.loads(line)}
    return found


def test_the_same_command_twice_resumes_a_fine_tuning(tmp_path: Path) -> None:
    keys = {"train_batch_size": 2, "num_layers": 1, "train_micro_batch_size_per_gpu": 2}
    base = tmp_path / "base"
    tuned = tmp_path / "tuned"
    first = tiny_plan(1, save=str(base), **keys)
    tuning = tiny_plan(1, save=str(tuned), load=str(base), finetune=True, **keys)
    other = tiny_plan(1, save=str(base), seed=8, **keys)
    assert run_ranks(1, train, first, base, 2) == [(0, 2)]
    assert run_ranks(1, train, tuning, tuned, 3) == [(0, 3)]
    assert run_ranks(1, train, tuning, tuned, 1) == [(3, 4)], "typed again, it goes on"
    assert run_ranks(1, train, first, base, 1) == [(2, 3)]
    with pytest.raises(Exception, match="overwrite"):
        run_ranks(1, train, other, base, 1)
    assert (base / "global_step3").is_dir()


def test_a_rollback_moves_later_checkpoints(tmp_path: Path) -> None:
    keys = {"train_batch_size": 2, "num_layers": 1, "train_micro_batch_size_per_gpu": 2, "save": str(tmp_path)}
    run_ranks(1, train, tiny_plan(1, **keys), tmp_path, 1)
    run_ranks(1, train, tiny_plan(1, load=str(tmp_path), **keys), tmp_path, 2)
    (tmp_path / "latest").write_text("global_step1")
    assert run_ranks(1, train, tiny_plan(1, load=str(tmp_path), **keys), tmp_path, 1) == [(1, 2)]
    assert {path.name for path in tmp_path.glob("global_step*")} == {"global_step1", "global_step2"}
    assert {path.name for path in (tmp_path / "superseded").iterdir()} == {"global_step3"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_sequence_of_commands_loses_a_checkpoint(tmp_path: Path) -> None:
    """Thirty sequences: commands, a kill at a random moment, and commands after it."""
    for number in range(30):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert run_ranks(1, walk, str(directory), number, 6) == [[]]
        before = fingerprints(directory)
        before |= walk_until_killed(directory, number)
        assert before <= fingerprints(directory), number
        assert run_ranks(1, walk, str(directory), 2000 + number, 3) == [[]]
        assert before <= fingerprints(directory), number
