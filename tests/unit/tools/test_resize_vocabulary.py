"""tools/resize_vocabulary.py: from a Hugging Face model, through a grown vocabulary, and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import yaml
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

from neox.checkpoint import saved_generation_settings
from neox.convert import from_hf, to_hf
from neox.convert.verification import hf_logits
from neox.plan import config_from_files
from neox.tokenizer import build_tokenizer, train_tokenizer
from neox.tokenizer.chat import own_chat_template
from tests.field.hf_models import write_json, write_llama, write_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json"
TOKENS = ["<|user|>", "<|assistant|>", "unheard"]


def hugging_face_model(directory):
    """A small model with a head of its own, and with as many rows as the tokenizer has ids."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=build_tokenizer("HFTokenizer", GOLDEN).vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    model = GPTNeoXForCausalLM(config).eval()
    model.save_pretrained(str(directory))
    shutil.copyfile(GOLDEN, directory / "tokenizer.json")
    return model


def test_there_and_back_equals_resizing_in_transformers(tmp_path, run):
    model = hugging_face_model(tmp_path / "hf")
    imported = from_hf(tmp_path / "hf", tmp_path / "base", model_parallel_size=2)
    done = run(
        "resize_vocabulary.py",
        *("--input_dir", tmp_path / "base", "--output_dir", tmp_path / "grown"),
        *("--config_file", imported.config_file, "--rows", "pieces", "--added-tokens", *TOKENS),
    )
    assert done.returncode == 0, done.stderr
    config = config_from_files([imported.config_file]).updated({"added_tokens": TOKENS}, without=["padded_vocab_size"])
    to_hf(tmp_path / "grown", config, tmp_path / "back", trim_vocab=True)

    old = build_tokenizer("HFTokenizer", GOLDEN)
    model.resize_token_embeddings(old.vocab_size + 3, mean_resizing=False)
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            for number, token in enumerate(TOKENS):
                weight[old.vocab_size + number] = weight[old.encode(token)].mean(0)
    tokens = torch.randint(0, old.vocab_size + 3, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens).logits
    found = hf_logits(tmp_path / "back", tokens)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-6

    text = "<|user|>What is unheard?<|assistant|>It is."
    ids = AutoTokenizer.from_pretrained(str(tmp_path / "back"))(text)["input_ids"]
    assert ids == build_tokenizer("HFTokenizer", GOLDEN, added_tokens=TOKENS).encode(text)
    assert ids == build_tokenizer("HFTokenizer", tmp_path / "grown" / "tokenizer.json").encode(text)

    squares = " ".join(str(n * n) for n in range(4000))
    other = train_tokenizer([squares], old.vocab_size + 3, tmp_path / "other.json")[0]
    renamed = config_from_files([imported.config_file]).updated({"vocab_file": str(other)})
    (tmp_path / "other.yml").write_text(yaml.safe_dump(renamed.to_flat()))
    wrong = ["--input_dir", tmp_path / "base", "--output_dir", tmp_path / "wrong"]
    wrong += ["--config_file", tmp_path / "other.yml"]
    refused = run("resize_vocabulary.py", *wrong)
    assert refused.returncode == 2
    assert str(other) in refused.stderr
    assert str(imported.config_file.parent) in refused.stderr
    meant = run("resize_vocabulary.py", *wrong, "--set", "allow_other_tokenizer=true")
    assert meant.returncode == 0, meant.stderr

    resized = tmp_path / "resized"
    model.save_pretrained(str(resized))
    shutil.copyfile(tmp_path / "grown" / "tokenizer.json", resized / "tokenizer.json")
    again = from_hf(resized, tmp_path / "again")
    twice = run(
        "resize_vocabulary.py",
        *("--input_dir", again.checkpoint, "--output_dir", tmp_path / "nothing", "--config_file", again.config_file),
    )
    assert twice.returncode == 1, twice.stderr
    assert json.loads((resized / "config.json").read_text())["vocab_size"] == old.vocab_size + 3


def test_files_next_to_the_tokenizer_follow(tmp_path, run):
    """The result's directory has the same end of a document, end ids and template, with ids that stay right."""
    tokens = ("<|end|>", "<|eot|>", "<|pad|>")
    backend = write_tokenizer(
        tmp_path / "hf", tokens, pad_token="<|pad|>", chat_template="{{ messages[0]['content'] }}"
    )
    decoder = {}
    for number, token in backend.get_added_tokens_decoder().items():
        decoder[str(number)] = {"content": token.content, "special": True}
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    write_json(tmp_path / "hf" / "tokenizer_config.json", {**settings, "added_tokens_decoder": decoder})
    write_json(tmp_path / "hf" / "special_tokens_map.json", {"eos_token": "<|end|>"})
    write_json(tmp_path / "hf" / "generation_config.json", {"eos_token_id": [256, 257], "temperature": 0.5})
    write_llama(tmp_path / "hf", 259)
    imported = from_hf(tmp_path / "hf", tmp_path / "base")
    done = run(
        "resize_vocabulary.py",
        *("--input_dir", tmp_path / "base", "--output_dir", tmp_path / "grown"),
        *("--config_file", imported.config_file, "--added-tokens", "<|new|>"),
    )
    assert done.returncode == 0, done.stderr

    vocab_file = tmp_path / "grown" / "tokenizer.json"
    grown = build_tokenizer("HFTokenizer", vocab_file)
    assert (grown.vocab_size, grown.eod, grown.end_ids) == (260, 256, (256, 257))
    assert own_chat_template(vocab_file) == own_chat_template(tmp_path / "hf" / "tokenizer.json")
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "grown"))
    assert theirs("a<|new|><|pad|>")["input_ids"] == grown.encode("a<|new|><|pad|>")
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (256, 258, 260)
    assert saved_generation_settings(tmp_path / "grown" / "global_step0")["eos_token_id"] == [256, 257]
