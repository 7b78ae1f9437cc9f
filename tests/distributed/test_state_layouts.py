"""Options that change where DeepSpeed's files have a parameter's states: a resume with another value changes nothing.

Steps after a resume are compared with those of a run that was never interrupted, and so are gradient norms: a step's
norm shows the update of the step before at once.
"""

from __future__ import annotations

import pytest

from neox.checkpoint.optimizer.file_formats import RankFiles, groups_in_files, read_groups
from neox.checkpoint.weights.tensor_files import load_file
from neox.checkpoint_files.names import mp_rank_file
from tests.distributed.spawn import run_ranks
from tests.distributed.test_reshard import STEPS as BETWEEN_RESUMES
from tests.distributed.test_reshard import relay_and_still
from tests.distributed.training_runs import batches, tiny_plan

SAVED_AT = 2
STEPS = 4
# With a small eps Adam would take steps of full length along gradients that are rounding only.
SMALL = {
    "num_layers": 2,
    "warmup": 0.0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.005, "betas": [0.9, 0.95], "eps": 1e-5}},
}
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 1, "no_weight_tying": True}
DIVIDED = {"expert_model_parallel_size": 2}
BF16 = {"precision": "bf16"}


def dealt(stage, **keys):
    """Keys of a run whose parameters DeepSpeed deals to the data ranks."""
    return {"zero_optimization": {"stage": stage, "round_robin_gradients": True, **keys}}


def curves(plans, *, deepspeeds_places=False):
    """For each plan: (loss, norm) of steps from its start, or from the checkpoint that it loads; saves on the way.

    deepspeeds_places: note the places of parameters as DeepSpeed does, and former versions of this program did.
    """
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    if deepspeeds_places:
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        from neox.engine.deepspeed_patches.zero_optimizer import ZeroOptimizer

        ZeroOptimizer._link_all_hp_params = DeepSpeedZeroOptimizer._link_all_hp_params
    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        start = engine.iteration
        data = batches(plan, grid.data_rank, start=start * plan.batch.gradient_accumulation_steps)
        results = []
        for step in range(start, STEPS):
            if step == SAVED_AT and plan.config.checkpoint.save:
                save_checkpoint(engine, plan.config.checkpoint.save)
            result = engine.train_batch(data)
            results.append((result.loss, result.grad_norm))
        answers.append(results)
    return answers


def assert_resumes(path, saved, loading, *, rounding=1e-5, alone=(), deepspeeds_places=False, world=2, **keys):
    """Resume checkpoints under other keys.

    saved: keys of each run that saves. loading: keys of each run that resumes, after each of them. alone: keys of runs
    of one rank that resume, too.
    """
    keys = {**SMALL, **keys}
    places = [str(path / f"saved_{number}") for number in range(len(saved))]
    plans = [tiny_plan(world, **{**keys, **own}, save=place) for own, place in zip(saved, places, strict=True)]
    whole = run_ranks(world, curves_as_deepspeed if deepspeeds_places else curves, plans, timeout=200)[0]
    for size, runs in ((world, loading), (1, alone)):
        pairs = [(number, own) for number in range(len(saved)) for own in runs]
        resuming = [tiny_plan(size, **{**keys, **own}, load=places[number]) for number, own in pairs]
        found = run_ranks(size, curves, resuming, timeout=200)[0] if pairs else []
        for (number, own), got in zip(pairs, found, strict=True):
            assert len(got) == STEPS - SAVED_AT
            for (loss, norm), (loss_1, norm_1) in zip(got, whole[number][SAVED_AT:], strict=True):
                assert loss == pytest.approx(loss_1, rel=rounding), (saved[number], own, size)
                assert norm == pytest.approx(norm_1, rel=10 * rounding), (saved[number], own, size)


def curves_as_deepspeed(plans):
    return curves(plans, deepspeeds_places=True)


def misplaced(plans):
    """On this rank, for each plan: parameters whose fp32 weights are not where `optimizer_tensors` says."""
    import torch

    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.optimizer_tensors import optimizer_tensors, parameter_names
    from neox.parallel import first_own_element

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        model = engine.deepspeed_engine.module
        names = parameter_names(model, plan.layers)
        weights = {names[id(parameter)]: parameter for parameter in model.parameters()}
        found = []
        wrapper = engine.deepspeed_engine.optimizer
        for item in optimizer_tensors(plan, grid, model, wrapper, engine.optimizer):
            for part in item.fragments:
                weight = weights[part.key].detach().reshape(-1)
                first = part.first - first_own_element(weights[part.key])
                held = item.tensor.view(-1)[part.start : part.start + part.length]
                if not torch.equal(held.to(weight.dtype), weight[first : first + part.length]):
                    found.append(part.key)
        answers.append(found)
    return answers


def test_places_of_parameters():
    """What is loaded, averaged, counted by layer or cut into matrices follows these places."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    keys = [
        *({"zero": 1}, dealt(1), dealt(2), dealt(1, **offload), {**dealt(2), **BF16}, {**dealt(1), **BF16}),
        {**dealt(1), **DIVIDED, **EXPERTS},
    ]
    plans = [tiny_plan(2, **{**SMALL, **own}) for own in keys]
    for own, first, second in zip(keys, *run_ranks(2, misplaced, plans, timeout=100), strict=True):
        assert not first, own
        assert not second, own


def test_dealt_parameters(tmp_path):
    assert_resumes(
        tmp_path,
        [dealt(1), {"zero": 1}],
        [{"zero": 1}, dealt(2)],
        alone=[dealt(1)],
    )


@pytest.mark.slow
def test_dealt_parameters_of_three_ranks_and_offloaded_ones(tmp_path):
    keys = {"train_batch_size": 6, "hidden_size": 36}
    offload = dealt(2, offload_optimizer={"device": "cpu"})
    assert_resumes(tmp_path, [dealt(1), offload], [{"zero": 3}, dealt(1), offload], alone=[{}], world=3, **keys)


def test_dealt_parameters_in_files_of_former_versions(tmp_path):
    """The files of DeepSpeed itself, and so gpt-neox's, say that parameters are where they are not."""
    assert_resumes(tmp_path, [dealt(1)], [{"zero": 1}, dealt(1)], alone=[{}], deepspeeds_places=True)
    (saved,) = (tmp_path / "saved_0").glob("global_step*")
    client = load_file(saved / mp_rank_file(0))
    files = RankFiles(sorted(saved.glob("*optim_states.pt")))
    assert groups_in_files(files) == read_groups(client), "gpt-neox does not write them"


@pytest.mark.slow
def test_dealt_experts(tmp_path):
    saved = [{**dealt(1), **DIVIDED}, {**dealt(2), **DIVIDED}]
    loading = [{"zero": 1}, {"zero": 2, **DIVIDED}, {**dealt(1), **DIVIDED}]
    assert_resumes(tmp_path / "a", saved, loading, alone=[{}], **EXPERTS)
    assert_resumes(tmp_path / "b", saved[:1], loading, alone=[{}], deepspeeds_places=True, **EXPERTS)
    four = {**EXPERTS, "train_batch_size": 8}
    assert_resumes(tmp_path / "c", saved, loading, alone=[{}], world=4, **four)


@pytest.mark.slow
def test_dealt_matrices_of_muon(tmp_path):
    """Muon finds its matrices by the noted places."""
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.003}}}
    assert_resumes(tmp_path, [dealt(1), {"zero": 1}], [{"zero": 1}, dealt(2)], rounding=3e-4, **muon)


@pytest.mark.slow
def test_dealt_parameters_in_bf16(tmp_path):
    """ZeRO 1 has a wrapper of its own for bf16, which ignores the key."""
    loading = [{"zero": 1}, dealt(2), dealt(1)]
    assert_resumes(tmp_path, [dealt(1), dealt(2)], loading, rounding=3e-3, **BF16)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
LAYOUTS = [
    {"stage": 3, "sub_group_size": 2000},
    {"stage": 1, "round_robin_gradients": True},
    {"stage": 3, "sub_group_size": 300, "stage3_param_persistence_threshold": 0},
    {"stage": 0},
    {"stage": 2, **OFFLOAD},
    {"stage": 3, "stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": 10**4},
    {"stage": 2, "contiguous_gradients": False, "round_robin_gradients": True},
    {"stage": 1, "reduce_bucket_size": 500, "allgather_bucket_size": 200},
    {"stage": 3, "sub_group_size": 500, **OFFLOAD},
    {"stage": 1, **OFFLOAD},
    {"stage": 2, "reduce_scatter": False, "overlap_comm": True},
]
"""Values of every key of ZeRO that changes where a parameter's states are in DeepSpeed's files, or that might."""


def assert_relay(path, layouts, *, world, tolerance, **keys):
    """A run that resumes in one layout after the other has the losses and loss scales of one in a single layout."""
    keys = {**SMALL, **keys}
    save = str(path / "relay")
    relayed = [tiny_plan(world, **{**keys, **layout}, save=save, load=save) for layout in layouts]
    still = tiny_plan(world, **keys, zero=1, save=str(path / "still"))
    got, expected = run_ranks(world, relay_and_still, relayed, still, timeout=300)[0]
    assert len(got) == len(layouts) * BETWEEN_RESUMES
    for step, ((loss, scale), (loss_1, scale_1)) in enumerate(zip(got, expected, strict=True)):
        assert loss == pytest.approx(loss_1, rel=tolerance), layouts[step // BETWEEN_RESUMES]
        assert scale == scale_1


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_every_key_of_zero_in_one_run(tmp_path, world):
    """Groups of three decays and rates; with three ranks no group's size divides evenly."""
    groups = [{"match": "attention.*bias", "lr_factor": 0.1, "weight_decay": 0.3}, {"match": "norm.*", "frozen": True}]
    keys = {"hidden_size": 36, "train_batch_size": 6, "parameter_groups": groups}
    assert_relay(tmp_path, [{"zero_optimization": zero} for zero in LAYOUTS], world=world, tolerance=1e-5, **keys)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 3e-3), ("fp16", 3e-3)])
def test_every_key_of_zero_in_16_bits(tmp_path, precision, tolerance):
    """bf16 has a wrapper of its own with ZeRO 1, and with offload or `grad_accum_dtype` DeepSpeed's."""
    keys = {"bf16": {"precision": "bf16"}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}[precision]
    layouts = [{"zero_optimization": zero} for zero in LAYOUTS]
    if precision == "bf16":
        layouts.insert(5, {"zero": 1, "data_types": {"grad_accum_dtype": "bf16"}})
    assert_relay(tmp_path, layouts, world=2, tolerance=tolerance, **keys)


@pytest.mark.slow
def test_every_key_of_zero_with_experts(tmp_path):
    """Ranks divide experts in every second layout."""
    layouts = []
    for zero in LAYOUTS:
        divides = zero.get("reduce_scatter", True) and zero.get("contiguous_gradients", True)
        for keys in (DIVIDED, {}) if divides else ({},):
            layouts.append({"zero_optimization": zero, **keys})
    assert_relay(tmp_path, layouts, world=4, tolerance=1e-5, train_batch_size=8, **EXPERTS)
