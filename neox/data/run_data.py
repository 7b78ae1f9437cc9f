"""From the plan of a run to the batches of one data-parallel rank.

RunPlan, tokenizer
|  DatasetFactory.datasets           token files -> samples of each split (`run_datasets`)
|  in_gpt_neox_order, in_stages      the order of the training samples (`mixtures.training_order`)
|  open_preferences                  instead of both: rows of pairs of answers (`answer_pairs.pair_rows`)
v
datasets                                number of a sample -> its row of tokens
|  BatchIterator                     number of a micro batch -> its samples on this rank (`batches`)
v
DataIterators                           train, valid, test
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neox.config import NeoXConfig
from neox.config.sections.training import TrainingConfig
from neox.data.answer_pairs.answers import AnswerPairs, open_pairs
from neox.data.answer_pairs.pair_rows import PreferenceDataset
from neox.data.batches import BatchIterator, MaskedBatchIterator, PreferenceBatchIterator, SampleSource
from neox.data.masked.masking import MaskingVocabulary
from neox.data.masked.sentence_pairs import SentencePairDataset, SentencePairSettings
from neox.data.mixtures.blend import BlendedDataset
from neox.data.mixtures.ledger import Ledger
from neox.data.mixtures.training_order import TrainingData, in_gpt_neox_order, in_stages
from neox.data.run_datasets import DatasetFactory, Datasets, Masking, SampleCounts
from neox.data.samples.fill_in_middle import FillInMiddle
from neox.data.samples.gpt_dataset import GPTDataset
from neox.data.teacher_file import DistillationBatchIterator, TeacherFile
from neox.data.token_files.sidecar import bytes_per_token
from neox.errors import DataError
from neox.log import get_logger
from neox.plan.batches.dataset_shares import shares_of_stages
from neox.plan.run_plan import RunPlan
from neox.tokenizer import Tokenizer, tokenizer_of

_log = get_logger(__name__)

ReferenceLogProbs = Callable[[AnswerPairs, str], np.ndarray]
"""Function from pairs, and the prefix of their first file, to their log-probabilities by the reference [pairs, 2]."""


class EvaluationSet(NamedTuple):
    """Batches that are evaluated together.

    Attributes:
        batches: The batches.
        name: Name in metrics; None for the only set.
        weight: Weight of the set's scores in the mean over all sets.
        start: Number of the micro batch that each evaluation begins with; None to continue after the one before.
        micro_batches: Number of micro batches of an evaluation on this rank; None for those of `eval_iters` steps.
        bytes_per_token: Bytes of text for each token of its data; None if they are not known.
    """

    batches: BatchIterator
    name: str | None = None
    weight: float = 1.0
    start: int | None = None
    bytes_per_token: float | None = None
    micro_batches: int | None = None


class DataIterators(NamedTuple):
    """Batch iterators of one data-parallel rank.

    Attributes:
        train: Training batches.
        valid: Sets of the validation; none if there is nothing to read.
        test: Set of the test; none if there is nothing to read.
        ledger_at: Function from a number of steps to the record of what they have read, as JSON for checkpoints; None
            if it is not recorded.
        bytes_per_token: Bytes of text for each token of the training data; None if they are not known.
    """

    train: BatchIterator
    valid: tuple[EvaluationSet, ...]
    test: tuple[EvaluationSet, ...]
    ledger_at: Callable[[int], dict[str, Any]] | None = None
    bytes_per_token: float | None = None


def build_data_iterators(
    plan: RunPlan,
    dp_rank: int = 0,
    consumed_iterations: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
    cache_dir: str | Path | None = None,
    ledger: Mapping[str, Any] | None = None,
    reference: ReferenceLogProbs | None = None,
) -> DataIterators:
    """Build the batch iterators of one data-parallel rank.

    Their positions are those of an uninterrupted run after `consumed_iterations`. A training iteration reads the number
    of samples in the plan's batch schedule. An evaluation reads `eval_iters` times `gradient_accumulation_steps` micro
    batches, or the whole set. The next one reads them again, or continues after them (`eval_order`).

    Args:
        plan: Plan of the run.
        dp_rank: Number of the data-parallel rank.
        consumed_iterations: Number of training iterations that are done.
        tokenizer: Tokenizer of the run (default: it is built from the configuration).
        cache_dir: Directory of the index maps (default: `index_maps/` next to the data).
        ledger: Record of the checkpoint, from `DataIterators.ledger_at`. With it, a run whose datasets or weights have
            changed reads nothing twice.
        reference: Log-probabilities of answers by a reference model, for losses of preferences that need it.

    Raises:
        DataError: If data are missing, damaged, or made with another tokenizer, or there is nothing to train on.
    """
    config = plan.config
    training = config.training
    if training.train_iters is None:
        raise DataError('"train_iters" is missing; it determines how much data is read')
    if tokenizer is None:
        tokenizer = tokenizer_of(config)
    factory = _factory(plan, tokenizer, cache_dir)

    # How many samples the whole run reads. gpt-neox's order depends on it.
    counts = sample_counts(training, plan.batch.train_batch_size)
    counts = counts._replace(train=plan.batch_schedule.samples(training.train_iters))
    repeats_evaluations = training.eval_order == "fixed"

    # Which samples, and in which order: it follows from the steps that are done and what the checkpoint has read.
    saved = None if ledger is None else Ledger.from_json(ledger)
    if config.preferences.on_preferences:
        train, valid, test = open_preferences(plan, factory, counts, reference)
        if train is None:
            raise DataError("there are no answers to train on: give the files that train_impl reads, and train_iters")
        datasets = Datasets(None, valid, test)
        training_data = TrainingData(train, None)
    elif config.data.data_stages:
        datasets = factory.datasets(counts._replace(train=0), repeats_evaluations=repeats_evaluations)
        training_data = in_stages(plan, factory.training_documents(), consumed_iterations, saved)
    else:
        datasets = factory.datasets(counts, repeats_evaluations=repeats_evaluations)
        if datasets.train is None:
            raise DataError(
                "there are no documents to train on: `split` needs a first part above 0, and train_iters too"
            )
        training_data = in_gpt_neox_order(plan, datasets.train, consumed_iterations, saved)

    # Where each iterator starts, in micro batches.
    train_start = plan.batch_schedule.samples(consumed_iterations) // plan.batch.samples_at_once
    if repeats_evaluations:
        valid_start = 0
        each_start = 0  # of each evaluation
    else:
        assert training.eval_iters != "all"
        evaluations = _evaluations_done(training, consumed_iterations)
        valid_start = evaluations * training.eval_iters * plan.batch.gradient_accumulation_steps
        each_start = None

    def evaluation_set(
        dataset: SampleSource, start: int, split: str, name: str | None = None, weight: float = 1.0
    ) -> EvaluationSet:
        reads_all = training.eval_iters == "all"
        batches = _iterator(plan, tokenizer, dp_rank, dataset, start, split, whole=reads_all)
        samples = training.evaluation_samples(plan.batch.train_batch_size)
        if samples is None:
            samples = dataset.num_samples
        return EvaluationSet(
            batches,
            name,
            weight,
            each_start,
            mean_bytes(dataset),
            batches.micro_batches if reads_all else None,
        )

    valid_sets = []
    if datasets.valid is not None:
        valid_sets.append(evaluation_set(datasets.valid, valid_start, "valid"))
    for name, dataset in datasets.validation_sets.items():
        weight = config.data.validation_sets[name].weight
        valid_sets.append(evaluation_set(dataset, valid_start, f"valid-{name}", name, weight))
    test_sets = []
    if datasets.test is not None:
        test_sets.append(evaluation_set(datasets.test, 0, "test"))
    return DataIterators(
        _iterator(plan, tokenizer, dp_rank, training_data.dataset, train_start, "train"),
        tuple(valid_sets),
        tuple(test_sets),
        training_data.ledger_at,
        mean_bytes(training_data.dataset),
    )


def mean_bytes(dataset: object) -> float | None:
    """Return the mean bytes of text for each token that a dataset gives to train.

    Args:
        dataset: Samples of plain texts, or a blend of such samples, whose shares weigh them.

    Returns:
        The bytes; None if those of a part are not known, and for data whose tokens are not all trained or not all text.
    """
    if isinstance(dataset, BlendedDataset):
        total = 0.0
        for member, share in zip(dataset.datasets, dataset.shares, strict=True):
            own = mean_bytes(member)
            if own is None:
                return None
            total += share * own
        return total
    if not isinstance(dataset, GPTDataset) or dataset.labels is not None or dataset.rows.fill_in_middle is not None:
        return None
    return bytes_per_token(dataset.indexed.prefix)


def sample_counts(training: TrainingConfig, train_batch_size: int) -> SampleCounts:
    """Return the number of samples of a run.

    Args:
        training: Length of the run, and its evaluations.
        train_batch_size: Number of samples of a step.
    """
    assert training.train_iters is not None
    train = training.train_iters * train_batch_size
    samples = training.evaluation_samples(train_batch_size)
    if samples is None:
        return SampleCounts(train, None, None)
    evaluations = 1
    if training.eval_order == "gpt-neox":
        evaluations = _evaluations_until(training, training.train_iters) + 1  # one more at the end
    return SampleCounts(train, valid=evaluations * samples, test=samples)


def _evaluations_until(training: TrainingConfig, steps: int) -> int:
    """Return the number of evaluations on validation data in the first steps of a run."""
    return training.eval_at_start + steps // training.eval_interval


def _evaluations_done(training: TrainingConfig, steps: int) -> int:
    """Return the number of evaluations that a run has done when it starts after some steps."""
    if steps == 0:
        return 0
    done = _evaluations_until(training, steps)
    if steps >= (training.train_iters or 0) and steps % training.eval_interval == 0:
        done -= 1  # a completed run that is started again repeats its last evaluation
    return done


def _factory(plan: RunPlan, tokenizer: Tokenizer, cache_dir: str | Path | None) -> DatasetFactory:
    """Return the factory of the datasets of a run."""
    config = plan.config
    data = config.data
    seed = config.training.seed
    assert config.model.seq_length is not None

    def training_shares(sizes: Sequence[int], pass_tokens: Sequence[int]) -> Sequence[float]:
        return shares_of_stages(config, plan.batch_schedule, sizes, pass_tokens=pass_tokens)[0].shares

    follows_sizes = data.train_data_temperature is not None or data.max_passes is not None
    return DatasetFactory(
        data,
        config.model.seq_length,
        seed,
        plan.vocab_size,
        tokenizer.known_hashes,
        cache_dir,
        _masking(config, tokenizer, plan.vocab_size),
        [FillInMiddle.of(data, rate, tokenizer, seed) for rate in data.fim_rates],
        training_shares if follows_sizes else None,
    )


def _masking(config: NeoXConfig, tokenizer: Tokenizer, vocab_size: int) -> Masking | None:
    """Return the settings of masked language modelling; None for causal language modelling."""
    data = config.data
    model = config.model
    if model.predicted_tokens is None:
        return None
    assert model.seq_length is not None
    settings = SentencePairSettings(
        seq_length=model.seq_length,
        max_predictions=model.predicted_tokens,
        pairs=data.sentence_pairs if model.bert_binary_head else None,
        mask_share=data.mask_prob,
        short_share=data.short_seq_prob,
        whole_words=data.whole_word_mask,
    )
    vocabulary = MaskingVocabulary.of(tokenizer)
    return Masking(settings, replace(vocabulary, size=min(vocabulary.size, vocab_size)))


def open_preferences(
    plan: RunPlan, factory: DatasetFactory, counts: SampleCounts, reference: ReferenceLogProbs | None
) -> list[PreferenceDataset | None]:
    """Open the answers for training, validation and test. A dataset is None if it has no files, or is not read.

    Args:
        plan: Plan of the run.
        factory: Opens and checks token files.
        counts: Number of rows of each that the run reads.
        reference: Log-probabilities by the reference, which some losses need.

    Raises:
        DataError: If files are missing, damaged, do not fit together, or hold pairs that cannot be trained on; or if
            the reference is needed and not given.
    """
    keys = plan.config.preferences
    datasets: list[PreferenceDataset | None] = []
    for answers, count in zip(keys.answers(plan.config.data), counts, strict=True):
        if count == 0 or not answers.paths:
            datasets.append(None)
            continue
        pairs = open_pairs(answers, factory.seq_length, factory.open, factory.open_rewards)
        dataset = PreferenceDataset(
            pairs,
            count,
            factory.seq_length,
            factory.seed,
            impl=factory.data.pack_impl,
            skip_bad=keys.skip_bad_pairs,
        )
        if keys.needs_reference and not keys.copies_reference:
            if reference is None:
                raise DataError(f"train_impl: {keys.train_impl} needs the log-probabilities of a reference model")
            dataset.reference = reference(pairs, answers.paths[0])  # bad pairs have been refused by now
        _log.info("%s: %d pairs of answers fill %.1f %% of the rows", answers.split, len(pairs), 100 * dataset.filled)
        datasets.append(dataset)
    return datasets


def _iterator(
    plan: RunPlan,
    tokenizer: Tokenizer,
    dp_rank: int,
    dataset: SampleSource,
    start: int,
    split: str,
    *,
    whole: bool = False,
) -> BatchIterator:
    """Build the iterator of the dataset of a split; its first micro batch is number `start`."""
    data = plan.config.data
    distillation = plan.config.distillation
    micro_batch_size = plan.batch.train_micro_batch_size_per_gpu
    settings: dict[str, Any] = {
        "dp_rank": dp_rank,
        "dp_size": plan.grid.data_size,
        "start": start,
        "num_workers": data.num_workers,
        "eod": tokenizer.eod,
        "eod_mask_loss": data.eod_mask_loss,
        "vocab_size": plan.vocab_size,
        "mark_documents": data.reset_attention_mask,
        "label_documents": plan.architecture.mtp_num_layers > 0,
        "mark_padding": plan.marks_padding,
        "boundaries": data.document_boundaries,
        "whole": whole,
    }
    if distillation.teacher_logits is not None:
        directory = Path(distillation.teacher_logits)
        teacher = TeacherFile(directory, split, plan.vocab_size, tokenizer, distillation.distillation_top_k)
        return DistillationBatchIterator(teacher, dataset, micro_batch_size, **settings)
    member = dataset.datasets[0] if isinstance(dataset, BlendedDataset) else dataset
    if isinstance(member, SentencePairDataset):
        return MaskedBatchIterator(member.split_rows, dataset, micro_batch_size, **settings)
    if isinstance(member, PreferenceDataset):
        return PreferenceBatchIterator(dataset, micro_batch_size, **settings)
    return BatchIterator(dataset, micro_batch_size, **settings)
