"""docs/recipes/11-hybrid.md: an imported hybrid is fine-tuned by LoRA on packed conversations, and exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.pages import ENVIRONMENT, ROOT, type_page

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def loss_of_answers(model: Any, tokenizer: Any, chats: list[Any]) -> float:
    """Mean loss of the tokens of answers, each conversation by itself."""
    losses = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt")["input_ids"]
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        begin = prompt.shape[1]
        assert torch.equal(ids[:, :begin], prompt)
        with torch.inference_mode():
            logits = model(ids).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[begin - 1 : -1], ids[0, begin:], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.slow
@pytest.mark.timeout(3600)  # six commands, each with a limit of its own
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "olmo_hybrid"])
def test_a_hybrid_is_fine_tuned_on_conversations(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "data").mkdir()
    chats = [
        [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(60)
    ]
    (tmp_path / "data" / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    texts = [json.dumps({"text": f"user: {n} + 1? assistant: {n + 1}"}) + "\n" for n in range(400)]
    (tmp_path / "data" / "own.jsonl").write_text("".join(texts))
    tokenizer = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--input", "data/own.jsonl"]
    tokenizer += ["--vocab-size", "300", "--output", "hybrid/tokenizer.json"]
    subprocess.run(tokenizer, cwd=tmp_path, env=ENVIRONMENT, check=True, timeout=300)
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        **LINEAR,
    )
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "hybrid")

    printed = type_page("recipes/11-hybrid.md", tmp_path)
    assert "parameters are trained" in printed

    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid-chat-model")
    assert tuned.config.model_type == model_type
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "hybrid-chat-model"))
    losses = [loss_of_answers(model.eval(), loaded, chats[10:20]) for model in (base, tuned)]
    assert losses[1] < losses[0] - 0.3, losses
    before, after = base.state_dict(), tuned.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("linear_attn" in name for name in changed)
    assert any("self_attn" in name for name in changed)
    assert not any("mlp" in name or "norm" in name or "A_log" in name or "embed" in name for name in changed)
