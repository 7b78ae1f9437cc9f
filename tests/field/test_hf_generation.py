"""Generation and scores with a Hugging Face model whose tokenizer has more ids than the embedding has rows."""

from __future__ import annotations

import json

import pytest
import torch

from neox.convert import from_hf, to_hf
from neox.errors import GenerationError
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


@pytest.mark.slow
def test_a_token_without_a_row(tmp_path):
    """EuroEval#52, tokenizers#1609: text without the token works, as in transformers; text with it is refused."""
    write_tokenizer(tmp_path / "hf", ("<|end|>", "[PAD]"), pad_token="[PAD]")
    result = from_hf(write_llama(tmp_path / "hf", 257), tmp_path / "ck")
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
