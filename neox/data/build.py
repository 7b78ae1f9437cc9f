"""Datasets and batch iterators of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from neox.config import NeoXConfig
from neox.config.sections.data import Blend, DataConfig
from neox.data.batches import BatchIterator, MaskedBatchIterator
from neox.data.blend import BlendedDataset, normalized, samples_of_each, weights_by_documents
from neox.data.fill_in_middle import FillInMiddle
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
    """Datasets of a run. A dataset is None if it has no documents, or no samples of it are read."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


class DataIterators(NamedTuple):
    """Batch iterators of one data-parallel rank. An iterator is None if there is nothing to read."""

    train: BatchIterator
    valid: BatchIterator | None
    test: BatchIterator | None


class SampleCounts(NamedTuple):
    """Number of samples that all ranks of a run read together."""

    train: int
    valid: int
    test: int


def sample_counts(train_iters: int, eval_interval: int, eval_iters: int, train_batch_size: int) -> SampleCounts:
    """Return the number of samples of a run. As in NeoX, an evaluation reads `eval_iters` training batches."""
    evaluations = train_iters // eval_interval + 1  # one more at the end
    samples_of_evaluation = eval_iters * train_batch_size
    return SampleCounts(
        train=train_iters * train_batch_size,
        valid=evaluations * samples_of_evaluation,
        test=samples_of_evaluation,
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
    fill_in_middle: Sequence[FillInMiddle | None] = (),
) -> Datasets:
    """Open and check the data of a run: `data_path` divided by `split`, or blends of the `*_data_paths`.

    Args:
        data: Data section of the configuration.
        counts: Number of samples that the run reads.
        seq_length: Number of tokens of a sample's input.
        seed: Seed of the shuffles.
        vocab_size: Number of ids of the run.
        tokenizer_hash: `content_hash` of the run's tokenizer; None leaves out this comparison.
        cache_dir: Directory of the index maps (default: `index_maps/` next to the data).
        masking: Settings of masked language modelling; None for causal language modelling.
        fill_in_middle: Rearrangement of the documents of each training dataset. By default there is none.

    Raises:
        DataError: If data are missing, damaged, or made with another tokenizer.
    """
    factory = _DatasetFactory(data, seq_length, seed, vocab_size, tokenizer_hash, cache_dir, masking, fill_in_middle)
    if data.train_data_paths is not None:
        datasets = [factory.blend(blend, count) for blend, count in zip(data.blends, counts, strict=True)]
    elif data.data_path is not None:
        datasets = factory.split(data.data_path, data.split, counts)
    else:
        raise DataError(
            'no data: set "data_path" to a prefix made by tools/preprocess_data.py (P_text_document for '
            '--output-prefix P), or "train_data_paths"'
        )
    return Datasets(*datasets)


def build_data_iterators(
    plan: RunPlan,
    dp_rank: int = 0,
    consumed_iterations: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
    cache_dir: str | Path | None = None,
) -> DataIterators:
    """Build the batch iterators of one data-parallel rank.

    Their positions are those of an uninterrupted run after `consumed_iterations`. A training iteration reads the number
    of samples in the plan's batch schedule. An evaluation reads `eval_iters` times `gradient_accumulation_steps` micro
    batches, and the next one continues after it.

    Args:
        plan: Plan of the run.
        dp_rank: Number of the data-parallel rank.
        consumed_iterations: Number of training iterations that are done.
        tokenizer: Tokenizer of the run (default: it is built from the configuration).
        cache_dir: Directory of the index maps (default: `index_maps/` next to the data).

    Raises:
        DataError: If data are missing, damaged, or made with another tokenizer, or there is nothing to train on.
    """
    training = plan.config.training
    batch = plan.batch
    if training.train_iters is None:
        raise DataError('"train_iters" is missing; it determines how much data is read')
    if tokenizer is None:
        tokenizer = tokenizer_of(plan.config)
    datasets = _datasets_of_run(plan, training.train_iters, tokenizer, cache_dir)
    if datasets.train is None:
        raise DataError("there are no documents to train on: `split` needs a first part above 0, and train_iters too")
    iterator = partial(_iterator, plan, tokenizer, dp_rank)
    train_start = plan.batch_schedule.samples(consumed_iterations) // batch.samples_at_once
    evaluations = consumed_iterations // training.eval_interval
    if consumed_iterations >= training.train_iters and consumed_iterations % training.eval_interval == 0:
        evaluations = max(0, evaluations - 1)  # a completed run that is started again repeats its last evaluation
    valid_start = evaluations * training.eval_iters * batch.gradient_accumulation_steps
    return DataIterators(
        train=iterator(datasets.train, train_start),
        valid=iterator(datasets.valid, valid_start) if datasets.valid else None,
        test=iterator(datasets.test, 0) if datasets.test else None,
    )


def _datasets_of_run(plan: RunPlan, train_iters: int, tokenizer: Tokenizer, cache_dir: str | Path | None) -> Datasets:
    """Open the datasets of a run. Arguments as for `build_data_iterators`."""
    config = plan.config
    training = config.training
    assert config.model.seq_length is not None
    counts = sample_counts(train_iters, training.eval_interval, training.eval_iters, plan.batch.train_batch_size)
    return build_datasets(
        config.data,
        counts._replace(train=plan.batch_schedule.samples(train_iters)),
        seq_length=config.model.seq_length,
        seed=training.seed,
        vocab_size=plan.vocab_size,
        tokenizer_hash=tokenizer.content_hash,
        cache_dir=cache_dir,
        masking=_masking(config, tokenizer),
        fill_in_middle=[FillInMiddle.of(config.data, rate, tokenizer, training.seed) for rate in config.data.fim_rates],
    )


def _iterator(plan: RunPlan, tokenizer: Tokenizer, dp_rank: int, dataset: Dataset, start: int) -> BatchIterator:
    """Build the iterator of one dataset; its first micro batch is number `start`."""
    part = dataset.datasets[0] if isinstance(dataset, BlendedDataset) else dataset
    kind: Callable[..., BatchIterator] = BatchIterator
    if isinstance(part, SentencePairDataset):
        kind = partial(MaskedBatchIterator, part.split_rows)
    data = plan.config.data
    return kind(
        dataset,
        plan.batch.train_micro_batch_size_per_gpu,
        dp_rank=dp_rank,
        dp_size=plan.grid.dp_size,
        start=start,
        num_workers=data.num_workers,
        eod=tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
        vocab_size=plan.vocab_size,
        mark_documents=data.reset_attention_mask,
    )


class Masking(NamedTuple):
    """Settings and vocabulary of masked language modelling."""

    settings: PairSettings
    vocabulary: MaskingVocabulary


def _masking(config: NeoXConfig, tokenizer: Tokenizer) -> Masking | None:
    """Return the settings of masked language modelling; None for causal language modelling."""
    data = config.data
    model = config.model
    if model.predicted_tokens is None:
        return None
    assert model.seq_length is not None
    settings = PairSettings(
        seq_length=model.seq_length,
        max_predictions=model.predicted_tokens,
        pairs=data.sentence_pairs if model.bert_binary_head else None,
        mask_share=data.mask_prob,
        short_share=data.short_seq_prob,
        whole_words=data.whole_word_mask,
    )
    return Masking(settings, MaskingVocabulary.of(tokenizer))


@dataclass(frozen=True)
class _DatasetFactory:
    """Factory of the datasets of one run. Its attributes are the arguments of `build_datasets`."""

    data: DataConfig
    seq_length: int
    seed: int
    vocab_size: int
    tokenizer_hash: str | None
    cache_dir: str | Path | None
    masking: Masking | None
    fill_in_middle: Sequence[FillInMiddle | None]

    def open(self, prefix: str) -> IndexedDataset:
        """Open a token dataset and check that it fits the run."""
        indexed = IndexedDataset(prefix, self.data.data_impl)
        check_fits(indexed, vocab_size=self.vocab_size, tokenizer_hash=self.tokenizer_hash)
        if self.data.mmap_warmup:
            indexed.warm_up()
        return indexed

    def samples(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int,
        label_prefix: str | None = None,
        fill_in_middle: FillInMiddle | None = None,
    ) -> Samples:
        """Return the samples of documents of a token dataset."""
        cache_dir = self.index_cache(indexed.prefix)
        if self.masking is not None:
            settings, vocabulary = self.masking
            return SentencePairDataset(indexed, documents, num_samples, settings, vocabulary, self.seed, cache_dir)
        labels = None
        if label_prefix is not None:
            labels = self.open(label_prefix)
            check_labels(indexed, labels)
        packing = Packing(self.data.pack_impl, self.data.allow_chopped)
        return GPTDataset(
            indexed,
            documents,
            num_samples,
            self.seq_length,
            self.seed,
            cache_dir,
            packing=packing,
            labels=labels,
            fill_in_middle=fill_in_middle,
        )

    def rearrangements(self, split: str, datasets: int) -> Sequence[FillInMiddle | None]:
        """Return the rearrangement of each dataset of a split. Only training has any."""
        if split == "train" and self.fill_in_middle:
            return self.fill_in_middle
        return [None] * datasets

    def num_documents(self, indexed: IndexedDataset) -> int:
        """Return the number of documents. For causal language modelling each sequence is one, as in gpt-neox."""
        return len(indexed) if self.masking is None else indexed.num_documents

    def index_cache(self, prefix: str) -> Path:
        """Return the directory for the index maps of a dataset."""
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        return Path(prefix).parent / "index_maps"

    def split(self, prefix: str, split: str, counts: SampleCounts) -> list[Dataset | None]:
        """Divide one dataset into the parts for training, validation and test."""
        indexed = self.open(prefix)
        total = self.num_documents(indexed)
        result: list[Dataset | None] = []
        parts = split_documents(split, total)
        for name, documents, num_samples in zip(SampleCounts._fields, parts, counts, strict=True):
            if num_samples and documents:
                (fill_in_middle,) = self.rearrangements(name, 1)
                result.append(self.samples(indexed, documents, num_samples, fill_in_middle=fill_in_middle))
                continue
            result.append(None)
            if num_samples:
                _log.warning("split %r of %d documents leaves none for %s", split, total, name)
        return result

    def blend(self, blend: Blend, num_samples: int) -> Dataset | None:
        """Blend several datasets. If no samples are needed or no paths are given, return None."""
        if num_samples == 0:
            return None
        if not blend.paths:
            _log.warning("no %s_data_paths are given: there is nothing to read for %s", blend.split, blend.split)
            return None
        parts = [self.open(path) for path in blend.paths]
        shares = self.shares(blend, parts)
        counts = samples_of_each(shares, num_samples)
        labels: Sequence[str | None] = blend.labels or [None] * len(parts)
        rearrangements = self.rearrangements(blend.split, len(parts))
        datasets = []
        for part, count, label, fill_in_middle in zip(parts, counts, labels, rearrangements, strict=True):
            documents = range(self.num_documents(part))
            datasets.append(self.samples(part, documents, count, label, fill_in_middle))
        listed = ", ".join(f"{path} {100 * share:.2f} %" for path, share in zip(blend.paths, shares, strict=True))
        _log.info("%s: %s", blend.split, listed)
        return BlendedDataset(datasets, shares, self.index_cache(parts[0].prefix))

    def shares(self, blend: Blend, parts: Sequence[IndexedDataset]) -> list[float]:
        """Return the share of each dataset in a blend: by number of documents, by weight, or equal."""
        if self.data.weight_by_num_documents:
            documents = [self.num_documents(part) for part in parts]
            return weights_by_documents(documents, self.data.weighted_sampler_alpha)
        if blend.weights is None:
            return normalized([1.0] * len(parts))
        if len(blend.weights) != len(parts):
            name = blend.split
            raise DataError(f"{name}_data_weights has {len(blend.weights)} weights for {len(parts)} {name}_data_paths")
        return normalized(blend.weights)
