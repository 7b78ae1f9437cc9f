"""Saving and resuming: bit for bit in the same layout, refused with reasons in another, weights alone in any."""

import json
import shutil

import pytest
import torch

from neox.checkpoint import ORDER, WRITER, CheckpointReader, OptimizerReader, find_checkpoint, load_file, save_file
from neox.engine.checkpoints.background_saves import HostCopies, snapshot
from neox.errors import CheckpointError
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, begun_start, tiny_plan

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 34, "hysteresis": 1}}
BF16 = {"bf16": {"enabled": True}}


def interrupted_runs(runs, steps, saved_at):
    """For each (saving plan, loading plan): the steps of an undisturbed run, and of one that goes on from its save."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint
    from neox.features.table import build_features

    answers = []
    for whole_plan, resumed_plan in runs:
        grid, device = initialize_distributed(whole_plan)
        engine = open_engine(whole_plan, grid, device, build_features)
        data = batches(whole_plan, grid.data_rank)
        whole = []
        for step in range(steps):
            if step == saved_at:
                save_checkpoint(engine, whole_plan.config.checkpoint.save)
            whole.append(engine.train_batch(data))
        again = open_engine(resumed_plan, grid, device, build_features)
        assert again.iteration == saved_at
        data = batches(resumed_plan, grid.data_rank, start=saved_at * resumed_plan.batch.gradient_accumulation_steps)
        answers.append((whole, [again.train_batch(data) for _ in range(steps - saved_at)]))
    return answers


def runs_of(tmp_path, world, layouts):
    """Plans that save, and plans that load what those saved."""
    runs = []
    for number, layout in enumerate(layouts):
        directory = str(tmp_path / f"{world}-{number}")
        runs.append((tiny_plan(world, save=directory, **layout), tiny_plan(world, load=directory, **layout)))
    return runs


FAST = [
    {"pp": 2, "zero": 1, **BF16, **DROPOUT},
    {"pp": 2, "zero": 0, **FP16},
    {"mp": 2, "zero": 3},
]
FURTHER = [
    {"pp": 2, "zero": 0, **DROPOUT},
    {"pp": 2, "zero": 1, **BF16},
    {"zero": 2, **DROPOUT},
    {"pp": 2, "zero": 1},
    {"zero": 1, **DROPOUT},
    {"zero": 3},
    {"mp": 2, "zero": 0, **DROPOUT},
    {"pp": 2, "zero": 0, **BF16},
    {"zero": 2, **BF16},
    {"zero": 0, **BF16},
    {"pp": 2, "zero": 1, **FP16},
    {"zero": 3, **FP16},
    {"mp": 2, "zero": 1, **BF16},
]


@pytest.mark.parametrize("layouts", [FAST, pytest.param(FURTHER, marks=pytest.mark.slow)], ids=["fast", "further"])
def test_resume_is_bit_for_bit(tmp_path, layouts):
    answers = run_ranks(2, interrupted_runs, runs_of(tmp_path, 2, layouts), 4, 2, timeout=300)
    for rank_answers in answers:
        for layout, (whole, resumed) in zip(layouts, rank_answers, strict=True):
            assert resumed == whole[2:], layout


def save_initial(plans):
    """Save each plan's initial weights."""
    from neox.engine import initialize_distributed, initialize_engine, save_checkpoint
    from neox.features.table import build_features

    for plan in plans:
        grid, device = initialize_distributed(plan)
        save_checkpoint(initialize_engine(plan, grid, device, build_features), plan.config.checkpoint.save)


def test_every_layout_writes_the_same_layer_files(tmp_path):
    layouts = [{"pp": 2}, {"mp": 2}, {"zero": 3}]
    plans = [tiny_plan(2, save=str(tmp_path / str(n)), **layout) for n, layout in enumerate(layouts)]
    run_ranks(2, save_initial, plans)
    readers = [CheckpointReader(find_checkpoint(tmp_path / str(n)), plan.layers) for n, plan in enumerate(plans)]
    items = list(readers[0].items())
    assert len(items) == sum(len(layer.parameters) for layer in plans[0].layers)
    for index, name in items:
        expected = readers[0].full(index, name).clone()
        for reader in readers[1:]:
            assert torch.equal(reader.full(index, name), expected), (index, name, reader.path)
    assert not (tmp_path / "0" / "zero_to_fp32.py").exists()
    assert readers[1].args["model_parallel_size"] == 2


def start_of(plan):
    from neox.engine import initialize_distributed, open_engine
    from neox.features.table import build_features

    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device, build_features)
    return engine.iteration, engine.schedule.iteration, engine.train_batch(batches(plan, grid.data_rank)).loss


def test_weights_alone(tmp_path):
    saved = str(tmp_path / "saved")
    run_ranks(2, interrupted_runs, [(tiny_plan(2, pp=2, save=saved), tiny_plan(2, pp=2, load=saved))], 2, 1)
    iteration, scheduled, loss = run_ranks(1, start_of, tiny_plan(1, load=saved, no_load_optim=True))[0]
    assert (iteration, scheduled) == (1, 1)
    finetuned = run_ranks(1, start_of, tiny_plan(1, load=saved, finetune=True))[0]
    assert finetuned[:2] == (0, 0)
    assert finetuned[2] == pytest.approx(loss, rel=1e-5)


def save_trained(plans):
    """Take a step under each plan and save."""
    from neox.engine import initialize_distributed, initialize_engine, save_checkpoint
    from neox.features.table import build_features

    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device, build_features)
        engine.train_batch(batches(plan, grid.data_rank))
        save_checkpoint(engine, plan.config.checkpoint.save)


def as_gpt_neox_writes(path, **changed):
    """Take out of a checkpoint what gpt-neox's do not have, and change what else the client states hold."""
    (path / "manifest.json").unlink()
    for file in path.glob("mp_rank_*"):
        state = {key: value for key, value in load_file(file).items() if key not in ("layout", ORDER)}
        file.unlink()  # still mapped
        save_file(file, snapshot({**state, **changed}, HostCopies()))


def assert_elements_are_those_of_shards(reader, index, name, kind):
    """A part in the middle of what each of two tensor ranks, and of what one rank gets."""
    for rank in ((0, 1), (0, 2), (1, 2)):
        whole = reader.shard(index, name, kind, *rank).reshape(-1)
        first, length = whole.numel() // 3, max(1, whole.numel() // 2)
        part = reader.elements(index, name, kind, rank, (first, length))
        assert torch.equal(part, whole[first : first + length]), (index, name, kind, rank)


def assert_refused_with_ways_out(checkpoint):
    with pytest.raises(CheckpointError) as refused:
        begun_start(tiny_plan(2, load=str(checkpoint.parent)))
    for way_out in ("`no_load_optim: true`", "`finetune: true`"):
        assert way_out in str(refused.value)


def test_the_optimizer_state_of_gpt_neox_files(tmp_path):
    """The forms in which gpt-neox's DeepSpeed writes them: without ZeRO, and cut over data ranks."""
    layouts = [{"pp": 2, "zero": 0}, {"zero": 1, **BF16}, {"mp": 2, "zero": 1, **FP16}, {"pp": 2, "zero": 1}]
    layouts += [{"zero": 1, "no_save_optim": True}]
    plans = [tiny_plan(2, save=str(tmp_path / str(n)), **layout) for n, layout in enumerate(layouts)]
    run_ranks(2, save_trained, plans)
    for n, plan in enumerate(plans[:4]):
        ours = find_checkpoint(tmp_path / str(n))
        theirs = shutil.copytree(ours, tmp_path / f"{n}-theirs" / ours.name)
        as_gpt_neox_writes(theirs)
        one, two = OptimizerReader(ours, plan.layers), OptimizerReader(theirs, plan.layers)
        assert (one.step, one.scaler) == (two.step, two.scaler)
        assert two.layout == {**{key: one.layout[key] for key in two.layout if key != WRITER}, WRITER: "gpt-neox"}
        for layer in plan.layers.weight_layers:
            for spec in layer.parameters:
                for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(one.full(layer.index, spec.name, kind), two.full(layer.index, spec.name, kind))
                    for reader in (one, two):
                        assert_elements_are_those_of_shards(reader, layer.index, spec.name, kind)
        start = begun_start(tiny_plan(2, load=str(theirs.parent)))
        assert start.changed[WRITER] == ("gpt-neox", "neox")

    theirs = find_checkpoint(shutil.copytree(tmp_path / "0", tmp_path / "0-refused"))
    as_gpt_neox_writes(theirs, optimizer=None)
    assert_refused_with_ways_out(theirs)
    theirs = find_checkpoint(shutil.copytree(tmp_path / "1", tmp_path / "1-refused"))
    as_gpt_neox_writes(theirs)
    for file in theirs.glob("*optim_states.pt"):
        state = load_file(file)["optimizer_state_dict"]
        file.unlink()  # still mapped
        save_file(file, {"optimizer_state_dict": {key: state[key] for key in state if key != "param_slice_mappings"}})
    assert_refused_with_ways_out(theirs)
    for way_out in ({"no_load_optim": True}, {"finetune": True}):
        assert begun_start(tiny_plan(2, load=str(theirs.parent), **way_out)).checkpoint == theirs
    bare = find_checkpoint(tmp_path / "4")
    assert not list(bare.glob("*optim_states.pt"))
    with pytest.raises(CheckpointError) as refused:
        OptimizerReader(bare, plans[4].layers)
    assert "no_save_optim" in str(refused.value)
    assert "no_load_optim" in str(refused.value)


def test_where_nothing_is_to_load(tmp_path):
    new = str(tmp_path / "new")
    assert begun_start(tiny_plan(1, save=new, load=new)).checkpoint is None
    emptied = tmp_path / "emptied"  # its checkpoints were moved away, but not `latest`
    emptied.mkdir()
    (emptied / "latest").write_text("global_step10")
    assert begun_start(tiny_plan(1, save=str(emptied), load=str(emptied))).checkpoint is None
    with pytest.raises(CheckpointError) as nothing:
        begun_start(tiny_plan(1, load=new))
    assert new in str(nothing.value)
    broken = tmp_path / "broken" / "global_step1"
    broken.mkdir(parents=True)
    (broken / "layer_00-model_00-model_states.pt").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(CheckpointError) as incomplete:
        begun_start(tiny_plan(1, save=str(broken.parent), load=str(broken.parent)))
    assert broken.name in str(incomplete.value)


def test_a_checkpoint_whose_replacement_was_killed_is_resumed(tmp_path):
    """Killed between the two renames, the only checkpoint has another name: it is put back, not forgotten."""
    save = str(tmp_path)
    keys = {"num_layers": 1, "train_micro_batch_size_per_gpu": 2}
    run_ranks(1, save_trained, [tiny_plan(1, save=save, **keys)])
    checkpoint = find_checkpoint(tmp_path)
    for load in ({"load": save}, {}):
        checkpoint.rename(tmp_path / f".replaced-{checkpoint.name}")
        assert begun_start(tiny_plan(1, save=save, **keys, **load)).checkpoint == checkpoint


def save_onto_a_full_disk(plan):
    """Rank 1's disk is full: every rank must hear of it, and nothing may be committed."""
    from neox.engine import initialize_distributed, initialize_engine, save_checkpoint
    from neox.engine.checkpoints import saving
    from neox.features.table import build_features

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device, build_features)
    engine.train_batch(batches(plan, grid.data_rank))
    save_checkpoint(engine, plan.config.checkpoint.save)
    engine.train_batch(batches(plan, grid.data_rank))
    if grid.rank == 1:

        def full(*_):
            raise CheckpointError("No space left on device")

        saving.write_layer = full
    try:
        save_checkpoint(engine, plan.config.checkpoint.save)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_that_cannot_write_fails_the_save_everywhere(tmp_path):
    messages = run_ranks(2, save_onto_a_full_disk, tiny_plan(2, pp=2, save=str(tmp_path)))
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0]
    assert "No space left" in messages[0]
    assert find_checkpoint(tmp_path).name == "global_step1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step1", "latest"]
    assert json.loads((tmp_path / "global_step1" / "manifest.json").read_text())
