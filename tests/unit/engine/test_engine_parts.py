"""What the engine decides without DeepSpeed running: its JSON, device and backend, the environment of a rank."""

import logging
import os

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.accelerator.npu_accelerator import NPU_Accelerator

from neox.engine import device, distributed
from neox.engine.checkpoints.saving import layout_of, neox_client_state
from neox.engine.deepspeed_patches import clips_itself, counts_in_norm, runtime_json
from neox.engine.deepspeed_patches.log import show_deepspeed_log
from neox.engine.deepspeed_patches.startup import accept_architectures, check_deepspeed
from neox.engine.pipeline.instructions import (
    PassOrder,
    PassSchedule,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from neox.errors import LaunchError
from neox.parallel import ParallelGrid, Topology
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES, ranges_per_stage
from tests.plans import SIZES, plan_of


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", sorted(PIPELINE_SCHEDULES))
@pytest.mark.parametrize("stages", [2, 3])
def test_each_message_is_asked_for_received_and_sent_once(name, stages, is_training):
    order = PassOrder(name, stages, ranges_per_stage(name, stages, 3), 2 * stages + 1, is_training)
    sent = []
    received = []
    for stage in range(stages):
        for commands in PassSchedule(order, stage):
            for command in commands:
                if isinstance(command, SendActivation | SendGradient):
                    assert command.message.source == stage
                    sent.append(command.message)
                elif isinstance(command, ReceiveActivation | ReceiveGradient):
                    assert command.message.target == stage
                    received.append(command.message)
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent)
    passes = 2 if is_training else 1
    assert len(sent) == passes * order.micro_batches * (stages * order.ranges - 1)


def plan(world=1, **keys):
    return plan_of(world, 60, **{**SIZES, "gradient_clipping": 1.0, **keys})


@pytest.mark.parametrize(
    ("keys", "world", "ours"),
    [
        ({}, 1, True),
        ({"pipe_parallel_size": 2}, 2, True),
        ({"fp16": {"enabled": True}}, 1, True),
        ({"bf16": {"enabled": True}}, 1, True),
        ({"bf16": {"enabled": True}, "pipe_parallel_size": 2}, 2, False),
        ({"zero_optimization": {"stage": 1}}, 1, False),
        ({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, 1, False),
    ],
)
def test_exactly_one_clips(keys, world, ours):
    p = plan(world, **keys)
    assert clips_itself(p) is ours
    assert runtime_json(p)["gradient_clipping"] == (0.0 if ours else 1.0)
    assert p.deepspeed["gradient_clipping"] == 1.0  # the plan is not changed


def test_messages_between_stages_are_ours():
    assert "pipeline" not in runtime_json(plan(2, model_parallel_size=2))
    given = runtime_json(plan(2, pipe_parallel_size=2))["pipeline"]
    assert given == {"pipe_partitioned": False, "grad_partitioned": False}


def test_the_optimizer_is_ours():
    assert "optimizer" not in runtime_json(plan(optimizer={"type": "Adam", "params": {"lr": 0.1}}))


def test_deepspeeds_lines_appear_when_asked_for():
    assert runtime_json(plan())["steps_per_print"] > 10**6
    assert runtime_json(plan(steps_per_print=7))["steps_per_print"] == 7
    logger = logging.getLogger("DeepSpeed")
    show_deepspeed_log(True)
    assert logger.isEnabledFor(logging.INFO)
    show_deepspeed_log(False)
    assert not logger.isEnabledFor(logging.INFO)


def test_each_parameter_is_counted_once():
    first, second = (ParallelGrid(Topology(tp_size=2), rank) for rank in range(2))
    split, replicated, tied = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    split.model_parallel = True
    tied.model_parallel = True
    tied.ds_pipe_replicated = True
    assert [counts_in_norm(p, first) for p in (split, replicated, tied)] == [True, True, False]
    assert [counts_in_norm(p, second) for p in (split, replicated, tied)] == [True, False, False]


def test_the_backend_of_each_kind_of_device(monkeypatch):
    for asked in ("auto", "nccl", "hccl", "gloo"):
        assert device.choose_backend(asked, torch.device("cpu")) == "gloo"
    assert device.choose_backend("nccl", torch.device("cuda", 0)) == "nccl"
    assert device.choose_backend("gloo", torch.device("cuda", 0)) == "gloo"
    assert device.choose_backend("ccl", torch.device("xpu", 0)) == "ccl"
    for asked, kind in (("hccl", "cuda"), ("nccl", "xpu"), ("nccl", "hpu"), ("gloo", "xpu")):
        with pytest.raises(LaunchError):
            device.choose_backend(asked, torch.device(kind, 0))
    for accelerator, backend in ((CUDA_Accelerator(), "nccl"), (NPU_Accelerator(), "hccl")):
        monkeypatch.setattr(device, "get_accelerator", lambda chosen=accelerator: chosen)
        assert device.choose_backend("auto", torch.device("cuda", 0)) == backend


def test_a_world_that_is_not_the_plans_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError) as missing:
        distributed.initialize_distributed(plan())
    assert "MASTER_PORT" in str(missing.value)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as refused:
        distributed.initialize_distributed(plan())
    assert "MASTER_PORT" not in str(refused.value)


def test_client_state_is_neoxs_and_says_the_layout():
    p = plan(2, pipe_parallel_size=2, zero_optimization={"stage": 1})
    state = neox_client_state(p, ParallelGrid.single(), 12)
    assert state["iteration"] == 12
    assert state["args"]["num_layers"] == 4
    assert state["args"]["padded_vocab_size"] == p.padded_vocab_size
    assert {"random_rng_state", "np_rng_state", "torch_rng_state", "rng_tracker_states"} <= set(state)
    assert layout_of(p)["pp"] == 2
    assert layout_of(p)["zero_stage"] == 1
    bare = neox_client_state(plan(no_save_rng=True), ParallelGrid.single(), 0)
    assert "torch_rng_state" not in bare


@pytest.mark.parametrize("version", ["0.16.9", "0.18.2", "0.19.3+cpu", "0.19.7"])
def test_versions_of_deepspeed_with_wrong_gradients_are_refused(version, monkeypatch):
    monkeypatch.setattr(distributed.deepspeed, "__version__", version)
    with pytest.raises(LaunchError) as refused:
        distributed.initialize_distributed(plan())
    assert version in str(refused.value)
    assert "0.19.8" in str(refused.value)


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+abc", "1.0.0", "0.20.0.dev1"])
def test_later_versions_of_deepspeed_are_taken(version):
    check_deepspeed(version)


def test_deepspeed_builds_for_architectures_with_a_letter(monkeypatch):
    from deepspeed.ops.op_builder.quantizer import QuantizerBuilder

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a;12.0f")
    builder = QuantizerBuilder()
    builder.jit_mode = True
    with pytest.raises(ValueError, match="invalid literal"):  # what DeepSpeed makes of it
        builder.compute_capability_args()
    accept_architectures(os.environ)
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0 9.0;12.0"
    builder.compute_capability_args()
