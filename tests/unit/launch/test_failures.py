"""Tracebacks among the last lines of a rank, and what reads like a consequence of another rank's end."""

from __future__ import annotations

from neox.launch.failures import failure_text, is_secondary


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


def test_consequences_of_another_death() -> None:
    assert is_secondary(["RuntimeError: [gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:43"])
    assert not is_secondary(["ValueError: Connection of the layers"])
    assert not is_secondary([])
