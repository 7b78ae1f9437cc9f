"""Hugging Face directories as others publish them: what stands in their files is used, carried, or refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from neox.convert import from_hf, to_hf
from neox.data.sidecar import Sidecar, check_tokenizer
from neox.errors import ConfigError, DataError, GenerationError, TokenizerError
from neox.generation.completion import generate
from neox.generation.load import load_model
from neox.generation.request import SamplingParams
from neox.generation.startup import choose_checkpoint, one_process
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve, with_trained_model
from neox.tokenizer import build_tokenizer, tokenizer_of
from tests.errors import raises_naming
from tests.field.hf_models import write_llama, write_tokenizer


def run_of(config_file, **keys):
    """Return the plan, the tokenizer and the model of a generation with an imported model."""
    config = one_process(with_trained_model(config_from_files([config_file]).updated(keys)))
    tokenizer = tokenizer_of(config)
    plan = resolve(config, 1, tokenizer.vocab_size)
    checkpoint = choose_checkpoint(plan, tokenizer)
    return plan, tokenizer, load_model(plan, checkpoint, ParallelGrid.single(), torch.device("cpu"))


@pytest.fixture
def with_padding_token(tmp_path):
    """A model whose tokenizer has a token more than its embedding has rows."""
    directory = tmp_path / "hf"
    write_tokenizer(directory, ("<|end|>", "[PAD]"), pad_token="[PAD]")
    return write_llama(directory, 257)


def test_a_token_without_a_row(with_padding_token, tmp_path):
    """EuroEval#52, tokenizers#1609: text without the token works, as in transformers; text with it is refused."""
    result = from_hf(with_padding_token, tmp_path / "ck")
    plan, tokenizer, model = run_of(result.config_file)
    assert (tokenizer.vocab_size, plan.vocab_size, plan.padded_vocab_size) == (258, 257, 257)
    assert any("258" in note and "257" in note for note in plan.notes)
    params = SamplingParams(max_new_tokens=2, min_new_tokens=1)
    assert generate(model, ["how", "many people"], params, tokenizer)[0].length >= 1
    with raises_naming(GenerationError, "257"):
        generate(model, ["answer [PAD]"], params, tokenizer)
    with raises_naming(GenerationError, "257"):
        model.score(torch.tensor([[1, 257]]), torch.tensor([[2, 3]]))
    back = to_hf(tmp_path / "ck", config_from_files([result.config_file]), tmp_path / "back", verify=False)
    assert json.loads((back.output / "config.json").read_text())["vocab_size"] == 257
    assert build_tokenizer("HFTokenizer", back.output / "tokenizer.json").vocab_size == 258


def test_data_with_a_token_without_a_row(with_padding_token, tmp_path):
    """The plan's number of ids is that of the rows, so data that needs more is refused before ranks start."""
    config = config_from_files([from_hf(with_padding_token, tmp_path / "ck").config_file])
    plan = resolve(config.updated({"train_micro_batch_size_per_gpu": 1}), 1, 258)
    assert plan.vocab_size == 257
    sidecar = Sidecar("HFTokenizer", "hash", 258, 256, True, 1, 2, max_id=257)
    with raises_naming(DataError, "257", "data"):
        check_tokenizer(sidecar, "data", vocab_size=plan.vocab_size, tokenizer_hashes=())


def test_rows_that_are_too_few_by_mistake(with_padding_token, tmp_path):
    """Only the embedding of an imported model may have fewer rows than the tokenizer has ids."""
    config = config_from_files([from_hf(with_padding_token, tmp_path / "ck").config_file])
    one = {"train_micro_batch_size_per_gpu": 1}
    own = config.updated(one, without=["hf_architecture"])
    with raises_naming(ConfigError, "padded_vocab_size"):
        resolve(own, 1, 258)
    with raises_naming(ConfigError, "padded_vocab_size"):
        resolve(config.updated({**one, "added_tokens": ["<|new|>"]}), 1, 259)


def test_a_tokenizer_with_gaps_in_its_ids(tmp_path):
    """phi-2's and others' ids have gaps: the number of tokens is not larger than every id."""
    tokenizer = json.loads(write_tokenizer(tmp_path).to_str())
    tokenizer["model"]["vocab"]["far"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    built = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    assert built.vocab_size == 301
    tokenizer["model"]["vocab"]["near"] = 259
    added = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**added, "id": number, "content": f"<{number}>"} for number in (301, 302)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with raises_naming(TokenizerError, "259"):
        build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
