"""A run of many prompts that is interrupted goes on where it was, and only where its completions are the same."""

import json
import logging
import os

import pytest

from neox.config import NeoXConfig, resolve
from neox.errors import GenerationError
from neox.generation import run_generation
from neox.parallel import ParallelGrid
from tests.unit.generation.toy import ToyCodec, ToyModel, hashed

PROMPTS = ["ab", "c", "defg", "hij", "k"]


class Interrupting(ToyModel):
    """Is interrupted when batch number `last` begins; counts the batches that it began."""

    def __init__(self, last=99):
        super().__init__(hashed)
        self.last, self.began = last, []

    def begin(self, lengths, capacity):
        self.began.append(list(lengths))
        if len(self.began) > self.last:
            raise KeyboardInterrupt
        return super().begin(lengths, capacity)


class Run:
    """The same command, as often as it is called."""

    def __init__(self, directory):
        self.prompts, self.out = directory / "p.txt", directory / "out.jsonl"
        self.partial, self.checkpoint = directory / "out.jsonl.partial", directory / "global_step1"
        self.prompts.write_text("\n".join(PROMPTS))
        self.checkpoint.mkdir()

    def __call__(self, model, **keys):
        flat = {
            "num_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "seq_length": 64,
            "pos_emb": "none",
            "train_micro_batch_size_per_gpu": 1,
            "sample_input_file": str(self.prompts),
            "sample_output_file": str(self.out),
            "maximum_tokens": 6,
            "temperature": 1.0,
            "generation_batch_size": 2,
            **keys,
        }
        plan = resolve(NeoXConfig.from_flat(flat), 1, 27)
        return run_generation(plan, model, ToyCodec(), ParallelGrid.single(), self.checkpoint)

    def written(self):
        records = [json.loads(line) for line in self.out.read_text().splitlines()]
        return [{key: value for key, value in record.items() if key != "duration"} for record in records]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def interrupt(run, last=2, **keys):
    with pytest.raises(KeyboardInterrupt):
        run(Interrupting(last), **keys)


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
    with pytest.raises(GenerationError, match="cannot be written"):
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
    assert "with other prompts, settings or weights" in caplog.text
    assert not run.partial.exists()


def test_a_broken_file_is_named(run):
    interrupt(run)
    run.partial.write_text(run.partial.read_text() + "[1]\n")
    with pytest.raises(GenerationError, match=r"out.jsonl.partial: is broken .* remove it to start over"):
        run(Interrupting())
