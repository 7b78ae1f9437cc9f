"""A NeoX checkpoint as a Hugging Face GPT-NeoX directory."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from neox.checkpoint import CheckpointReader, check_same_model, damaged_weights
from neox.config import NeoXConfig, Precision
from neox.convert.expressible import refuse_inexpressible
from neox.convert.hf_config import generation_config, hf_config
from neox.convert.model_card import model_card
from neox.convert.output import written_beside
from neox.convert.plain_model import plain_plan
from neox.convert.tokenizer_files import TokenizerSource, find_tokenizer, write_tokenizer
from neox.convert.verifying import Verification, compare_logits, verification_tokens
from neox.convert.weights_out import Export, plan_tensors, write_weights
from neox.errors import ConversionError
from neox.log import get_logger
from neox.ops import DTYPES

_log = get_logger(__name__)
# Up to here both models fit beside each other in a few GiB and compare within seconds.
VERIFY_UP_TO_PARAMETERS = 300_000_000
_VERIFY_TOKENS = 256
# Rounding to another precision moves logits; within one precision only the order of sums differs.
_TOLERANCE = MappingProxyType({torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3})


@dataclass(frozen=True)
class ToHFResult:
    """What an export made. check: None when it was not verified."""

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
    average_replicas: bool = False,
    overwrite: bool = False,
) -> ToHFResult:
    """Write a `global_stepN` directory as a Hugging Face directory, one block of a tensor at a time.

    precision: of the weights; None keeps the checkpoint's. trim_vocab: drop the rows that pad the vocabulary.
    verify: compare the logits of both models and fail if they are not the same; None: up to 300 M parameters.
    verify_text: text to compare on. tokenizer_file: instead of the config's vocab_file. average_replicas: average
    replicated weights whose copies differ between tensor ranks instead of refusing. overwrite: replace `output_dir`.
    The checkpoint's hashes are checked while its weights are written, unless `checkpoint_verify` is off.

    Raises ConversionError with every reason why the model cannot be expressed, before any file is looked for;
    CheckpointError for what is wrong with the checkpoint.
    """
    refuse_inexpressible(config.to_flat())
    output = Path(output_dir)
    reader = _open(Path(input_dir), config, "average" if average_replicas else "refuse")
    assert reader.layers is not None
    source = find_tokenizer(config, Path(tokenizer_file) if tokenizer_file else None)
    rows = _vocabulary_rows(reader, source, trim_vocab)
    planned = plan_tensors(reader, reader.layers, DTYPES[precision] if precision else None, rows)
    check = None
    with written_beside(output, overwrite=overwrite) as staged, ThreadPoolExecutor(1) as beside:
        damage = beside.submit(damaged_weights, reader.path) if config.checkpoint.checkpoint_verify else None
        export = write_weights(reader, planned, staged, max_shard_bytes=max_shard_bytes)
        if damage is not None and (problems := damage.result()):
            raise ConversionError(f"{reader.path} is not complete: {'; '.join(problems)}; nothing was kept")
        hf = hf_config(config, vocab_size=rows, eod=source.tokenizer.eod if source else None, dtype=_name(export.dtype))
        _write_json(staged / "config.json", hf)
        _write_json(staged / "generation_config.json", generation_config(hf["eos_token_id"]))
        if source is not None:
            write_tokenizer(source, staged, max_length=hf["max_position_embeddings"])
        if verify or (verify is None and reader.layers.numel <= VERIFY_UP_TO_PARAMETERS):
            check = _verify(reader, config, staged, source, rows, verify_text, export)
        card = model_card(
            name=output.name,
            hf=hf,
            export=export,
            iteration=reader.iteration_or_none,
            parameters=sum(torch.Size(entry.shape).numel() for _, entry in planned),
            check=check,
        )
        (staged / "README.md").write_text(card, encoding="utf-8")
    return ToHFResult(output, export, check)


def _open(input_dir: Path, config: NeoXConfig, on_drift: Any) -> CheckpointReader:
    """Open the checkpoint with the plan of the config's model; the vocabulary's rows come from the tensors."""
    reader = CheckpointReader(input_dir)
    plan = plain_plan(config, reader.vocabulary_rows)
    check_same_model(input_dir, reader.args, plan)
    return CheckpointReader(input_dir, plan.layers, on_drift=on_drift)


def _vocabulary_rows(reader: CheckpointReader, source: TokenizerSource | None, trim: bool) -> int:
    stored = reader.vocabulary_rows
    known = source.tokenizer.vocab_size if source else reader.args.get("vocab_size")
    if known is not None and known > stored:
        raise ConversionError(
            f"the tokenizer has {known} ids, the checkpoint's embedding {stored} rows: not its tokenizer"
        )
    if not trim:
        return stored
    if known is None:
        raise ConversionError(
            "--trim-vocab needs the tokenizer to know how many ids are used; give it with --tokenizer"
        )
    return int(known)


def _verify(
    reader: CheckpointReader,
    config: NeoXConfig,
    staged: Path,
    source: TokenizerSource | None,
    rows: int,
    text: str | None,
    export: Export,
) -> Verification:
    length = min(_VERIFY_TOKENS, config.model.max_position_embeddings or config.model.seq_length or _VERIFY_TOKENS)
    tokens, origin = verification_tokens(source.tokenizer if source else None, rows, length, text)
    check = compare_logits(reader, config, staged, tokens, origin)
    _log.info("verified: %s", check)
    if not check.difference <= _TOLERANCE[export.dtype] * max(1.0, check.largest):
        raise ConversionError(f"the export is not the same model: {check}; nothing was kept")
    return check


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
