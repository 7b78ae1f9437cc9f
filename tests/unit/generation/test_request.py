"""Checks of generation requests, and prompts read from files."""

import pytest

from neox.config import NeoXConfig
from neox.errors import GenerationError
from neox.generation.request import check_generation, check_output, notes, read_prompts
from neox.generation.run import write_completions
from tests.errors import raises_naming
from tests.unit.generation.toy import ToyCodec


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_one_prompt_a_line(tmp_path):
    assert read_prompts(write(tmp_path, "p.txt", "one\r\n two \n漢\n\n\n")) == ["one", " two ", "漢"]


def test_the_mark_that_some_editors_begin_a_file_with_is_no_text(tmp_path):
    assert read_prompts(write(tmp_path, "p.txt", "\ufeffone\n")) == ["one"]
    assert read_prompts(write(tmp_path, "p.jsonl", '\ufeff{"text": "one"}\n')) == ["one"]


def test_jsonl(tmp_path):
    text = '{"context": "a\\nb"}\n{"prompt": "c", "id": 1}\n{"text": "d"}\n"e"\n'
    assert read_prompts(write(tmp_path, "p.jsonl", text)) == ["a\nb", "c", "d", "e"]


@pytest.mark.parametrize(
    ("name", "text", "places"),
    [
        ("p.txt", "", ["p.txt:"]),
        ("p.txt", "\n \n", ["p.txt:"]),
        ("p.txt", "a\n\nb\n", ["p.txt:2:"]),
        ("p.jsonl", '{"text": "a"}\n{"text": \n', ["p.jsonl:2:"]),
        ("p.jsonl", '{"question": "a"}\n', ["p.jsonl:1:"]),
        ("p.jsonl", '{"text": "\\ud800"}\n', ["p.jsonl:1:"]),
        ("p.jsonl", "[" * 100_000, ["p.jsonl:1:"]),
        ("p.jsonl", '{"text": 3}\n[]\n', ["p.jsonl:1:", "p.jsonl:2:"]),
    ],
)
def test_bad_files_are_named_with_their_lines(tmp_path, name, text, places):
    with raises_naming(GenerationError, *places, lines=len(places)):
        read_prompts(write(tmp_path, name, text))


def test_missing_and_binary_files(tmp_path):
    with raises_naming(GenerationError, tmp_path / "none.txt", "No such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with raises_naming(GenerationError, tmp_path / "b.txt"):
        read_prompts(tmp_path / "b.txt")


def test_a_file_that_cannot_be_written_is_said_before_and_after(tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out.jsonl"
    with raises_naming(GenerationError, out):
        write_completions(out, [])
    with raises_naming(GenerationError, "sample_output_file", out):
        check_output(NeoXConfig.from_flat({"sample_output_file": str(out)}))
    check_output(NeoXConfig.from_flat({"sample_output_file": str(tmp_path / "new" / "out.jsonl")}))
    assert not list((tmp_path / "new").iterdir())


def test_what_a_run_would_refuse_is_said_without_a_model(tmp_path):
    prompts = write(tmp_path, "p.txt", "abc\nabcdefgh\n")

    def check(codec=None, **keys):
        flat = {"max_position_embeddings": 8, "sample_input_file": str(prompts), "sample_output_file": "o", **keys}
        check_generation(NeoXConfig.from_flat(flat), codec)

    check()
    check(codec=ToyCodec(), max_position_embeddings=9)
    check(codec=ToyCodec(), sample_input_file=None)
    check(num_return_sequences=2, top_k=3)
    check(num_samples=2)  # counts only where there is no file
    for keys, named in (
        ({"codec": ToyCodec()}, ("prompt 2", "8 tokens")),
        ({"sample_output_file": str(prompts)}, ("sample_output_file", prompts)),
        ({"sample_output_file": str(tmp_path)}, ("sample_output_file", tmp_path)),
        ({"sample_output_file": f"{prompts}/new/out"}, ("sample_output_file", prompts)),
        ({"sample_input_file": None, "text_gen_type": "input-file"}, ("text_gen_type", "sample_input_file")),
        ({"num_beams": 2, "stop_strings": ["x"]}, ("stop", "num_beams")),
        ({"num_beams": 2, "return_logits": True}, ("return_logits", "num_beams")),
        ({"num_return_sequences": 2}, ("num_return_sequences is 2",)),
        ({"num_return_sequences": 2, "num_beams": 2}, ("num_return_sequences is 2", "beam")),
        ({"num_samples": 2, "sample_input_file": None}, ("num_samples is 2",)),
    ):
        with raises_naming(GenerationError, *named):
            check(**keys)


def test_what_one_may_not_expect_is_noted():
    assert notes(NeoXConfig.from_flat({"top_p": 0.9, "temperature": 0.5})) == []
    assert "drawing at temperature 1" in notes(NeoXConfig.from_flat({"top_p": 0.9}))[0]
    assert "num_beams is 1" in notes(NeoXConfig.from_flat({"length_penalty": 2.0}))[0]
    both = NeoXConfig.from_flat({"sample_input_file": "p.txt", "text_gen_type": "interactive"})
    assert "instead of text_gen_type interactive" in notes(both)[0]
