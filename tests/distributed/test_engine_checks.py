"""The checks of `tests/gpu` on a CPU, so that on a GPU only the GPU is new."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan
from tests.gpu import engine_checks as checks


def everyday():
    """The checks of what most runs do, one after the other in one process, as on a GPU."""
    with tempfile.TemporaryDirectory() as directory:
        checks.losses_follow_the_plain_loop("bf16", 1)
        checks.updates_wait_for_copies()
        checks.generates_what_the_cpu_does(Path(directory, "text"))


def the_rest():
    """Every precision and ZeRO stage, experts, fp8, dropout with recomputation, and resumed runs."""
    checks.experts_in_bf16_follow_fp32()
    checks.fp8_follows_bf16("tensorwise")
    for precision in checks.PRECISIONS:
        for zero in range(4):
            checks.losses_follow_the_plain_loop(precision, zero)
    checks.recomputation_repeats_dropout()
    with tempfile.TemporaryDirectory() as directory:
        for precision, zero in (("fp32", 0), ("bf16", 1), ("fp16", 2), ("bf16", 3)):
            checks.a_resumed_run_goes_on(Path(directory, f"{precision}-{zero}"), precision, zero)


def test_everyday_checks():
    run_ranks(1, everyday)


@pytest.mark.slow
def test_all_checks():
    run_ranks(1, the_rest, timeout=500)


def test_big_networks_have_the_weights_of_a_cpu():
    checks.big_networks_have_the_weights_of_a_cpu(torch.device("cpu"))


def start_with_extensions(directory):
    from neox.engine import initialize_distributed

    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
    initialize_distributed(tiny_plan(1))


def test_a_start_builds_no_extension(tmp_path):
    """Every build of one would wait without an end for the lock that a killed build has left."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    run_ranks(1, start_with_extensions, tmp_path, timeout=100)
    assert sorted(tmp_path.rglob("*")) == [lock.parent, lock]
