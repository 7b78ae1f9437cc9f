"""An imported hybrid is fine-tuned by LoRA on packed conversations, and exported: every step is a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.pages import ENVIRONMENT, ROOT

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content "
    "+ ('<|endoftext|>' if message.role == 'assistant' else '') }}{% endfor %}"
)
RUN = """\
train_data_paths: [data/chats_messages_document]
train_label_data_paths: [data/chats_messages_label_document]
pack_impl: pack_until_overflow
reset_attention_mask: true
train_micro_batch_size_per_gpu: 2
train_iters: 6
lr_decay_iters: 6
optimizer: {type: Adam, params: {lr: 1.0e-2}}
warmup: 0.1
eval_iters: 0
log_interval: 1
checkpoint_factor: 6
save: runs/chat
log_dir: runs/chat/logs
lora: {r: 4, alpha: 8, target: [query_key_value, dense, in_proj, out_proj]}
"""
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def run(directory: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=directory,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (script, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)  # six commands, each with a limit of its own
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "olmo_hybrid"])
def test_a_hybrid_is_fine_tuned_on_conversations(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "data").mkdir()
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "chat.yml").write_text(RUN)
    chats = [
        [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(60)
    ]
    (tmp_path / "data" / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    texts = [json.dumps({"text": f"user: {n} + 1? assistant: {n + 1}"}) + "\n" for n in range(400)]
    (tmp_path / "data" / "own.jsonl").write_text("".join(texts))
    tokenizer = "base/tokenizer.json"
    run(tmp_path, "tools/train_tokenizer.py", "--input", "data/own.jsonl", "--vocab-size", "300", "--output", tokenizer)
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
    base.save_pretrained(tmp_path / "base")

    run(tmp_path, "tools/convert_from_hf.py", "--input_dir", "base", "--output_dir", "runs/base")
    data = ("--input", "data/chats.jsonl", "--output-prefix", "data/chats", "--chat-template", "chat.jinja")
    run(tmp_path, "tools/preprocess_chat.py", *data, "--vocab-file", "runs/base/tokenizer.json")
    run(tmp_path, "deepy.py", "train.py", "runs/base/config.yml", "chat.yml")
    run(tmp_path, "tools/convert_to_hf.py", "--input_dir", "runs/chat", "--output_dir", "chat-model")

    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "chat-model")
    assert tuned.config.model_type == model_type
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "chat-model"))
    ids = torch.cat([loaded.apply_chat_template(chat, return_tensors="pt")["input_ids"] for chat in chats[10:20]], 1)
    losses = []
    with torch.inference_mode():
        for model in (base.eval(), tuned.eval()):
            losses.append(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item())
    assert losses[1] < losses[0] - 0.3, losses
    before, after = base.state_dict(), tuned.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("linear_attn" in name for name in changed)
    assert any("self_attn" in name for name in changed)
    assert not any("mlp" in name or "norm" in name or "A_log" in name or "embed" in name for name in changed)
