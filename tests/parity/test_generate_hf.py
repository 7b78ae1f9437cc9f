"""Text and scores of a checkpoint are those of its export in transformers: greedy, beams, penalties, perplexities."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from neox.config import NeoXConfig
from neox.convert import to_hf
from neox.evaluation.evaluate import evaluate_tasks
from neox.generation.completion import generate
from neox.generation.load import load_model
from neox.generation.request import SamplingParams
from neox.generation.startup import one_process
from neox.parallel import ParallelGrid
from neox.plan import resolve
from neox.tokenizer import build_tokenizer
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENIZER = build_tokenizer("HFTokenizer", GOLDEN / "data" / "tokenizer.json")
PROMPTS = ["def main(", "The quick brown fox jumps over the lazy dog and", "a", "Ünïcode 漢字, and"]
NEW = 24


class Pair:
    """A checkpoint of several ranks loaded into one process, and its export."""

    def __init__(self, directory: Path, *, parallel_residual: bool, untied: bool, mp: int, pp: int) -> None:
        flat = {
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 96,
            "pos_emb": "rotary",
            "rotary_pct": 0.25,
            "no_weight_tying": untied,
            "gpt_j_residual": parallel_residual,
            "output_layer_parallelism": "column",
            "model_parallel_size": mp,
            "pipe_parallel_size": pp,
            "make_vocab_size_divisible_by": 64,
            "train_micro_batch_size_per_gpu": 4,
            "tokenizer_type": "HFTokenizer",
            "vocab_file": str(GOLDEN / "data" / "tokenizer.json"),
        }
        config = NeoXConfig.from_flat(flat)
        layers = resolve(config, mp * pp, TOKENIZER.vocab_size).layers
        # Large weights: what comes next then depends on everything before, and ties are far away.
        weights = {
            key: 4 * value if value.dim() == 2 else value for key, value in seeded_weights(layers, seed=7).items()
        }
        checkpoint = write_checkpoint(directory / "global_step3", layers, weights, tp_size=mp, pp_size=pp)
        to_hf(checkpoint, config, directory / "hf", verify=False)
        self.hf = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32).eval()
        self.config = one_process(config)
        plan = resolve(self.config, 1, TOKENIZER.vocab_size)
        self.ours = load_model(plan, checkpoint, ParallelGrid.single(), torch.device("cpu"))

    def hf_tokens(self, prompts, **settings):
        """Return the ids transformers adds to each prompt, in one left-padded batch, up to the end-of-document."""
        ids = [TOKENIZER.encode(prompt) for prompt in prompts]
        width = max(map(len, ids))
        batch = torch.tensor([[TOKENIZER.eod] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        settings = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": TOKENIZER.eod, **settings}
        out = self.hf.generate(batch, attention_mask=mask, **settings)[:, width:].tolist()
        return [tuple(row[: row.index(TOKENIZER.eod)] if TOKENIZER.eod in row else row) for row in out]

    def our_tokens(self, prompts, *, recompute=False, **settings):
        self.ours.recompute = recompute
        done = generate(self.ours, prompts, SamplingParams(max_new_tokens=NEW, **settings), TOKENIZER)
        return [completion.tokens for completion in done]


@pytest.fixture(
    scope="module",
    params=[
        {"parallel_residual": True, "untied": True, "mp": 2, "pp": 2},
        {"parallel_residual": False, "untied": False, "mp": 1, "pp": 2},
    ],
    ids=["parallel", "sequential-tied"],
)
def pair(request, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("pair"), **request.param)


def test_greedy_batches_of_different_lengths_with_and_without_cache(pair):
    expected = pair.hf_tokens(PROMPTS)
    assert len(set(expected)) > 1
    assert len(set(expected[0])) > 5, "a model that repeats itself proves little"
    assert pair.our_tokens(PROMPTS) == expected
    assert pair.our_tokens(PROMPTS, recompute=True) == expected


def test_beam_search(pair):
    for prompt in PROMPTS:
        for penalty in (1.0, 0.0, 2.0):
            expected = pair.hf_tokens([prompt], num_beams=4, length_penalty=penalty)
            assert pair.our_tokens([prompt], num_beams=4, length_penalty=penalty) == expected


def test_penalties_and_minimum_length(pair):
    for prompt in PROMPTS:
        for ours, theirs in (
            ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
            ({"min_new_tokens": NEW}, {"min_new_tokens": NEW}),
            ({"num_beams": 3, "repetition_penalty": 1.2}, {"num_beams": 3, "repetition_penalty": 1.2}),
        ):
            assert pair.our_tokens([prompt], **ours) == pair.hf_tokens([prompt], **theirs)


class HFScoring:
    """The exported model as evaluation knows models."""

    device = torch.device("cpu")
    scores_by_length = False

    def __init__(self, model):
        self.model, self.max_length = model, model.config.max_position_embeddings

    def score(self, tokens, labels):
        logits = self.model(tokens).logits.float()
        return logits.log_softmax(-1).gather(2, labels[..., None]).squeeze(2), logits.argmax(-1) == labels


def test_scores(pair, tmp_path):
    text = "The first line , it 's about well @-@ known things .\n Another one , of 3 @,@ 000 words .\n" * 6
    (tmp_path / "wiki.raw").write_text(text)
    passages = ["He said hello to the old man", "Nothing is as it was before", "a b c d"]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    tasks = [
        f"wikitext={tmp_path / 'wiki.raw'}",
        f"lambada={tmp_path / 'l.jsonl'}",
        f"perplexity={tmp_path / 'l.jsonl'}",
    ]
    ours = evaluate_tasks(tasks, pair.ours, TOKENIZER, ParallelGrid.single(), pair.config)
    theirs = evaluate_tasks(tasks, HFScoring(pair.hf), TOKENIZER, ParallelGrid.single(), pair.config)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.counts == other.counts
        for name, value in mine.metrics.items():
            assert value == pytest.approx(other.metrics[name], rel=1e-4), (mine.task, name)
