"""`async_save`: the same files as a save that training waits for, failures on every rank; and the stored logits."""

import shutil

import pytest
import torch

from neox.checkpoint import find_checkpoint, load_file, write_layer
from neox.errors import CheckpointError
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan
from tests.plans import NETWORKS

CHECKED = {"checkpoint_validation_with_forward_pass": True}


def save_both_ways(plans, here, behind, broken):
    """Save one state at once and in the background, training meanwhile; then a save that fails on rank 1."""
    from neox.engine import BackgroundSaves, initialize_distributed, initialize_engine, save_checkpoint
    from neox.engine.checkpoints import background_saves
    from neox.features.table import build_features

    messages = []
    for number, plan in enumerate(plans):
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device, build_features)
        data = batches(plan, grid.dp_rank)
        engine.train_batch(data)
        save_checkpoint(engine, here / str(number))
        saves = BackgroundSaves(engine)
        saves.start(behind / str(number))
        engine.train_batch(data)
        saves.wait()
        (report,) = saves.take_reports()
        assert report.iteration == 1
        assert 0 < report.stall <= report.seconds
        assert not saves.take_reports()
    if grid.rank == 1:

        def full(path, value):
            raise CheckpointError("No space left on device")

        background_saves.save_file = full
    saves.start(broken)
    try:
        saves.start(broken)  # waits for the one before, which fails
    except CheckpointError as error:
        messages.append(str(error))
    saves.wait()
    return messages


def load_checked(plans):
    """Open an engine under each plan; the message of the one that fails, or its iteration."""
    from neox.engine import initialize_distributed, open_engine
    from neox.features.table import build_features

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        try:
            answers.append(open_engine(plan, grid, device, build_features).iteration)
        except CheckpointError as error:
            answers.append(str(error))
    return answers


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (vars(a) == vars(b) if hasattr(a, "__dict__") else a == b)


def test_background_saves_and_stored_logits(tmp_path):
    layouts = [
        {"pp": 2, "zero": 1, "precision": "bf16"},
        {"zero": 3},
        {"pp": 2, "zero": 0, **CHECKED},
        {**NETWORKS["experts"], "expert_model_parallel_size": 2, "zero": 0},
        {**NETWORKS["experts"], "expert_model_parallel_size": 2, "zero": 3},
    ]
    plans = [tiny_plan(2, save="unused", **layout) for layout in layouts]
    here, behind, broken = tmp_path / "here", tmp_path / "behind", tmp_path / "broken"
    messages = run_ranks(2, save_both_ways, plans, here, behind, broken)
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0][0]
    assert "No space left" in messages[0][0]
    assert not any(broken.iterdir())
    for number in range(len(plans)):
        one, two = find_checkpoint(here / str(number)), find_checkpoint(behind / str(number))
        names = sorted(path.name for path in one.glob("*.pt"))
        assert names == sorted(path.name for path in two.glob("*.pt"))
        for name in names:
            assert same(load_file(one / name), load_file(two / name)), (number, name)

    whole, damaged = find_checkpoint(here / "2"), tmp_path / "damaged"
    shutil.copytree(whole, damaged / whole.name)
    (damaged / whole.name / "manifest.json").unlink()
    norm = load_file(whole / "layer_07-model_00-model_states.pt")
    write_layer(damaged / whole.name, 7, 0, {**norm, "norm.weight": norm["norm.weight"] * 2})
    load = {"load": str(here / "2"), **CHECKED}
    runs = [tiny_plan(2, pp=2, **load), tiny_plan(2, mp=2, zero=1, **load), tiny_plan(2, zero=3, **load)]
    runs += [tiny_plan(2, zero=1, load=str(here / "1"), **CHECKED), tiny_plan(2, mp=2, **load | {"load": str(damaged)})]
    *answers, refused = run_ranks(2, load_checked, runs)[0]
    assert answers == [1, 1, 1, 1]  # the fourth has no logits to compare with
    assert "logits differ by" in refused


def test_a_snapshot_keeps_the_values_and_the_sharing():
    from collections import OrderedDict

    from neox.engine.checkpoints.background_saves import HostCopies, snapshot

    tensor = torch.arange(4.0)
    state = {"a": tensor, "b": [tensor, (1, "x")], "c": OrderedDict(d=tensor[1:3])}
    copied = snapshot(state, HostCopies())
    tensor.zero_()
    assert copied["a"].tolist() == [0, 1, 2, 3]
    assert copied["a"] is copied["b"][0]
    assert isinstance(copied["c"], OrderedDict)
    assert copied["c"]["d"].tolist() == [1, 2]
    assert copied["c"]["d"].untyped_storage().nbytes() == 8


@pytest.mark.parametrize("fails", [False, True])
def test_the_loop_reports_and_stops(tmp_path, fails):
    answer = run_ranks(1, train_in_background, tmp_path, fails)[0]
    if fails:
        assert "No space left" in answer
        return
    assert answer == ["save 2", "save 4"]
    assert find_checkpoint(tmp_path).name == "global_step4"


def train_in_background(directory, fails):
    """A run that saves every second step; what it reports, or its error."""
    from neox.data.run_data import DataIterators
    from neox.engine import Feature, initialize_distributed, initialize_engine
    from neox.engine.checkpoints import background_saves
    from neox.features.table import build_features
    from neox.train import Trainer

    class Saves(Feature):
        def __init__(self):
            self.lines = []

        def on_save(self, state, report):
            self.lines.append(f"save {report.iteration}")

    def full(path, value):
        raise CheckpointError("No space left on device")

    if fails:
        background_saves.save_file = full
    keys = {"train_iters": 4, "checkpoint_factor": 2, "eval_iters": 0, "async_save": True, "save": str(directory)}
    plan = tiny_plan(1, **keys)
    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device, build_features)
    watcher = Saves()
    trainer = Trainer(plan, engine, DataIterators(batches(plan, 0), (), ()), more=[watcher])
    try:
        trainer.fit()
    except CheckpointError as error:
        return str(error)
    return watcher.lines
