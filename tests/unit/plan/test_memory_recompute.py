"""What recomputation of blocks, of their attention, and of some blocks only takes off the estimate."""

from dataclasses import replace

import pytest

from neox.plan.devices.device import gpu_device
from neox.plan.memory import stage_memory
from neox.plan.search.fit import check_fit
from tests.plans import plan_of, small_plan

SIZES = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 512,
    "max_position_embeddings": 512,
    "train_micro_batch_size_per_gpu": 4,
    "train_iters": 10,
    "fp16": {"enabled": True},
}
TOKENS = 4 * 512
BOUNDARY = TOKENS * 256 * 2


def activations(**keys):
    return plan_of(**{**SIZES, **keys}).memory.activations


def recomputed(**keys):
    return activations(checkpoint_activations=True, **keys)


def test_attention_that_is_recomputed_keeps_its_input_and_output():
    # copies of q, k, v; scores, dropped weights and masks; and the causal mask
    scores = TOKENS * (3 * 256 * 2 + (2 + 3) * 8 * 512) + 512 * 512
    inputs = TOKENS * 3 * 256 * 2
    # all but the one at work; without recomputation the kernel's copies take the place of its inputs
    assert activations() - recomputed(recompute_granularity="core_attn") == 7 * scores - 8 * inputs
    assert recomputed(recompute_granularity="selective") == recomputed(recompute_granularity="core_attn")
    assert activations() - recomputed(recompute_granularity="full_attn") == 7 * scores


def test_flash_attention_keeps_no_scores():
    flash = {"attention_config": [[["flash"], "all"]]}
    assert recomputed(recompute_granularity="core_attn", **flash) == activations(**flash)
    assert recomputed(recompute_granularity="full_attn", **flash) < activations(**flash)
    keys = {"checkpoint_activations": True, "recompute_granularity": "selective"}
    assert any("recompute_granularity: selective" in note for note in plan_of(**SIZES, **flash, **keys).notes)
    assert not any("recompute_granularity" in note for note in plan_of(**SIZES, **keys).notes)


def test_blocks_that_keep_their_activations_count_whole():
    one_layer = (activations() - activations(num_layers=7)) - 0
    keeping = recomputed(no_recompute_layers=[2, 5])
    assert keeping - recomputed() == 2 * (one_layer - BOUNDARY)
    assert recomputed(no_recompute_layers=list(range(8))) == activations()
    # 0 1 | 2 | 3 4, 5 6, 7: three chunks of two blocks, one of one
    two = {"checkpoint_num_layers": 2}
    assert recomputed(no_recompute_layers=[2], **two) - recomputed(**two) == one_layer


def test_kept_inputs_that_are_divided_or_moved_away_count_less():
    assert recomputed() - recomputed(checkpoint_in_cpu=True) == 7 * BOUNDARY  # the block at work has its input
    keys = {**SIZES, "model_parallel_size": 2, "checkpoint_activations": True, "checkpoint_num_layers": 2}
    whole, divided = (plan_of(2, **keys, partition_activations=on).memory.activations for on in (False, True))
    assert whole - divided == 4 * BOUNDARY // 2 - BOUNDARY  # the input of the block at work is gathered


def test_divided_tokens_count_less():
    keys = {"model_parallel_size": 2, "hidden_dropout": 0.0, "attention_config": [[["flash"], "all"]]}
    for further, boundaries in (({}, 4), ({"checkpoint_activations": True}, 1)):  # input, two norms, the MLP's input
        whole, divided = (
            [plan_of(2, **{**SIZES, **keys, **further, "num_layers": n, "sequence_parallel": on}) for n in (4, 8)]
            for on in (False, True)
        )
        of_layers = [eight.memory.activations - four.memory.activations for four, eight in (whole, divided)]
        assert of_layers[0] - of_layers[1] == 4 * boundaries * BOUNDARY // 2
    assert not plan_of(**{**SIZES, "sequence_parallel": True}).grid.sequence_parallel


def test_each_stage_counts_its_own_blocks():
    plan = plan_of(2, **{**SIZES, "pipe_parallel_size": 2, "checkpoint_activations": True, "no_recompute_layers": [0]})
    plain = plan_of(2, **{**SIZES, "pipe_parallel_size": 2, "checkpoint_activations": True})
    first, last = (stage_memory(plan.workload, stage) for stage in plan.stages)
    assert first.activations > stage_memory(plain.workload, plain.stages[0]).activations
    assert last == stage_memory(plain.workload, plain.stages[1])


def test_a_run_that_does_not_fit_is_told_to_recompute_whole_blocks():
    flash = {
        **SIZES,
        "attention_config": [[["flash"], "all"]],
        "train_micro_batch_size_per_gpu": 1,
        "max_position_embeddings": 4096,
        "seq_length": 4096,  # so that activations, not the update's copies, are the most
        "zero_optimization": {"stage": 1},
    }
    parts = {"checkpoint_activations": True, "recompute_granularity": "core_attn", "no_recompute_layers": [0]}
    plan, whole = plan_of(**flash, **parts), plan_of(**flash, checkpoint_activations=True)
    assert whole.memory.total < plan.memory.total
    device = replace(gpu_device(plan), usable=(whole.memory.total + plan.memory.total) // 2)
    assert dict(check_fit(plan, device).changes) == {"recompute_granularity": "full", "no_recompute_layers": "null"}


def test_the_noise_scale_holds_the_sum_of_gradients():
    keys = {"fp16": {"enabled": True}, "log_gradient_noise_scale": True}
    plain, measured = small_plan(fp16={"enabled": True}), small_plan(**keys)
    assert measured.memory.gradients - plain.memory.gradients == 4 * plain.layers.numel
    assert small_plan(**keys, gradient_noise_scale_cpu_offload=True).memory == plain.memory


@pytest.mark.parametrize("part", ["full", "full_attn", "core_attn"])
def test_recomputation_never_needs_more(part):
    assert recomputed(recompute_granularity=part) < activations()
