"""Datasets and batch iterators of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from neox.config import NeoXConfig
from neox.config.sections.data import DataConfig
from neox.data.batches import BatchIterator, MaskedBatchIterator
from neox.data.blend import BlendedDataset, normalized, samples_of_each, weights_by_documents
from neox.data.gpt_dataset import GPTDataset, split_documents
from neox.data.indexed_dataset import IndexedDataset
from neox.data.masking import MaskingVocabulary
from neox.data.packing import Packing
from neox.data.sentence_pairs import PairSettings, SentencePairDataset
from neox.data.sidecar import check_fits, check_labels
from neox.errors import DataError
from neox.log import get_logger
from neox.plan.run_plan import RunPlan
from neox.tokenizer import Tokenizer, tokenizer_of

_log = get_logger(__name__)

Samples = GPTDataset | SentencePairDataset
Dataset = Samples | BlendedDataset


class Datasets(NamedTuple):
    """Datasets of a run; None where there are no documents or no samples are read."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


class DataIterators(NamedTuple):
    """Batch iterators of one data-parallel rank; None where there is nothing to read."""

    train: BatchIterator
    valid: BatchIterator | None
    test: BatchIterator | None


class SampleCounts(NamedTuple):
    """Samples that all ranks of a run read together."""

    train: int
    valid: int
    test: int


def sample_counts(train_iters: int, eval_interval: int, eval_iters: int, train_batch_size: int) -> SampleCounts:
    """Count the samples of a run; as in NeoX, an evaluation takes `eval_iters` batches of the training batch's size."""
    evaluations = train_iters // eval_interval + 1  # one more, at the end
    return SampleCounts(
        train_iters * train_batch_size, evaluations * eval_iters * train_batch_size, eval_iters * train_batch_size
    )


def build_datasets(
    data: DataConfig,
    counts: SampleCounts,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    tokenizer_hash: str | None = None,
    cache_dir: str | Path | None = None,
    masking: Masking | None = None,
) -> Datasets:
    """Open and check a run's data: `data_path` divided by `split`, or blends of the `*_data_paths`.

    Args:
        data: Data section of the configuration.
        counts: Samples the run reads.
        seq_length: Tokens of a sample's input.
        seed: Of the shuffles.
        vocab_size: Number of ids of the run.
        tokenizer_hash: `content_hash` of the run's tokenizer; None skips this comparison.
        cache_dir: Directory of the index maps (default: `index_maps/` beside the data).
        masking: How samples of masked language modelling are made; None for causal ones.

    Raises:
        DataError: If data are missing, damaged, or made with another tokenizer.
    """
    opener = _DatasetOpener(data, seq_length, seed, vocab_size, tokenizer_hash, cache_dir, masking)
    if data.train_data_paths is None:
        if data.data_path is None:
            raise DataError(
                'no data: set "data_path" to a prefix made by tools/preprocess_data.py (P_text_document for '
                '--output-prefix P), or "train_data_paths"'
            )
        return Datasets(*opener.split(data.data_path, data.split, counts))
    return Datasets(*(opener.blend(*blend, count) for blend, count in zip(data.blends, counts, strict=True)))


def build_data_iterators(
    plan: RunPlan,
    dp_rank: int = 0,
    consumed_iterations: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
    cache_dir: str | Path | None = None,
) -> DataIterators:
    """Build the iterators of one data-parallel rank, positioned as after `consumed_iterations` of an uninterrupted run.

    An iteration of training takes what the plan's batch schedule says; an evaluation takes `eval_iters` times
    `gradient_accumulation_steps` micro batches, and continues after the last one's.

    Args:
        plan: Plan of the run.
        dp_rank: Data-parallel rank.
        consumed_iterations: Training iterations that are done.
        tokenizer: The run's tokenizer; by default it is built from the configuration.
        cache_dir: Directory of the index maps (default: `index_maps/` beside the data).

    Raises:
        DataError: If data are missing, damaged, or made with another tokenizer, or there is nothing to train on.
    """
    config, batch = plan.config, plan.batch
    training, data = config.training, config.data
    assert config.model.seq_length is not None
    if training.train_iters is None:
        raise DataError('"train_iters" is missing; it determines how much data is read')
    tokenizer = tokenizer or tokenizer_of(config)
    schedule = plan.batch_schedule
    counts = sample_counts(training.train_iters, training.eval_interval, training.eval_iters, batch.train_batch_size)
    datasets = build_datasets(
        data,
        counts._replace(train=schedule.samples(training.train_iters)),
        seq_length=config.model.seq_length,
        seed=training.seed,
        vocab_size=plan.vocab_size,
        tokenizer_hash=tokenizer.content_hash,
        cache_dir=cache_dir,
        masking=_masking(config, tokenizer),
    )
    if datasets.train is None:
        raise DataError("there are no documents to train on: `split` needs a first part above 0, and train_iters too")

    def iterator(dataset: Dataset, start: int) -> BatchIterator:
        first = dataset.datasets[0] if isinstance(dataset, BlendedDataset) else dataset
        kind = (
            partial(MaskedBatchIterator, first.split_rows) if isinstance(first, SentencePairDataset) else BatchIterator
        )
        return kind(
            dataset,
            batch.train_micro_batch_size_per_gpu,
            dp_rank=dp_rank,
            dp_size=plan.grid.dp_size,
            start=start,
            num_workers=data.num_workers,
            eod=tokenizer.eod,
            eod_mask_loss=data.eod_mask_loss,
            vocab_size=plan.vocab_size,
            mark_documents=data.reset_attention_mask,
        )

    steps = batch.gradient_accumulation_steps
    evaluations = consumed_iterations // training.eval_interval
    if consumed_iterations >= training.train_iters and consumed_iterations % training.eval_interval == 0:
        evaluations = max(0, evaluations - 1)  # a completed run, started again, repeats its last evaluation
    evaluated = evaluations * training.eval_iters
    return DataIterators(
        iterator(datasets.train, schedule.samples(consumed_iterations) // batch.samples_at_once),
        iterator(datasets.valid, evaluated * steps) if datasets.valid else None,
        iterator(datasets.test, 0) if datasets.test else None,
    )


class Masking(NamedTuple):
    """How the samples of masked language modelling are made."""

    settings: PairSettings
    vocabulary: MaskingVocabulary


def _masking(config: NeoXConfig, tokenizer: Tokenizer) -> Masking | None:
    """Return how a run masks tokens; None for causal language modelling."""
    data, model = config.data, config.model
    predictions = model.predicted_tokens
    if predictions is None:
        return None
    assert model.seq_length is not None
    pairs = data.sentence_pairs if model.bert_binary_head else None
    settings = PairSettings(
        model.seq_length, predictions, pairs, data.mask_prob, data.short_seq_prob, data.whole_word_mask
    )
    return Masking(settings, MaskingVocabulary.of(tokenizer))


@dataclass(frozen=True)
class _DatasetOpener:
    """Opens the datasets of one run; the arguments are those of `build_datasets`."""

    data: DataConfig
    seq_length: int
    seed: int
    vocab_size: int
    tokenizer_hash: str | None
    cache_dir: str | Path | None
    masking: Masking | None

    def open(self, prefix: str) -> IndexedDataset:
        """Open a dataset and check it against the run."""
        indexed = IndexedDataset(prefix, self.data.data_impl)
        check_fits(indexed, vocab_size=self.vocab_size, tokenizer_hash=self.tokenizer_hash)
        if self.data.mmap_warmup:
            indexed.warm_up()
        return indexed

    def samples(
        self, indexed: IndexedDataset, documents: range, num_samples: int, labels: str | None = None
    ) -> Samples:
        """Make samples of documents of a dataset, with the labels under a prefix."""
        if self.masking is not None:
            cache = self.index_cache(indexed.prefix)
            return SentencePairDataset(indexed, documents, num_samples, *self.masking, self.seed, cache)
        opened = None
        if labels is not None:
            opened = self.open(labels)
            check_labels(indexed, opened)
        return GPTDataset(
            indexed,
            documents,
            num_samples,
            self.seq_length,
            self.seed,
            self.index_cache(indexed.prefix),
            packing=Packing(self.data.pack_impl, self.data.allow_chopped),
            labels=opened,
        )

    def documents_of(self, indexed: IndexedDataset) -> int:
        """Return how many documents samples are made of: gpt-neox takes sequences for documents."""
        return len(indexed) if self.masking is None else indexed.num_documents

    def index_cache(self, prefix: str) -> Path:
        """Return the directory of a dataset's index maps."""
        return Path(self.cache_dir) if self.cache_dir is not None else Path(prefix).parent / "index_maps"

    def split(self, prefix: str, split: str, counts: SampleCounts) -> list[Samples | None]:
        """Divide one dataset into train, validation and test."""
        indexed = self.open(prefix)
        result: list[Samples | None] = []
        total = self.documents_of(indexed)
        parts = split_documents(split, total)
        for name, documents, num_samples in zip(SampleCounts._fields, parts, counts, strict=True):
            if num_samples and not documents:
                _log.warning("split %r of %d documents leaves none for %s", split, total, name)
            result.append(self.samples(indexed, documents, num_samples) if num_samples and documents else None)
        return result

    def blend(
        self,
        name: str,
        paths: Sequence[str] | None,
        weights: Sequence[float] | None,
        labels: Sequence[str] | None,
        num_samples: int,
    ) -> Dataset | None:
        """Mix several datasets by weight, by number of documents, or equally."""
        if num_samples == 0:
            return None
        if not paths:
            _log.warning("no %s_data_paths are given: there is nothing to read for %s", name, name)
            return None
        parts = [self.open(path) for path in paths]
        if self.data.weight_by_num_documents:
            documents = [self.documents_of(part) for part in parts]
            shares = weights_by_documents(documents, self.data.weighted_sampler_alpha)
        else:
            if weights is not None and len(weights) != len(paths):
                raise DataError(f"{name}_data_weights has {len(weights)} weights for {len(paths)} {name}_data_paths")
            shares = normalized(weights if weights is not None else [1.0] * len(paths))
        needed = samples_of_each(shares, num_samples)
        own_labels: Sequence[str | None] = labels or [None] * len(parts)
        datasets = [
            self.samples(part, range(self.documents_of(part)), count, label)
            for part, count, label in zip(parts, needed, own_labels, strict=True)
        ]
        _log.info("%s: %s", name, ", ".join(f"{p} {100 * s:.2f} %" for p, s in zip(paths, shares, strict=True)))
        return BlendedDataset(datasets, shares, self.index_cache(parts[0].prefix))
