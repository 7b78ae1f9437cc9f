"""What tokenizers write around texts, also those whose vocabulary holds few characters."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors

from neox.tokenizer import HFTokenizer

VOCABULARY = {"A": 0, "C": 1, "G": 2, "T": 3, "<s>": 4, "</s>": 5}


@pytest.mark.parametrize("model", [models.BPE(VOCABULARY, []), models.WordLevel(VOCABULARY, "[UNK]")])
def test_a_vocabulary_without_small_letters(tmp_path: Path, model: models.Model) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 4), ("</s>", 5)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = HFTokenizer(tmp_path / "tokenizer.json")
    assert (read.before_text, read.after_text) == ((4,), (5,))
