"""Worker processes: order, limits, exceptions, and what happens when a process dies."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from neox.errors import DataError
from neox.workers import WorkerPool, ordered_map, read_ahead
from tests.errors import raises_naming


def square(number: int) -> int:
    if number < 0:
        raise DataError(f"{number} is negative")
    return number * number


def broken(number: int) -> object:
    if number == 1:
        return lambda: number  # which cannot be pickled
    raise KeyError(number)


class DiesOnce:
    """Kills its process for the word "kill", as often as a file has letters."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, word: str) -> str:
        left = self.file.read_text()
        if word == "kill" and left:
            self.file.write_text(left[1:])
            os.kill(os.getpid(), 9)
        return word.upper()


@pytest.mark.parametrize("workers", [1, 3])
def test_results_keep_the_order_and_errors_come_in_their_place(workers: int) -> None:
    assert list(ordered_map(square, range(50), workers)) == [(n, n * n) for n in range(50)]
    found = []
    with raises_naming(DataError, "-1"):
        found.extend(result for _, result in ordered_map(square, [3, 2, -1, 4], workers))
    assert found == [9, 4]
    assert multiprocessing.active_children() == []


def test_an_unexpected_error_tells_where_it_was_raised() -> None:
    with pytest.raises(KeyError) as error:
        list(ordered_map(broken, [2], 2))
    assert "in broken" in "".join(error.value.__notes__)
    with pytest.raises(RuntimeError, match="function"):
        list(ordered_map(broken, [1], 2))


def test_items_are_read_only_while_the_limit_allows_it() -> None:
    read: list[int] = []

    def items():
        for weight in (4, 4, 4, 20, 1):
            read.append(weight)
            yield weight

    with WorkerPool(square, 2) as pool:
        results = pool.map(items(), limit=10, size=lambda weight: weight)
        assert next(results) == (4, 16)
        assert len(read) <= 3  # the third waits for the first
        assert list(results) == [(4, 16), (4, 16), (20, 400), (1, 1)]


def test_a_dead_worker_is_replaced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kills = tmp_path / "kills"
    kills.write_text("x")
    assert [result for _, result in ordered_map(DiesOnce(kills), ["a", "kill", "b"], 2)] == ["A", "KILL", "B"]
    assert "signal 9" in caplog.text
    kills.write_text("xx")
    with WorkerPool(DiesOnce(kills), 1, name=lambda word: f"the word {word}") as pool:
        results = pool.map(["a", "kill"], limit=1)
        assert next(results) == ("a", "A")
        with raises_naming(DataError, "the word kill", "signal 9"):
            next(results)
    assert multiprocessing.active_children() == []


def test_a_thread_reads_one_item_ahead() -> None:
    read: list[int] = []
    second = threading.Event()

    def items():
        for number in range(5):
            read.append(number)
            if number == 1:
                second.set()
            yield number
        raise DataError("the end is damaged")

    ahead = read_ahead(items())
    assert next(ahead) == 0
    assert second.wait(10)
    assert read == [0, 1]
    found = []
    with raises_naming(DataError, "damaged"):
        found.extend(ahead)
    assert found == [1, 2, 3, 4]
