"""Step `tokenize`: documents to token datasets, by `neox.preprocess`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from neox.errors import ConfigError
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
from neox.storage import name_of
from neox.tokenizer import TOKENIZER_TYPES
from tools.web_text.step import Job, Settings, Step


class TokenizeSettings(Settings):
    """Encode documents as token datasets, as `tools/preprocess_data.py` does.

    The output is a prefix: `OUTPUT_text_document.{bin,idx,json}`. On several machines, run `python deepy.py
    preprocess_data.py -H hostfile` instead; it makes the same bytes.
    """

    tokenizer_type: str
    """Type of the tokenizer, as in configurations."""

    vocab_file: Path | None = None
    """Its vocabulary, `tokenizer.json` for HFTokenizer."""

    merge_file: Path | None = None
    """Its merges, of GPT2BPETokenizer."""

    append_eod: bool = True
    """Whether to end each document with the end-of-document id."""

    each: bool = False
    """Whether to make a dataset of each input, named after it, in the directory of the output."""

    memory_mb: int = Field(0, ge=0)
    """Memory of all processes; 0 means 3 GiB and 256 MiB for each worker."""

    RUNTIME: ClassVar[frozenset[str]] = Settings.RUNTIME | {"memory_mb"}

    @field_validator("tokenizer_type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in TOKENIZER_TYPES:
            raise ValueError(f"must be one of {', '.join(TOKENIZER_TYPES)}")
        return value

    @field_validator("max_line_mb")
    @classmethod
    def _is_not_used(cls, value: int) -> int:
        raise ValueError("memory_mb limits a line here; remove it")

    def prefixes(self) -> dict[str, tuple[Path | str, ...]]:
        """Return the prefix of each dataset with its inputs. Raises ConfigError if two inputs have one prefix."""
        if not self.each:
            return {str(self.output): self.input}
        prefixes: dict[str, tuple[Path | str, ...]] = {}
        for path in self.input:
            prefix = str(self.output.parent / name_of(path).partition(".jsonl")[0])
            if prefix in prefixes:
                raise ConfigError(f"tokenize: {prefixes[prefix][0]} and {path} would both become {prefix}: rename one")
            prefixes[prefix] = (path,)
        return prefixes

    def datasets(self) -> tuple[Path, ...]:
        """Return the files of the tokens."""
        return tuple(Path(f"{prefix}_text_document.bin") for prefix in self.prefixes())


def tokenize(job: Job[TokenizeSettings]) -> None:
    """Write the datasets of a job."""
    settings = job.settings
    tokens = {}
    for prefix, inputs in settings.prefixes().items():
        report = preprocess(
            PreprocessSettings(
                inputs=tuple(map(str, inputs)),
                output_prefix=prefix,
                tokenizer=TokenizerSpec(
                    settings.tokenizer_type,
                    str(settings.vocab_file) if settings.vocab_file else None,
                    str(settings.merge_file) if settings.merge_file else None,
                ),
                append_eod=settings.append_eod,
                workers=settings.workers,
                memory_mb=settings.memory_mb,
                skip_bad=settings.skip_bad,
            )
        )
        job.counts.documents_in += report.documents["text"]
        job.counts.documents_out += report.documents["text"]
        job.counts.bytes_in += report.text_bytes
        job.counts.bytes_out += Path(f"{prefix}_text_document.bin").stat().st_size
        job.counts.bad += report.skipped
        tokens[f"{prefix}_text_document"] = report.tokens["text"]
    job.counts.details["tokens"] = tokens


TOKENIZE = Step("tokenize", TokenizeSettings, tokenize, suffixes=(), outputs=TokenizeSettings.datasets)
