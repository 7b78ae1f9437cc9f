"""Comparing an export with our own network on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert.plain_model import load_plain_model
from neox.errors import ConversionError
from neox.tokenizer import Tokenizer

# Text of everyday kinds: prose, code, numbers, accents and another script.
SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog. Whether a converted model is the same model is decided by its "
    "numbers:\n\n    def mean(values):\n        return sum(values) / len(values)\n\n"
    "Die Größe beträgt 3,14159; le café coûte 2,50 €. 数字は同じでなければなりません。 It was 1984, 12 % of 65536."
)


@dataclass(frozen=True)
class Verification:
    """What comparing the two models on the same tokens gave; logits in fp32, over the exported vocabulary.

    difference, largest: the largest absolute logit difference, and the largest absolute logit of ours.
    same_argmax: fraction of positions where both choose the same next token. source: where the tokens came from.
    """

    difference: float
    largest: float
    same_argmax: float
    tokens: int
    source: str

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.difference:.3g} (largest logit {self.largest:.3g}, same next token at "
            f"{100 * self.same_argmax:.2f} % of {self.tokens} positions of {self.source})"
        )


def verification_tokens(
    tokenizer: Tokenizer | None, vocab_rows: int, length: int, text: str | None = None
) -> tuple[Tensor, str]:
    """Tokens [1, S] to compare on, and where they came from: text if there is a tokenizer, seeded ids otherwise."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(1234)
        return torch.randint(0, vocab_rows, (1, length), generator=generator), "seeded random ids (no tokenizer)"
    ids = tokenizer.encode(text or SAMPLE_TEXT)[:length]
    if not ids:
        raise ConversionError("the text to verify with is empty")
    return torch.tensor([ids]), "the given text" if text else "a built-in text"


def compare_logits(
    reader: CheckpointReader, config: NeoXConfig, hf_directory: Path, tokens: Tensor, source: str
) -> Verification:
    """Run our network and the export through `transformers`, both in fp32 on CPU, on tokens [B, S]."""
    with torch.inference_mode():
        ours = load_plain_model(reader, config)(tokens).float()
        theirs = hf_logits(hf_directory, tokens)
    ours = ours[..., : theirs.shape[-1]]  # a trimmed vocabulary
    return Verification(
        difference=(ours - theirs).abs().max().item(),
        largest=ours.abs().max().item(),
        same_argmax=(ours.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
        tokens=tokens.numel(),
        source=source,
    )


def hf_logits(directory: Path, tokens: Tensor) -> Tensor:
    """fp32 logits [B, S, V] of a Hugging Face directory; a missing or unknown key in it is a ConversionError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        load: Any = AutoModelForCausalLM.from_pretrained
        model, info = load(str(directory), output_loading_info=True, local_files_only=True)
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys: Sequence[str] = sorted(map(str, info.get(kind) or ()))
        if keys and not (kind == "missing_keys" and model.config.tie_word_embeddings and len(keys) == 1):
            raise ConversionError(f"{directory}: transformers reports {kind.replace('_', ' ')}: {', '.join(keys[:10])}")
    with torch.inference_mode():
        return model.float().eval()(tokens).logits.float()
