"""Export of a checkpoint as a Hugging Face directory.

    configuration     `choose_family`: the first family that survives an export and an import unchanged
    checkpoint        opened with the plan of that network; its tokenizer, chat template, settings of generation
         |            `plan_tensors`: key, shape and dtype of every tensor, before one is read
         v
    new directory     safetensors            `write_weights`, while a thread compares the checkpoint's hashes
         |            config.json            `Family.config_json`
         |            generation_config.json, tokenizer files
         |            `compare_logits`: our network and transformers' on the same tokens
         v
    README.md         and the directory gets its name

After an error the new directory is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from neox.architecture import WORD_EMBEDDINGS, LayerPlan
from neox.checkpoint import (
    CheckpointReader,
    LoadedWeights,
    check_same_model,
    check_vocabulary,
    checkpoint_at,
    damaged_weights,
    find_chat_template,
    find_generation_settings,
)
from neox.config import NeoXConfig
from neox.convert.exported_weights import Export, PlannedTensor, plan_tensors, write_weights
from neox.convert.hf_directory import (
    CONFIG,
    check_new_directory,
    new_directory,
    write_json,
)
from neox.convert.hf_tokenizer import TokenizerSource, find_tokenizer, write_tokenizer
from neox.convert.verification import (
    Verification,
    compare_logits,
    single_rank_plan,
    verification_tokens,
)
from neox.errors import ConfigError, ConversionError, os_errors, refusals
from neox.families import FAMILIES, Family, ModelSettings
from neox.log import get_logger
from neox.ops import DTYPES
from neox.plan import Precision, RunPlan, used_vocabulary
from neox.plan.network.export_form import exported_norm, family_refusals
from neox.tokenizer import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    HFTokenizer,
    identify,
    saved_tokenizer_identity,
    special_token,
)
from neox.tokenizer.chat import ChatTemplate, find_answer_form

_log = get_logger(__name__)
VERIFY_UP_TO_PARAMETERS = 300_000_000
"""Largest model that is compared by default: both sides fit in a few GiB together and take seconds."""
_VERIFY_TOKENS = 256
_PRECISIONS = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_TOLERANCE = MappingProxyType({torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3})
"""Dtype -> largest difference of logits. Rounding to another precision moves them, and so does the order of sums."""

_CARD_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rotary_pct",
    "use_parallel_residual",
    "tie_word_embeddings",
    "hidden_act",
)
"""Entries of `config.json` that the card shows."""
_TASKS = MappingProxyType(
    {
        "AutoModelForCausalLM": "text-generation",
        "AutoModelForPreTraining": "fill-mask",
        "AutoModelForSequenceClassification": "text-classification",
    }
)
"""transformers' class of a model -> its task on the hub."""


@dataclass(frozen=True)
class ToHFResult:
    """Finished export.

    Attributes:
        output: Its directory.
        export: Its weights.
        check: Comparison of its logits with ours; None if it was not verified.
    """

    output: Path
    export: Export
    check: Verification | None


def to_hf(
    input_dir: str | Path,
    config: NeoXConfig,
    output_dir: str | Path,
    *,
    precision: Precision | None = None,
    trim_vocab: bool = False,
    verify: bool | None = None,
    verify_text: str | None = None,
    tokenizer_file: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    hf_architecture: str | None = None,
    weights: LoadedWeights = "trained",
) -> ToHFResult:
    """Write a checkpoint as a Hugging Face directory, one tensor at a time.

    The checkpoint's hashes are checked while its weights are written, unless `checkpoint_verify` is off.

    Args:
        input_dir: `global_stepN` directory, or one that holds some.
        config: The checkpoint's configuration.
        output_dir: Directory to create.
        precision: Precision of the weights; None keeps the checkpoint's.
        trim_vocab: Whether the rows that pad the vocabulary are left out.
        verify: Whether the logits of both models are compared, and the export fails if they differ; None compares
            models of up to 300 M parameters.
        verify_text: Text to compare on.
        tokenizer_file: Vocabulary file instead of the configuration's.
        max_shard_bytes: Largest safetensors file.
        overwrite: Whether `output_dir` is replaced.
        hf_architecture: Key of `FAMILIES`; None takes that of the configuration, or the first that can express the
            model.
        weights: The checkpoint's trained weights, or their average.

    Raises:
        ConfigError: For settings of the network that are not supported, and with every reason if no family can express
            the model, before any file is read.
        ConversionError: For a damaged or contradicting checkpoint, and for an export with other logits.
        CheckpointError: If the checkpoint cannot be read or belongs to another model.
    """
    family = choose_family(config, hf_architecture)
    if config.model.norm != exported_norm(config.model.norm):
        _log.warning(
            "%s: gpt-neox added the norms' epsilon outside of the root until May 2025; no Hugging Face norm does, so "
            "the export adds it inside, as gpt-neox's converter assumes: logits differ slightly from the trained ones",
            config.describe_setting("norm"),
        )
    if config.model.mtp_num_layers and not family.keeps_multi_token:
        _log.warning("the export has no modules of multi-token prediction: files of %s have no place", family.title)
    output = Path(output_dir)
    check_new_directory(output, overwrite=overwrite)

    # The checkpoint must be of the network that was trained, and is read as the network that is exported: their norms
    # may differ. The vocabulary has the stored size.
    path = checkpoint_at(Path(input_dir))
    with refusals():
        stored = CheckpointReader(path)
        check_same_model(path, stored.args, single_rank_plan(config, stored.vocabulary_rows))
        plan = single_rank_plan(config, stored.vocabulary_rows, exported=True)
        reader = CheckpointReader(path, plan.layers, weights=weights, gpt_neox_date=config.checkpoint.gpt_neox_date)

    # What comes along: the tokenizer, its template, and rows for its ids.
    source = find_tokenizer(config, Path(tokenizer_file) if tokenizer_file else None)
    template = None
    if source is not None:
        template = find_chat_template(config.tokenizer.chat_template, reader.path, source.vocab_file, source.tokenizer)
    rows = _vocabulary_rows(config, reader, source, trim=trim_vocab)

    dtype = None
    if precision is not None:
        dtype = DTYPES[precision]
    elif weights == "ema":  # which is fp32 in files: the export has the precision of the trained weights
        dtype = CheckpointReader(reader.path).parts(0, WORD_EMBEDDINGS)[0].dtype
    planned = plan_tensors(reader, plan.layers, family, dtype, rows)
    if verify is None:
        verify = plan.layers.numel <= VERIFY_UP_TO_PARAMETERS
    with new_directory(output, overwrite=overwrite) as partial:
        export = _write_undamaged(reader, config, plan.layers, planned, partial, max_shard_bytes)
        settings = ModelSettings(
            dtype=_PRECISIONS[export.dtype],
            initializer_range=config.model.init_method_std,
            attention_dropout=config.training.attention_dropout,
            hidden_dropout=config.training.hidden_dropout,
            vocab_size=rows,
            eod=source.tokenizer.eod if source else None,
            bos=source.bos if source else None,
        )
        hf = family.config_json(plan.architecture, settings) | _padding_entry(plan, source)
        write_json(partial / CONFIG, hf)
        if not family.is_encoder and not plan.architecture.score_head:
            _write_generation_config(partial, config, reader.path, settings, template, source)
        if source is not None:
            write_tokenizer(source, partial, family, plan.architecture.max_positions, template)
        check = None
        if verify:
            length = min(_VERIFY_TOKENS, plan.architecture.max_length)
            tokens, origin = verification_tokens(source.tokenizer if source else None, rows, length, verify_text)
            check = compare_logits(reader, config, partial, tokens, origin)
            allowed = _TOLERANCE[export.dtype] * max(1.0, check.largest)
            if not check.difference <= allowed:  # also if it is NaN
                raise ConversionError(
                    f"the export's logits differ from the checkpoint's: {check}; the export was removed"
                )
            if check.weakness is not None:
                _log.warning("%s: the comparison of logits proves nothing: %s", output, check.weakness)
        reader.note_averages()
        card = _model_card(
            name=output.name,
            family=family,
            hf=hf,
            export=export,
            iteration=reader.iteration_or_none,
            check=check,
            has_tokenizer=(partial / TOKENIZER_CONFIG).is_file(),
        )
        readme = partial / "README.md"
        with os_errors(ConversionError, f"{readme}: cannot be written"):
            readme.write_text(card, encoding="utf-8")
    return ToHFResult(output, export, check)


def choose_family(config: NeoXConfig, name: str | None = None) -> Family:
    """Return the family that a configuration's network is exported as.

    Args:
        config: The configuration.
        name: Key of `FAMILIES`; None takes the configuration's `hf_architecture`, or else the first that can express
            the network.

    Raises:
        ConfigError: For settings of the network that are not supported. If no family can express the network, with
            every family's reasons.
    """
    architecture = single_rank_plan(config, 1, exported=True).architecture
    remembered = config.model.hf_architecture
    wanted = name or remembered
    candidates = list(FAMILIES.values())
    if wanted is not None:
        if wanted not in FAMILIES:
            flag = "--hf-architecture" if name else "hf_architecture:"
            raise ConfigError(f"{flag} {wanted} is unknown; there are {', '.join(FAMILIES)}")
        candidates = [FAMILIES[wanted]]
    unable = family_refusals(architecture, candidates)
    if not unable:
        return next(family for family in candidates if not family.inexpressible_fields(architecture))
    lines = ["this model has no Hugging Face form:"]
    for refusal in unable:
        lines.append(f"  {refusal.describe(config)}")
    if wanted is not None and wanted == remembered and name is None:
        lines.append(f"  it came from hf_architecture {wanted}; --hf-architecture asks for another form")
    raise ConfigError("\n".join(lines))


def _vocabulary_rows(
    config: NeoXConfig, reader: CheckpointReader, source: TokenizerSource | None, *, trim: bool
) -> int:
    """Return the number of rows of the exported embedding.

    Raises:
        ConversionError: If the export's tokenizer is not the one that the model was trained with.
    """
    trained_with = saved_tokenizer_identity(reader.path)
    if trained_with is not None and source is not None and not config.checkpoint.allow_other_tokenizer:
        ours = identify(source.tokenizer, source.vocab_file, config.tokenizer.added_tokens)
        if not ours.same_ids(trained_with):
            with refusals():
                raise ConversionError(ours.difference(reader.path, trained_with))
    stored = reader.vocabulary_rows
    known = reader.args.get("vocab_size")
    if source is not None:
        known = used_vocabulary(config, source.tokenizer.vocab_size)
        check_vocabulary(reader.path, reader.args, known)
    if known is not None and known > stored:
        raise ConversionError(
            f"the tokenizer has {known} ids, but the checkpoint's embedding has {stored} rows: it is another tokenizer"
        )
    if not trim:
        return stored
    if known is None:
        raise ConfigError(
            "--trim-vocab needs the tokenizer to know how many ids are used; give its file with --tokenizer"
        )
    return int(known)


def _write_undamaged(
    reader: CheckpointReader,
    config: NeoXConfig,
    layers: LayerPlan,
    planned: list[PlannedTensor],
    output: Path,
    max_shard_bytes: int,
) -> Export:
    """Write the weights, and compare the checkpoint's hashes meanwhile in a thread.

    Raises:
        ConversionError: If the checkpoint is damaged, or a value does not fit.
    """
    if not config.checkpoint.checkpoint_verify:
        return write_weights(reader, layers, planned, output, max_shard_bytes=max_shard_bytes)
    with ThreadPoolExecutor(1) as thread:
        damage = thread.submit(damaged_weights, reader.path)
        export = write_weights(reader, layers, planned, output, max_shard_bytes=max_shard_bytes)
        problems = damage.result()
    if problems:
        raise ConversionError(f"{reader.path} is damaged: {'; '.join(problems)}; the export was removed")
    return export


def _write_generation_config(
    output: Path,
    config: NeoXConfig,
    checkpoint: Path,
    settings: ModelSettings,
    template: ChatTemplate | None,
    source: TokenizerSource | None,
) -> None:
    """Write the settings of generation that an import brought along, and the ids that begin and end a text.

    Imported ones stay as they were. The end of a document ends a text, and with a chat template the end of an answer.
    """
    if source is None:
        found = find_generation_settings(config, checkpoint, None, None)
    else:
        found = find_generation_settings(config, checkpoint, source.vocab_file, source.tokenizer)
    generation = found or {"_from_model_config": True}
    imported = generation.get("eos_token_id")
    ends = dict.fromkeys(imported if isinstance(imported, list) else [imported])
    ends[settings.eod] = None
    if template is not None and source is not None and settings.eod is not None:
        ends.update(dict.fromkeys(find_answer_form(template, source.tokenizer).end_ids))
    ends.pop(None, None)
    generation.setdefault("bos_token_id", settings.bos)
    generation["eos_token_id"] = list(ends) if len(ends) > 1 else next(iter(ends), None)
    write_json(output / GENERATION_CONFIG, generation)


def _padding_entry(plan: RunPlan, source: TokenizerSource | None) -> dict[str, int | None]:
    """Return the padding entry for the `config.json` of a reward model; nothing for other models.

    transformers scores the last token that is not padding, so the end-of-text token must not be the padding token. If
    it is, the export has no padding token, and transformers scores texts only one at a time.
    """
    if not plan.architecture.score_head:
        return {}
    padding = None
    if source is not None and isinstance(source.tokenizer, HFTokenizer):
        token = special_token(source.vocab_file, "pad_token")
        if token is not None:
            padding = source.tokenizer.backend.token_to_id(token)
        if padding == source.tokenizer.eod:
            padding = None
    return {"pad_token_id": padding}


def _model_card(
    *,
    name: str,
    family: Family,
    hf: Mapping[str, Any],
    export: Export,
    iteration: int | None,
    check: Verification | None,
    has_tokenizer: bool,
) -> str:
    """Return the model card: architecture, origin and check of the weights, and how to load them.

    Args:
        name: Name of the directory.
        family: Family of the export.
        hf: Contents of `config.json`.
        export: Weights that were written.
        iteration: Training step of the checkpoint, if known.
        check: Result of the verification, if there was one.
        has_tokenizer: Whether the directory holds a tokenizer.
    """
    rows = "\n".join(f"| {key} | {hf[key]} |" for key in _CARD_KEYS if key in hf)
    auto_class = family.auto_class(hf)
    task = _TASKS[auto_class]
    kind = "reward model" if task == "text-classification" else "language model"
    dtype = str(export.dtype).removeprefix("torch.")
    size = f"{export.parameters:,} parameters"
    if iteration is not None:
        size += f" after {iteration:,} training steps"
    checked = "The logits were not compared with the training code's on export."
    if check is not None:
        checked = (
            f"On export, this directory's logits in `transformers` were compared with the training code's: {check}."
        )
        if check.weakness is not None:
            checked += f" This proves nothing: {check.weakness}."
    imported = auto_class
    statements = f'model = {auto_class}.from_pretrained("{name}")'
    if has_tokenizer:
        imported += ", AutoTokenizer"
        statements += f'\ntokenizer = AutoTokenizer.from_pretrained("{name}")'
    return f"""---
library_name: transformers
pipeline_tag: {task}
tags:
- {family.model_type}
---

# {name}

A {family.title} {kind} of {size}, exported by `neox` from its training checkpoint:
{export.tensors} tensors, {export.total_bytes:,} bytes, {dtype}.

| | |
|---|---|
{rows}

{checked}

```python
from transformers import {imported}

{statements}
```
"""
