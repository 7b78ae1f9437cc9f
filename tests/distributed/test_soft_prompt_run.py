"""A soft prompt trains on a network that stays as it is, and goes on under another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.test_reshard import relay
from tests.distributed.training_runs import tiny_plan


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.name[:8]}.{name}": tensor
        for file in sorted(path.glob("global_step2/layer_*-model_00-*"))
        for name, tensor in torch.load(file, weights_only=True).items()
    }


@pytest.mark.slow
def test_a_soft_prompt_starts_as_its_text_and_goes_on_under_another_layout(tmp_path: Path) -> None:
    base, tuned, more = (str(tmp_path / name) for name in ("base", "tuned", "more"))
    keys: dict[str, Any] = {"num_layers": 2, "padded_vocab_size": 512, "train_iters": 8, "no_weight_tying": True}
    text = {"enabled": True, "num_tokens": 3, "init_string": "ab"}
    prompt = {**keys, "soft_prompt_tuning": text, "tokenizer_type": "CharLevelTokenizer"}
    plans = [tiny_plan(2, save=base, **keys), tiny_plan(2, zero=1, load=base, finetune=True, save=tuned, **prompt)]
    run_ranks(2, relay, plans, 2, timeout=300)
    on = tiny_plan(2, mp=2, zero=1, load=tuned, save=more, **prompt)
    still = tiny_plan(2, zero=1, load=base, finetune=True, save=str(tmp_path / "still"), **prompt)
    resumed = run_ranks(2, relay, [on], 2, timeout=300)[0]
    undisturbed = run_ranks(2, relay, [still], 4, timeout=300)[0]
    assert [loss for loss, _ in resumed] == pytest.approx([loss for loss, _ in undisturbed[2:]], rel=1e-5)
    before, after = weights_of(tmp_path / "base"), weights_of(tmp_path / "tuned")
    learned = after.pop("layer_01.soft_embedding_weight")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    started = before["layer_00.word_embeddings.weight"][[ord("a"), ord("b"), ord("a")]]
    assert 0 < (learned - started).abs().max() < 0.05
