"""Whether a model fits where it is only run, against arithmetic by hand."""

import re
from pathlib import Path

import pytest

from neox.plan import config_from_files, format_plan, gpu_device, memory_problem, resolve
from neox.plan.devices.device import gib
from neox.plan.memory.inference import inference_bytes

GIB = 2**30
CONFIGS = Path(__file__).parents[3] / "configs"


def plan_20b(world, pp, mp, **keys):
    degrees = {"pipe_parallel_size": pp, "model_parallel_size": mp, "train_micro_batch_size_per_gpu": 1}
    overrides = [f"{key}={value}" for key, value in {**degrees, "maximum_tokens": 100, **keys}.items()]
    return resolve(config_from_files(["20B.yml"], conf_dir=CONFIGS, overrides=overrides), world, 50257)


def problem_of(plan, size):
    """Why a model cannot be run on GPUs of this size."""
    problem = memory_problem(plan, gpu_device(plan, size), training=False)
    return None if problem is None else problem.text


def test_weights_and_cache_of_20b():
    plan = plan_20b(1, 1, 1)
    cache = 2 * 44 * 8 * 100 * 6144  # keys and values of 8 sequences in 44 blocks
    assert inference_bytes(plan, 1, 1) == 2 * (plan.layers.numel + cache)
    assert inference_bytes(plan_20b(1, 1, 1, inference_precision="fp32"), 1, 1) == 4 * (plan.layers.numel + cache)
    beams = plan_20b(1, 1, 1, num_beams=4, top_p=0, temperature=0)
    assert inference_bytes(beams, 1, 1) == 2 * (plan.layers.numel + cache // 2)
    half = inference_bytes(plan, 2, 1)
    assert 0.5 < half / inference_bytes(plan, 1, 1) < 0.55


@pytest.mark.parametrize(("size", "gpus"), [(80, None), (40, 2), (24, 2), (16, 4), (6, 16)])
def test_the_fewest_gpus_that_hold_it_are_named_and_do(size, gpus):
    problem = problem_of(plan_20b(1, 1, 1), size * GIB)
    if gpus is None:
        assert problem is None
        return
    mp, pp, count = map(
        int, re.search(r"model_parallel_size=(\d+) --set pipe_parallel_size=(\d+) --num_gpus (\d+)", problem).groups()
    )
    assert mp * pp == count == gpus
    assert problem_of(plan_20b(count, pp, mp), size * GIB) is None
    fewer = max(1, gpus // 2)
    assert all(problem_of(plan_20b(fewer, fewer // tensor, tensor), size * GIB) for tensor in (1, fewer))


def test_a_model_that_no_number_of_gpus_holds():
    assert "nor on 64" in problem_of(plan_20b(1, 1, 1), 2.2 * GIB)


def test_the_report_compares_the_memory_of_inference():
    plan = plan_20b(1, 1, 1, gpu_memory_gib=40)
    text = format_plan(plan, training=False)
    assert gib(inference_bytes(plan, 1, 1)) in text
    assert problem_of(plan, None) in text
    assert "--num_gpus" not in format_plan(plan_20b(1, 1, 1, gpu_memory_gib=80), training=False)
