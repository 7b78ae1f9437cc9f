"""Lines between processes."""

from __future__ import annotations

from neox.launch.events import LineBuffer, decode_event, encode_event, text_events


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
