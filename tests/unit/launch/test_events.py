"""Lines between processes, tracebacks among the last lines, and what reads like a consequence."""

from __future__ import annotations

from neox.launch.events import LineBuffer, decode_event, encode_event, failure_text, is_secondary, text_events


def test_events_survive_and_other_text_is_none() -> None:
    event = {"kind": "line", "rank": 3, "text": 'new\nline "quoted" \u2603'}
    assert "\n" not in encode_event(event)
    assert decode_event(encode_event(event)) == event
    for text in ("", "hello", "@neox", "@neox {", '@neox ["list"]', '@neox {"no": "kind"}'):
        assert decode_event(text) is None


def test_long_lines_travel_in_pieces() -> None:
    pieces = list(text_events({"kind": "line"}, "x" * 4000))
    assert "".join(piece["text"] for piece in pieces) == "x" * 4000
    assert [piece["more"] for piece in pieces] == [True, True, False]
    assert list(text_events({"kind": "line"}, "")) == [{"kind": "line", "text": "", "more": False}]


def test_lines_out_of_a_stream() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"one\r\ntw") == ["one"]
    assert buffer.pending() == "tw"
    assert buffer.feed(b"o\n\xff\nrest") == ["two", "\ufffd"]
    assert buffer.flush() == ["rest"]
    assert buffer.flush() == []
    buffer.feed("ask \u2603".encode()[:-1])
    assert buffer.pending() == "ask "


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
