"""Tasks scored on a model in training give the same values under every engine and layout."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from neox.config import NeoXConfig
from neox.engine import initialize_distributed, initialize_engine
from neox.errors import EvaluationError
from neox.evaluation.evaluate import evaluate_in_training
from neox.features.eval_tasks.run import EvalTasks
from neox.plan import resolve
from neox.tokenizer import build_tokenizer
from tests.distributed.spawn import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden"


def scores(text: str, layouts: list[dict]) -> list[dict[str, float]]:
    """Score `text` with initial weights, once for each layout; called by every rank."""
    tokenizer = build_tokenizer("HFTokenizer", GOLDEN / "data" / "tokenizer.json")
    results = []
    for layout in layouts:
        flat = {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "seq_length": 32,
            "pos_emb": "rotary",
            "no_weight_tying": False,
            "hidden_dropout": 0.5,
            "attention_dropout": 0.5,
            "output_layer_parallelism": "column",
            "make_vocab_size_divisible_by": 512,
            "train_micro_batch_size_per_gpu": 1,
            "distributed_backend": "gloo",
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "eval_tasks": [f"wikitext={text}"],
            "init_method": "normal",
            "init_method_std": 0.5,
            **layout,
        }
        plan = resolve(NeoXConfig.from_flat(flat), 2, tokenizer.vocab_size)
        grid, device = initialize_distributed(plan)
        ds_engine = initialize_engine(plan, grid, device).deepspeed_engine
        ds_engine.train()
        before = torch.get_rng_state()
        results.append(evaluate_in_training(plan, ds_engine, grid, device, tokenizer))
        assert ds_engine.training
        assert torch.equal(torch.get_rng_state(), before)
    return results


def refusal(task: str) -> str:
    """Return what training says of a task at its start; called by every rank."""
    keys = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "pos_emb": "rotary"}
    files = {"tokenizer_type": "HFTokenizer", "vocab_file": str(GOLDEN / "data" / "tokenizer.json")}
    rest = {"seq_length": 32, "train_micro_batch_size_per_gpu": 1, "eval_tasks": [task]}
    plan = resolve(NeoXConfig.from_flat({**keys, **files, **rest}), 2, 1000)
    with pytest.raises(EvaluationError) as caught:
        EvalTasks(SimpleNamespace(plan=plan))  # before it looks at the model
    return str(caught.value)


def test_training_says_at_its_start_on_every_rank_which_tasks_it_cannot_score(tmp_path):
    (tmp_path / "empty.raw").touch()
    for answer in run_ranks(2, refusal, f"wikitext={tmp_path}/empty.raw"):
        assert "eval_tasks: wikitext" in answer
        assert f"{tmp_path}/empty.raw" in answer


def test_every_engine_scores_alike(tmp_path):
    text = tmp_path / "wiki.raw"
    text.write_text("One line , of words .\n Another @-@ one , it 's short .\n" * 8)
    layouts = [
        {"pipe_parallel_size": 2},
        {"model_parallel_size": 2},
        {"zero_optimization": {"stage": 3}},
    ]
    first, *others = run_ranks(2, scores, str(text), layouts)
    for answers in (first, *others):
        for answer in answers:
            assert set(answer) == {f"eval/wikitext_{name}" for name in ("ppl", "word_ppl", "loss", "bits_per_byte")}
            assert answer == pytest.approx(first[0], rel=1e-5)
    assert first[0]["eval/wikitext_loss"] > 1
