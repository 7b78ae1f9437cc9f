"""Export of a checkpoint as a Hugging Face directory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch

from neox.architecture import LayerPlan
from neox.checkpoint import CheckpointReader, check_same_model, checkpoint_at, damaged_weights
from neox.checkpoint.reshard import OnDrift
from neox.config import NeoXConfig
from neox.convert.hf_directory import TokenizerSource, find_tokenizer, model_card, new_directory, write_tokenizer
from neox.convert.hf_weights import Export, plan_tensors, write_json, write_weights
from neox.convert.verification import Verification, compare_logits, single_rank_plan, verification_tokens
from neox.errors import ConfigError, ConversionError, os_errors
from neox.families import FAMILIES, Family, ModelSettings
from neox.log import get_logger
from neox.ops import DTYPES
from neox.plan import Precision, RunPlan, architecture_keys

_log = get_logger(__name__)
# Up to here both models fit in a few GiB together and are compared within seconds.
VERIFY_UP_TO_PARAMETERS = 300_000_000
_VERIFY_TOKENS = 256
# Rounding to another precision moves logits; within one precision only the order of sums differs.
_TOLERANCE = MappingProxyType({torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3})


@dataclass(frozen=True)
class ToHFResult:
    """Finished export; `check` is None if it was not verified."""

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
    hf_architecture: str | None = None,
) -> ToHFResult:
    """Write a checkpoint as a Hugging Face directory, one tensor at a time.

    The checkpoint's hashes are checked while its weights are written, unless `checkpoint_verify` is off.

    Args:
        input_dir: `global_stepN` directory, or one that holds some.
        config: The checkpoint's configuration.
        output_dir: Directory to create.
        precision: Of the weights; None keeps the checkpoint's.
        trim_vocab: Drop the rows that pad the vocabulary.
        verify: Compare the logits of both models and fail if they differ; None means up to 300 M parameters.
        verify_text: Text to compare on.
        tokenizer_file: Vocabulary file instead of the configuration's.
        max_shard_bytes: Largest safetensors file.
        average_replicas: Average replicated weights whose copies differ between tensor ranks, instead of refusing.
        overwrite: Replace `output_dir`.
        hf_architecture: Key of `FAMILIES`; None takes the first that can express the model.

    Raises:
        ConfigError: For settings of the network that are not supported, and with every reason if no family can express
            the model, before any file is read.
        ConversionError: For a damaged or contradicting checkpoint, and for an export with other logits.
        CheckpointError: If the checkpoint cannot be read or belongs to another model.
    """
    family = choose_family(config, hf_architecture)
    output = Path(output_dir)
    reader, plan = _open(checkpoint_at(Path(input_dir)), config, "average" if average_replicas else "refuse")
    layers = plan.layers
    source = find_tokenizer(config, Path(tokenizer_file) if tokenizer_file else None)
    rows = _vocabulary_rows(reader, source, trim_vocab)
    planned = plan_tensors(reader, layers, family, DTYPES[precision] if precision else None, rows)
    check = None
    with new_directory(output, overwrite=overwrite) as partial, ThreadPoolExecutor(1) as thread:
        damage = thread.submit(damaged_weights, reader.path) if config.checkpoint.checkpoint_verify else None
        export = write_weights(reader, layers, planned, partial, max_shard_bytes=max_shard_bytes)
        if damage is not None and (problems := damage.result()):
            raise ConversionError(f"{reader.path} is damaged: {'; '.join(problems)}; the export was removed")
        settings = _settings(config, rows, source, export.dtype)
        hf = family.config_json(plan.architecture, settings)
        write_json(partial / "config.json", hf)
        if not family.is_encoder:
            generation = {"_from_model_config": True, "bos_token_id": settings.bos, "eos_token_id": settings.eod}
            write_json(partial / "generation_config.json", generation)
        if source is not None:
            write_tokenizer(source, partial, family, max_length=plan.architecture.max_positions)
        if verify or (verify is None and layers.numel <= VERIFY_UP_TO_PARAMETERS):
            check = _verify(reader, config, layers, partial, source, rows, verify_text, export)
        card = model_card(
            name=output.name,
            family=family,
            hf=hf,
            export=export,
            iteration=reader.iteration_or_none,
            parameters=sum(prod(item.entry.shape) for item in planned),
            check=check,
        )
        readme = partial / "README.md"
        with os_errors(ConversionError, f"{readme}: cannot be written"):
            readme.write_text(card, encoding="utf-8")
    return ToHFResult(output, export, check)


def choose_family(config: NeoXConfig, name: str | None = None) -> Family:
    """Return the family that a configuration's network is exported as.

    Args:
        config: The configuration.
        name: Key of `FAMILIES`; None takes the first that can express the network.

    Raises:
        ConfigError: For settings of the network that are not supported; if there is none, with every family's reasons.
    """
    architecture = single_rank_plan(config, 1).architecture
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"--hf-architecture {name} is unknown; there are {', '.join(FAMILIES)}")
    families = [FAMILIES[name]] if name else list(FAMILIES.values())
    problems = {family.model_type: family.problems(architecture) for family in families}
    for family in families:
        if not problems[family.model_type]:
            return family
    lines = []
    for family in sorted(families, key=lambda family: len(problems[family.model_type])):
        reasons = {_setting(config, field): reason for field, reason in reversed(problems[family.model_type].items())}
        listed = "; ".join(f"`{setting}`: {reason}" for setting, reason in reversed(reasons.items()))
        lines.append(f"{family.title} ({family.model_type}) cannot express {listed}")
    raise ConfigError("this model has no Hugging Face form:\n  " + "\n  ".join(lines))


def _setting(config: NeoXConfig, field: str) -> str:
    """Return the YAML keys that a field of the architecture follows from, with their values."""
    keys = architecture_keys(field)
    given = [key for key in keys if config.given(key)] or keys[:1]
    return ", ".join(f"{key}: {config.value(key)}" for key in given) or field


def _open(input_dir: Path, config: NeoXConfig, on_drift: OnDrift) -> tuple[CheckpointReader, RunPlan]:
    """Open a checkpoint with the plan of the configuration's network; the size of the vocabulary is the stored one."""
    reader = CheckpointReader(input_dir)
    plan = single_rank_plan(config, reader.vocabulary_rows)
    check_same_model(input_dir, reader.args, plan)
    return CheckpointReader(input_dir, plan.layers, on_drift=on_drift), plan


def _vocabulary_rows(reader: CheckpointReader, source: TokenizerSource | None, trim: bool) -> int:
    stored = reader.vocabulary_rows
    known = source.tokenizer.vocab_size if source else reader.args.get("vocab_size")
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


def _settings(config: NeoXConfig, rows: int, source: TokenizerSource | None, dtype: torch.dtype) -> ModelSettings:
    return ModelSettings(
        dtype=next(name for name, known in DTYPES.items() if known == dtype),
        initializer_range=config.model.init_method_std,
        attention_dropout=config.training.attention_dropout,
        hidden_dropout=config.training.hidden_dropout,
        vocab_size=rows,
        eod=source.tokenizer.eod if source else None,
        bos=source.bos if source else None,
    )


def _verify(
    reader: CheckpointReader,
    config: NeoXConfig,
    layers: LayerPlan,
    directory: Path,
    source: TokenizerSource | None,
    rows: int,
    text: str | None,
    export: Export,
) -> Verification:
    length = min(_VERIFY_TOKENS, layers.architecture.max_positions)
    tokens, origin = verification_tokens(source.tokenizer if source else None, rows, length, text)
    check = compare_logits(reader, config, directory, tokens, origin)
    _log.info("verified: %s", check)
    if not check.difference <= _TOLERANCE[export.dtype] * max(1.0, check.largest):
        raise ConversionError(f"the export's logits differ from the checkpoint's: {check}; the export was removed")
    return check
