"""Reference network of a checkpoint on one rank, and comparison of an export's logits with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.config.keys import UNSUPPORTED
from neox.convert.hf_directory import CONFIG, read_json
from neox.errors import ConversionError
from neox.families import FAMILIES
from neox.model import GPT
from neox.parallel import ParallelGrid
from neox.plan import AttentionImpl, RunPlan, resolve
from neox.plan.network.architecture_keys import ARCHITECTURE_KEYS
from neox.plan.network.export_form import exported_norm
from neox.tokenizer import Tokenizer

_KERNEL_KEYS = frozenset({"scaled_upper_triang_masked_softmax_fusion", "precision"})
"""Keys of the model section that choose between kernels of the same function."""

_FEWEST_DISTINCT = 8
_SMALLEST_SPREAD = 1e-5
_LARGEST_SHARE = 0.3

SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog. Whether a converted model is the same model is decided by its "
    "numbers:\n\n    def mean(values):\n        return sum(values) / len(values)\n\n"
    "Die Größe beträgt 3,14159; le café coûte 2,50 €. 数字は同じでなければなりません。 It was 1984, 12 % of 65536."
)
"""Everyday text of different kinds: prose, code, numbers, accents and another script."""


def single_rank_plan(config: NeoXConfig, padded_vocab_size: int, *, exported: bool = False) -> RunPlan:
    """Return the plan of a configuration's network in fp32 on one rank. Its degrees, batch and data are left out.

    Args:
        config: The configuration.
        padded_vocab_size: Number of rows of the embedding.
        exported: Whether the network is that of an export (`exported_norm`).

    Raises:
        ConfigError: For settings of the network that are not supported, all of them in one message.
    """
    kept = {name for name, key in UNSUPPORTED.items() if key.section == "model"}
    kept |= {*type(config.model).model_fields}
    kept |= {*ARCHITECTURE_KEYS}  # muP's keys are in another section
    kept -= _KERNEL_KEYS
    if config.preferences.train_impl != "rm":  # the only value that changes the network; the others need data
        kept.discard("train_impl")
    flat = {key: value for key, value in config.to_flat().items() if key in kept}
    flat |= {
        "padded_vocab_size": padded_vocab_size,
        "train_micro_batch_size_per_gpu": 1,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pipe_parallel_size": 1,
        "model_parallel_size": 1,
    }
    if exported:
        flat["norm"] = exported_norm(config.model.norm)
    sources = {key: source for key, source in config.sources().items() if key.partition(".")[0] in kept}
    plan = resolve(NeoXConfig.from_flat(flat, sources), 1, padded_vocab_size)
    eager: AttentionImpl = "eager"  # runs on every device
    return replace(plan, attention=(eager,) * plan.architecture.num_layers)


def load_reference_model(reader: CheckpointReader, config: NeoXConfig) -> GPT:
    """Return our network with a checkpoint's weights, fp32 on CPU, in evaluation mode.

    Args:
        reader: Checkpoint, opened with a layer plan.
        config: The checkpoint's configuration.
    """
    assert reader.layers is not None
    plan = single_rank_plan(config, reader.layers.padded_vocab_size, exported=True)
    model = GPT(plan, ParallelGrid.single(), dtype=torch.float32)
    missing = dict(model.named_parameters())
    with torch.no_grad():
        for layer in reader.layers.weight_layers:
            for spec in layer.parameters:
                parameter = missing.pop(f"sequential.{layer.index}.{spec.name}")
                parameter.copy_(reader.full(layer.index, spec.name))
    assert not missing, missing.keys()
    return model.eval()


@dataclass(frozen=True)
class Verification:
    """Comparison of two models on the same tokens. Logits are in fp32, over the exported vocabulary.

    Attributes:
        difference: Largest absolute difference of logits.
        largest: Largest absolute logit of ours.
        same_argmax: Fraction of positions at which both predict the same next token.
        tokens: Number of positions.
        source: Origin of the tokens.
        distinct: Number of different ids among the tokens.
        spread: Largest difference of one token's logit between two positions (ours).
    """

    difference: float
    largest: float
    same_argmax: float
    tokens: int
    source: str
    distinct: int
    spread: float

    @property
    def weakness(self) -> str | None:
        """Why this comparison could not have shown a wrong export; None if it could.

        A network with another norm, mask or rotary base gives logits that differ by about as much as logits of
        different contexts do. If contexts make no difference, neither does a wrong network.
        """
        if self.distinct < min(_FEWEST_DISTINCT, self.tokens):
            return f"{self.source} has only {self.distinct} different ids: give another one with --verify-text"
        if self.spread < _SMALLEST_SPREAD:
            return "the logits are the same at all positions: this network's outputs do not depend on its input yet"
        if self.difference > _LARGEST_SHARE * self.spread:
            return (
                f"rounding moves the logits by {self.difference:.3g}, and contexts only by {self.spread:.3g}: export "
                "with --precision fp32 to compare"
            )
        return None

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.difference:.3g} (largest logit {self.largest:.3g}, same token at "
            f"{100 * self.same_argmax:.2f} % of {self.tokens} positions of {self.source})"
        )


def verification_tokens(
    tokenizer: Tokenizer | None, vocab_rows: int, length: int, text: str | None = None
) -> tuple[Tensor, str]:
    """Return tokens [1, S] to compare on, and a description of their origin.

    A tokenizer may know nothing of the built-in text (words of another alphabet, notes, bases of DNA): seeded random
    ids take its place if it has few different ids, as without a tokenizer.

    Args:
        tokenizer: Tokenizer of the text; None takes seeded random ids below `vocab_rows`.
        vocab_rows: Number of rows of the exported embedding.
        length: Largest number of tokens.
        text: Text instead of `SAMPLE_TEXT`.

    Raises:
        ConversionError: If the text has no tokens.
    """
    reason = "no tokenizer"
    if tokenizer is not None:
        ids = tokenizer.encode(text or SAMPLE_TEXT)[:length]
        if text is not None and not ids:
            raise ConversionError("--verify-text: the text is empty")
        distinct = len(set(ids))
        if text is not None or distinct >= min(_FEWEST_DISTINCT, length):
            return torch.tensor([ids]), "the given text" if text else "a built-in text"
        reason = f"the built-in text has only {distinct} different ids"
    generator = torch.Generator().manual_seed(1234)
    return torch.randint(0, vocab_rows, (1, length), generator=generator), f"seeded random ids ({reason})"


def compare_logits(
    reader: CheckpointReader, config: NeoXConfig, hf_directory: Path, tokens: Tensor, source: str
) -> Verification:
    """Run our network and the export in `transformers`, both in fp32 on CPU, on tokens [B, S].

    For a reward model, the scores of the last tokens are compared.
    """
    with torch.inference_mode():
        exported = hf_model(hf_directory)(tokens)
        theirs = _token_logits(exported)
        model = load_reference_model(reader, config)
        hidden = model.hidden(tokens)
        ours = model.logits(hidden).float()[..., : theirs.shape[-1]]  # the exported vocabulary may be trimmed
        spread = (ours.amax(1) - ours.amin(1)).max()  # over positions
        if model.architecture.score_head:
            ours = ours[:, -1]  # [B, 1], as theirs
        difference = (ours - theirs).abs().max()
        if model.head.sentences is not None:
            sentence_logits = model.head.sentences(hidden)
            difference = difference.maximum((sentence_logits - exported.seq_relationship_logits).abs().max())
    return Verification(
        difference=difference.item(),
        largest=ours.abs().max().item(),
        same_argmax=(ours.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
        tokens=tokens.numel(),
        source=source,
        distinct=len(tokens.unique()),
        spread=spread.item(),
    )


def hf_model(directory: Path) -> Any:
    """Load a Hugging Face directory in fp32 for evaluation, with the heads it was trained with.

    Raises:
        ConversionError: If `transformers` reports missing, unexpected or mismatched keys.
    """
    import transformers
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    shows_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        hf = read_json(directory / CONFIG)
        load: Any = getattr(transformers, FAMILIES[hf["model_type"]].auto_class(hf)).from_pretrained
        model, info = load(str(directory), output_loading_info=True, local_files_only=True)
    finally:
        hf_logging.set_verbosity(verbosity)
        if shows_bars:
            hf_logging.enable_progress_bar()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, info.get(kind) or ()))
        if kind == "unexpected_keys":
            keys = [key for key in keys if not _is_multi_token(key, hf)]
        if kind == "missing_keys" and model.config.tie_word_embeddings and len(keys) == 1:
            continue  # the head, which is the embedding
        if keys:
            raise ConversionError(f"{directory}: transformers reports {kind.replace('_', ' ')}: {', '.join(keys[:10])}")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default multiplies no matrices of odd widths
    return model.float().eval()


def _is_multi_token(key: str, hf: Mapping[str, Any]) -> bool:
    """Return whether a tensor is of multi-token prediction, which transformers loads in `generate(use_mtp=True)`.

    It knows the numbers of these layers in the published models, and reports those of other sizes as unexpected.
    """
    number = hf.get(FAMILIES[hf["model_type"]].further_layers_key) or 0
    blocks = hf["num_hidden_layers"] if number else 0
    return key.startswith(tuple(f"model.layers.{blocks + further}." for further in range(number)))


def hf_logits(directory: Path, tokens: Tensor) -> Tensor:
    """Return fp32 logits [B, S, V] of a Hugging Face directory for tokens [B, S], as `hf_model` loads it."""
    with torch.inference_mode():
        return _token_logits(hf_model(directory)(tokens))


def _token_logits(result: Any) -> Tensor:
    """Return the fp32 logits of tokens in a model's result; BERT's has those of sentences too."""
    logits: Tensor = result.prediction_logits if "prediction_logits" in result else result.logits
    return logits.float()
