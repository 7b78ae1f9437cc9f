"""Tracebacks among the last lines of a rank, and what reads like a consequence of another rank's end."""

from __future__ import annotations

from neox.launch.failures import begins_failure, failure_text, is_secondary, without_rank_mark


def test_the_last_traceback_with_its_chain() -> None:
    old = ["Traceback (most recent call last):", '  File "a"', "OldError: logged and survived", "went on"]
    first = ["Traceback (most recent call last):", '  File "b"', "KeyError: 'x'", ""]
    chain = ["During handling of the above exception, another exception occurred:", ""]
    last = ["Traceback (most recent call last):", '  File "c"', "ValueError: y"]
    assert failure_text([*old, *first, *chain, *last]) == [*first, *chain, *last]
    assert failure_text([*old, *last]) == last
    assert failure_text([str(number) for number in range(50)]) == [str(number) for number in range(30, 50)]
    fatal = ["Fatal Python error: Segmentation fault", "", "Current thread"]
    assert failure_text([*last, *fatal]) == fatal
    refusal = ["error: the data are wrong", "and so are the keys"]
    assert failure_text([*last, "INFO: a step", *refusal]) == refusal
    assert failure_text(["error: retried", *map(str, range(50))]) == [str(number) for number in range(30, 50)]


def test_a_traceback_as_torch_distributed_prints_it() -> None:
    lines = ["Traceback (most recent call last):", '  File "a"', "KeyError: 'x'", ""]
    lines += ["The above exception was the direct cause of the following exception:", "", *lines[:2], "ValueError: y"]
    marked = [f"[rank11]: {line}" if line else line for line in lines]
    assert failure_text(["INFO: a step", *marked]) == marked
    assert begins_failure(marked[0])
    assert not begins_failure("[rank 3] error: a warning")
    assert without_rank_mark(marked[-1]) == "ValueError: y"


def test_consequences_of_another_death() -> None:
    line = "RuntimeError: [gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:43"
    assert is_secondary([line, "the last line"])
    assert not is_secondary(["ValueError: Connection of the layers"])
    assert not is_secondary([])
