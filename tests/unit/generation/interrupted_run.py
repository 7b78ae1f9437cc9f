"""A run over a file of prompts that can be interrupted between its batches, and the command that starts it again."""

import json

import pytest

from neox.config import NeoXConfig
from neox.generation.run import run_generation
from neox.parallel import ParallelGrid
from neox.plan import resolve
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

    def __call__(self, model, *, grid=None, **keys):
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
        grid = grid or ParallelGrid.single()
        plan = resolve(NeoXConfig.from_flat(flat), grid.world_size, 27)
        return run_generation(plan, model, ToyCodec(), grid, self.checkpoint)

    def written(self):
        records = [json.loads(line) for line in self.out.read_text().splitlines()]
        return [{key: value for key, value in record.items() if key != "duration"} for record in records]


def interrupt(run, last=2, **keys):
    with pytest.raises(KeyboardInterrupt):
        run(Interrupting(last), **keys)
