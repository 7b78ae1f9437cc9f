"""Text of tokens as they come."""

from neox.generation.text_stream import TextStream
from neox.tokenizer import Tokenizer


class ByteCodec(Tokenizer):
    """Ids are UTF-8 bytes."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    end_ids = (256,)

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def _content(self):
        return None


def stream(text, stop=()):
    """Push every byte; return (pieces, the last piece, the stream)."""
    it = TextStream(ByteCodec(), stop)
    pieces = []
    for token in ByteCodec().encode(text):
        if not it.stopped:
            pieces.append(it.push(token))
    return pieces, it.finish(), it


def test_characters_come_whole():
    pieces, last, it = stream("aé漢🙂b")
    assert [p for p in pieces if p] == ["a", "é", "漢", "🙂", "b"]
    assert (last, it.text) == ("", "aé漢🙂b")


def test_an_unfinished_character_comes_at_the_end():
    it = TextStream(ByteCodec())
    assert [it.push(token) for token in "a漢".encode()[:-1]] == ["a", "", ""]
    assert it.finish() == "\ufffd"
    assert it.text == "a\ufffd"


def test_a_stop_string_across_tokens():
    pieces, last, it = stream("one END two", ("END",))
    assert ("".join(pieces) + last, it.text, it.stopped) == ("one ", "one ", True)


def test_the_earliest_stop_string_wins():
    _, _, it = stream("abcdef", ("cd", "bc"))
    assert it.text == "a"


def test_what_only_began_like_a_stop_string_is_given():
    pieces, last, it = stream("ab EN", ("END",))
    assert "".join(pieces) == "ab "
    assert last == "EN"
    assert not it.stopped
