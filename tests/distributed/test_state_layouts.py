"""Options that change where DeepSpeed's files have a parameter's states: a resume with another value changes nothing.

Steps after a resume are compared with those of a run that was never interrupted, and so are gradient norms: a step's
norm shows the update of the step before at once.
"""

from __future__ import annotations

import pytest

from tests.distributed.spawn import run_ranks
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
