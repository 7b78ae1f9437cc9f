"""Datasets of a run: token files opened, checked, and turned into samples.

DatasetFactory.datasets         the three splits, and validation sets with names
|  divided                   `data_path`: the documents of one dataset, divided by `split`
|  blended                   `*_data_paths`: several datasets by weight
|  whole                     `validation_sets`: all documents of one dataset
v
DatasetFactory.samples          samples of documents: a GPTDataset, or a SentencePairDataset for masked modelling
|  open, open_labels         token files that fit the run's tokenizer
v
IndexedDataset
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from neox.config.sections.data import Blend, DataConfig, split_shares
from neox.data.answer_pairs.pair_rows import PreferenceDataset
from neox.data.masked.masking import MaskingVocabulary
from neox.data.masked.sentence_pairs import SentencePairDataset, SentencePairSettings
from neox.data.mixtures.blend import (
    BlendedDataset,
    SampleDataset,
    normalized,
    samples_of_each,
    weights_by_documents,
)
from neox.data.pass_amounts import tokens_of_pass
from neox.data.samples.fill_in_middle import FillInMiddle
from neox.data.samples.gpt_dataset import GPTDataset, split_documents
from neox.data.samples.packing import Packing
from neox.data.samples.rows import TokenRows, TrainingDocuments
from neox.data.token_files.indexed_dataset import IndexedDataset
from neox.data.token_files.sidecar import check_fits, check_labels
from neox.errors import DataError
from neox.log import get_logger

_log = get_logger(__name__)


class SampleCounts(NamedTuple):
    """Number of samples of each split that all ranks of a run read together; None for one pass over the split."""

    train: int
    valid: int | None
    test: int | None


class Datasets(NamedTuple):
    """Datasets of a run. A dataset is None if it has no documents, or no samples of it are read.

    Attributes:
        train: Training data.
        valid: Validation data without names.
        test: Test data.
        validation_sets: Validation data by name.
    """

    train: SampleDataset | BlendedDataset | None
    valid: SampleDataset | BlendedDataset | PreferenceDataset | None
    test: SampleDataset | BlendedDataset | PreferenceDataset | None
    validation_sets: Mapping[str, SampleDataset] = MappingProxyType({})


class Masking(NamedTuple):
    """Settings and vocabulary of masked language modelling."""

    settings: SentencePairSettings
    vocabulary: MaskingVocabulary


@dataclass(frozen=True)
class DatasetFactory:
    """Factory of the datasets of one run.

    Attributes:
        data: Data section of the configuration.
        seq_length: Number of tokens of a sample's input.
        seed: Seed of the shuffles.
        vocab_size: Number of ids of the run.
        tokenizer_hashes: `known_hashes` of the run's tokenizer; none leave out the comparison with that of the data.
        cache_dir: Directory of the index maps; None is `index_maps/` next to the data.
        masking: Settings of masked language modelling; None for causal language modelling.
        fill_in_middle: Rearrangement of the documents of each training dataset; empty if there is none.
        training_shares: Function that returns the shares of the training datasets in a blend, from their numbers of
            tokens without and with padding; None for the weights of the configuration.
    """

    data: DataConfig
    seq_length: int
    seed: int
    vocab_size: int
    tokenizer_hashes: Collection[str] = ()
    cache_dir: str | Path | None = None
    masking: Masking | None = None
    fill_in_middle: Sequence[FillInMiddle | None] = ()
    training_shares: Callable[[Sequence[int], Sequence[int]], Sequence[float]] | None = None

    def datasets(self, counts: SampleCounts, *, repeats_evaluations: bool = False) -> Datasets:
        """Open and check the data of all splits: `data_path` divided by `split`, or blends of the `*_data_paths`.

        Args:
            counts: Number of samples of each split that the run reads.
            repeats_evaluations: Whether each evaluation reads the same samples. Then a single dataset is read as it is.
                In gpt-neox's blend of one it has a sample more, and its passes are shuffled together: a small set could
                lose a document and have another one twice.

        Raises:
            DataError: If data are missing, damaged, or made with another tokenizer.
        """
        data = self.data
        splits: list[SampleDataset | BlendedDataset | None] = []
        if data.train_data_paths is not None:
            for blend, count in zip(data.blends, counts, strict=True):
                has_names = blend.split == "valid" and data.validation_sets
                is_evaluation = blend.split != "train"
                paths = blend.paths or ()
                if has_names:
                    splits.append(None)
                elif repeats_evaluations and is_evaluation and len(paths) == 1 and count != 0:
                    label = blend.labels[0] if blend.labels else None
                    splits.append(self.whole(paths[0], label, count))
                else:
                    splits.append(self.blended(blend, count))
        elif data.data_path is not None:
            splits += self.divided(data.data_path, data.split, counts)
        else:
            raise DataError(
                'no data: set "data_path" to a prefix made by tools/preprocess_data.py (P_text_document for '
                '--output-prefix P), or "train_data_paths"'
            )
        validation_sets = {}
        if counts.valid != 0:
            for name, item in data.validation_sets.items():
                validation_sets[name] = self.whole(item.path, item.labels, counts.valid)
        train, valid, test = splits
        return Datasets(train, valid, test, validation_sets)

    def divided(self, prefix: str, split: str, counts: SampleCounts) -> list[SampleDataset | None]:
        """Divide the documents of one dataset between training, validation and test."""
        indexed = self.open(prefix)
        total = self.num_documents(indexed)
        shares = split_shares(split)
        ranges = split_documents(split, total)
        result: list[SampleDataset | None] = []
        for name, share, documents, num_samples in zip(SampleCounts._fields, shares, ranges, counts, strict=True):
            if num_samples != 0 and documents:
                (fill_in_middle,) = self.rearrangements(name, 1)
                result.append(self.samples(indexed, documents, num_samples, fill_in_middle=fill_in_middle))
                continue
            result.append(None)
            if num_samples != 0 and share:  # a share of 0 asks for none
                # gpt-neox's default reserves a thousandth for the test, which is less than a sample of small data.
                is_default = split == DataConfig.model_fields["split"].default
                level = logging.DEBUG if name == "test" and is_default else logging.WARNING
                _log.log(
                    level,
                    "split %r of %d documents leaves none for %s, which is left out (a .txt is one document, a .jsonl "
                    "has one on each line)",
                    split,
                    total,
                    name,
                )
        return result

    def blended(self, blend: Blend, num_samples: int | None) -> BlendedDataset | None:
        """Blend several datasets. If no samples are needed or no paths are given, return None.

        Raises:
            DataError: A dataset is missing or damaged, or one pass over several was asked for.
        """
        if num_samples == 0:
            return None
        if not blend.paths:
            # No evaluations were asked for; the launcher reports evaluation keys without data.
            level = logging.INFO if blend.split == "valid" else logging.DEBUG
            _log.log(level, "without %s_data_paths there is no %s data", blend.split, blend.split)
            return None
        if num_samples is None:  # the launcher refuses it, with the keys
            raise DataError(f"{blend.split}_data_paths: one pass over a blend of several datasets is not defined")
        files = [self.open(path) for path in blend.paths]
        shares = self.shares(blend, files)
        counts = samples_of_each(shares, num_samples)
        labels: Sequence[str | None] = blend.labels or [None] * len(files)
        rearrangements = self.rearrangements(blend.split, len(files))
        datasets = []
        for indexed, count, label, fill_in_middle in zip(files, counts, labels, rearrangements, strict=True):
            documents = range(self.num_documents(indexed))
            datasets.append(self.samples(indexed, documents, count, label, fill_in_middle))
        listed = ", ".join(f"{path} {100 * share:.2f} %" for path, share in zip(blend.paths, shares, strict=True))
        _log.info("%s: %s", blend.split, listed)
        return BlendedDataset(datasets, shares, self.index_cache(files[0].prefix))

    def shares(self, blend: Blend, files: Sequence[IndexedDataset]) -> list[float]:
        """Return the share of each dataset in a blend: by number of documents, by size, by weight, or equal."""
        if self.data.weight_by_num_documents:
            documents = [self.num_documents(indexed) for indexed in files]
            return weights_by_documents(documents, self.data.weighted_sampler_alpha)
        if blend.split == "train" and self.training_shares is not None:
            sizes = [indexed.num_tokens for indexed in files]
            pass_tokens = []
            for indexed, label in zip(files, blend.labels or [None] * len(files), strict=True):
                labels = None
                if label is not None and self.data.pack_impl != "packed":
                    labels = self.open(label)
                pass_tokens.append(tokens_of_pass(indexed, range(len(indexed)), labels, self.data, self.seq_length))
            return list(self.training_shares(sizes, pass_tokens))
        if blend.weights is None:
            return normalized([1.0] * len(files))
        if len(blend.weights) != len(files):
            name = blend.split
            raise DataError(f"{name}_data_weights has {len(blend.weights)} weights for {len(files)} {name}_data_paths")
        return normalized(blend.weights)

    def whole(self, path: str, label: str | None, num_samples: int | None) -> SampleDataset:
        """Return the samples of all documents of one dataset, which no blend reorders.

        Args:
            path: Prefix of the token files.
            label: Prefix of the files of labels; None if each token is its own label.
            num_samples: Number of samples that the run asks for; None for one pass.
        """
        indexed = self.open(path)
        return self.samples(indexed, range(self.num_documents(indexed)), num_samples, label)

    def samples(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int | None,
        label_prefix: str | None = None,
        fill_in_middle: FillInMiddle | None = None,
    ) -> SampleDataset:
        """Return the samples of documents of a token dataset."""
        cache_dir = self.index_cache(indexed.prefix)
        if self.masking is not None:
            settings, vocabulary = self.masking
            assert num_samples is not None, "`eval_iters: all` is refused"
            return SentencePairDataset(indexed, documents, num_samples, settings, vocabulary, self.seed, cache_dir)
        return GPTDataset(
            indexed,
            documents,
            num_samples,
            self.seq_length,
            self.seed,
            cache_dir,
            packing=Packing(self.data.pack_impl, self.data.allow_chopped),
            labels=self.open_labels(indexed, label_prefix),
            fill_in_middle=fill_in_middle,
        )

    def training_documents(self) -> list[TrainingDocuments]:
        """Open the datasets of the training blend, without an order of samples. Stages give them one."""
        blend = self.data.blends[0]
        paths = blend.paths or ()
        labels: Sequence[str | None] = blend.labels or [None] * len(paths)
        rearrangements = self.rearrangements(blend.split, len(paths))
        opened = []
        for path, label, fill_in_middle in zip(paths, labels, rearrangements, strict=True):
            indexed = self.open(path)
            rows = TokenRows(indexed, self.open_labels(indexed, label), fill_in_middle, self.seq_length + 1)
            opened.append(TrainingDocuments(rows, range(len(indexed)), self.index_cache(path)))
        return opened

    def open(self, prefix: str) -> IndexedDataset:
        """Open a token dataset and check that it fits the run."""
        indexed = IndexedDataset(prefix, self.data.data_impl)
        check_fits(indexed, vocab_size=self.vocab_size, tokenizer_hashes=self.tokenizer_hashes)
        if self.data.mmap_warmup:
            indexed.warm_up()
        return indexed

    def open_labels(self, indexed: IndexedDataset, prefix: str | None) -> IndexedDataset | None:
        """Open the labels of a dataset, if it has any."""
        if prefix is None:
            return None
        labels = self.open(prefix)
        check_labels(indexed, labels)
        return labels

    def open_rewards(self, prefix: str) -> IndexedDataset:
        """Open a dataset of judgements, which are numbers instead of token ids and may be floating-point."""
        return IndexedDataset(prefix, self.data.data_impl, floats=True)

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
