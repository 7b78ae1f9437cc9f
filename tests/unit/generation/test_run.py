"""Output files of generation runs: atomic writes, and resuming an interrupted run."""

import json
import logging
import os

import pytest

from neox.errors import GenerationError
from neox.generation.completion import Completion
from neox.generation.run import write_completions
from tests.errors import raises_naming
from tests.unit.generation.interrupted_run import PROMPTS, Interrupting, Run, interrupt


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.mark.parametrize("keys", [{}, {"return_logits": True}], ids=str)
def test_the_same_run_reads_only_what_is_left(run, keys):
    whole = Interrupting()
    run(whole, **keys)
    assert whole.began == [[4, 3], [2, 1], [1]]
    assert not run.partial.exists()
    expected = run.written()
    assert [record["context"] for record in expected] == PROMPTS
    run.out.unlink()

    interrupt(run, **keys)
    assert not run.out.exists()
    assert len(run.partial.read_text().splitlines()) == 1 + 4
    interrupt(run, last=0, **keys)  # loses nothing
    rest = Interrupting()
    run(rest, **keys)
    assert rest.began == [[1]]
    assert run.written() == expected
    assert not run.partial.exists()


def test_a_line_that_was_cut_is_made_again(run):
    interrupt(run)
    run.partial.write_bytes(run.partial.read_bytes()[:-3])
    rest = Interrupting()
    run(rest)
    assert rest.began == [[1, 1]]
    assert [record["context"] for record in run.written()] == PROMPTS


def test_an_output_that_could_not_be_written_costs_nothing(run):
    run.out.mkdir()
    with raises_naming(GenerationError, run.out):
        run(Interrupting())
    run.out.rmdir()
    rest = Interrupting()
    run(rest)
    assert rest.began == []
    assert [record["context"] for record in run.written()] == PROMPTS


@pytest.mark.parametrize("change", ["prompts", "settings", "weights"])
def test_another_run_starts_over_and_says_so(run, change, caplog):
    interrupt(run)
    keys = {}
    if change == "prompts":
        run.prompts.write_text("\n".join([*PROMPTS[:-1], "l"]))
    elif change == "settings":
        keys = {"seed": 5}
    else:
        os.utime(run.checkpoint, (1, 1))  # saved at another time
    model = Interrupting()
    with caplog.at_level(logging.WARNING, logger="neox"):
        run(model, **keys)
    assert len(model.began) == 3
    assert str(run.partial) in caplog.text
    assert not run.partial.exists()


def test_a_broken_file_is_named(run):
    interrupt(run)
    run.partial.write_text(run.partial.read_text() + "[1]\n")
    with raises_naming(GenerationError, "out.jsonl.partial"):
        run(Interrupting())


def test_completions_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "out.jsonl"
    done = Completion("a", "ü\n", 2, True, 0.5)
    write_completions(path, [done])
    assert json.loads(path.read_text()) == {
        "context": "a",
        "text": "ü\n",
        "length": 2,
        "finished": True,
        "duration": 0.5,
    }

    def failing():
        yield done
        raise GenerationError("no more")

    with raises_naming(GenerationError, "no more"):
        write_completions(path, failing())
    assert len(path.read_text().splitlines()) == 1
    assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]


def test_completions_of_an_earlier_run_are_kept(tmp_path):
    path = tmp_path / "out.jsonl"
    for text in ("one", "two", "three"):
        write_completions(path, [Completion("a", text, 2, True, 0.5)])
    found = {file.name: json.loads(file.read_text())["text"] for file in tmp_path.iterdir()}
    assert found == {"out.1.jsonl": "one", "out.2.jsonl": "two", "out.jsonl": "three"}
