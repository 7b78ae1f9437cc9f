"""The engine on a GPU, in one process: precisions and ZeRO stages, recomputation, compilation, saves, generation."""

from __future__ import annotations

from shutil import which

import pytest
import torch

from neox.ops import FP8_RECIPES
from tests.gpu import engine_checks as checks
from tests.plans import RECORDED_NETWORKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("precision", checks.PRECISIONS)
def test_losses_follow_the_plain_loop(precision: str, zero: int):
    checks.losses_follow_the_plain_loop(precision, zero)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_losses_follow_the_plain_loop(tmp_path, device: str):
    where = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    zero = {"stage": 3, "offload_optimizer": where, "offload_param": where}
    checks.losses_follow_the_plain_loop("bf16", 3, zero_optimization=zero)


@pytest.mark.skipif(which("nvcc") is None, reason="needs a CUDA toolkit, with which DeepSpeed compiles its kernel")
@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_quantised_communication_follows_the_plain_loop(key: str):
    checks.losses_follow_the_plain_loop("bf16", 3, zero_optimization={"stage": 3, key: True})


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_in_bf16_follow_fp32(recompute: bool):
    checks.experts_in_bf16_follow_fp32(checkpoint_activations=recompute)


def test_recomputation_repeats_dropout():
    checks.recomputation_repeats_dropout()


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_train(recompute: bool):
    checks.losses_follow_the_plain_loop("bf16", 1, compile_layers=True, checkpoint_activations=recompute)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)
@pytest.mark.parametrize("keys", [{}, {"compile_layers": False}, {"checkpoint_activations": True}])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_fp8_follows_bf16(recipe: str, keys: dict[str, bool]):
    checks.fp8_follows_bf16(recipe, **keys)


@pytest.mark.parametrize(("precision", "zero"), [("fp32", 0), ("bf16", 1), ("fp16", 2), ("bf16", 3)])
def test_a_resumed_run_goes_on(tmp_path, precision: str, zero: int):
    checks.a_resumed_run_goes_on(tmp_path, precision, zero)


def test_updates_wait_for_copies():
    checks.updates_wait_for_copies()


def test_generates_what_the_cpu_does(tmp_path):
    checks.generates_what_the_cpu_does(tmp_path)


@pytest.mark.parametrize("name", RECORDED_NETWORKS)
def test_recorded_steps_give_the_usual_logits(name: str):
    checks.recorded_steps_give_the_usual_logits(torch.device("cuda"), name)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("lengths", [(3, 6, 5), (4,)])
def test_recorded_steps_in_half_precision(dtype: str, lengths: tuple[int, ...]):
    checks.recorded_steps_give_the_usual_logits(torch.device("cuda"), "llama", dtype, lengths)


def test_big_networks_have_the_weights_of_a_cpu():
    checks.big_networks_have_the_weights_of_a_cpu(torch.device("cuda"))
