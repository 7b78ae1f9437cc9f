"""The test tool itself: order, tracebacks, hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.distributed.spawn import RankError, run_ranks


def sum_of_ranks(extra: float) -> tuple[torch.Tensor, str]:
    value = torch.tensor([float(os.environ["RANK"]) + extra])
    torch.distributed.all_reduce(value)
    return value, os.environ["LOCAL_RANK"]


def one_fails() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("told to fail")
    time.sleep(60)


def one_hangs() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


def test_results_come_in_rank_order():
    results = run_ranks(3, sum_of_ranks, 1.0)
    assert [rank for _, rank in results] == ["0", "1", "2"]
    assert all(value.item() == 6.0 for value, _ in results)


def test_the_first_traceback_is_raised_and_nobody_waits_for_the_others():
    started = time.monotonic()
    with pytest.raises(RankError, match="told to fail"):
        run_ranks(2, one_fails)
    assert time.monotonic() - started < 30


def test_a_hang_is_an_error_that_names_the_ranks():
    with pytest.raises(RankError, match="still running"):
        run_ranks(2, one_hangs, timeout=4)
