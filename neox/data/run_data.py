"""Datasets and batch iterators of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from neox.config import NeoXConfig
from neox.config.sections.data import DataConfig
from neox.config.sections.training import TrainingConfig
from neox.data.answer_pairs.pair_rows import PreferenceBatchIterator, PreferenceDataset
from neox.data.answer_pairs.preference_sets import ReferenceLogProbs, preference_datasets
from neox.data.batches import BatchIterator, MaskedBatchIterator
from neox.data.masked.masking import MaskingVocabulary
from neox.data.masked.sentence_pairs import SentencePairDataset, SentencePairSettings
from neox.data.mixtures.blend import BlendedDataset
from neox.data.mixtures.ledger import Ledger
from neox.data.mixtures.training_order import Dataset, TrainingData, in_gpt_neox_order, in_stages
from neox.data.run_datasets import DatasetFactory, Masking, SampleCounts, Samples
from neox.data.samples.fill_in_middle import FillInMiddle
from neox.data.teacher_file import DistillationBatchIterator, TeacherFile
from neox.errors import DataError
from neox.log import get_logger
from neox.plan.readings import readings
from neox.plan.run_plan import RunPlan
from neox.tokenizer import Tokenizer, tokenizer_of

_log = get_logger(__name__)


class Datasets(NamedTuple):
    """Datasets of a run. A dataset is None if it has no documents, or no samples of it are read.

    Attributes:
        train: Training data.
        valid: Validation data without names.
        test: Test data.
        validation_sets: Validation data by name.
    """

    train: Samples | BlendedDataset | None
    valid: Samples | BlendedDataset | PreferenceDataset | None
    test: Samples | BlendedDataset | PreferenceDataset | None
    validation_sets: Mapping[str, Samples] = MappingProxyType({})


class EvaluationSet(NamedTuple):
    """Batches that are evaluated together.

    Attributes:
        batches: The batches.
        name: Name in metrics; None for the only set.
        weight: Weight of the set's scores in the mean over all sets.
        start: Number of the micro batch that each evaluation begins with; None to go on after the one before.
    """

    batches: BatchIterator
    name: str | None = None
    weight: float = 1.0
    start: int | None = None


class DataIterators(NamedTuple):
    """Batch iterators of one data-parallel rank.

    Attributes:
        train: Training batches.
        valid: Sets of the validation; none if there is nothing to read.
        test: Set of the test; none if there is nothing to read.
        ledger_at: Function from a number of steps to the record of what they have read, as JSON for checkpoints; None
            if it is not recorded.
    """

    train: BatchIterator
    valid: tuple[EvaluationSet, ...]
    test: tuple[EvaluationSet, ...]
    ledger_at: Callable[[int], dict[str, Any]] | None = None


def sample_counts(training: TrainingConfig, train_batch_size: int) -> SampleCounts:
    """Return the number of samples of a run. As in NeoX, an evaluation reads `eval_iters` training batches.

    Args:
        training: Length of the run, and its evaluations.
        train_batch_size: Number of samples of a step.
    """
    assert training.train_iters is not None
    evaluations = 1
    if training.eval_order == "gpt-neox":
        evaluations = evaluations_until(training, training.train_iters) + 1  # one more at the end
    samples_of_evaluation = training.eval_iters * train_batch_size
    return SampleCounts(
        train=training.train_iters * train_batch_size,
        valid=evaluations * samples_of_evaluation,
        test=samples_of_evaluation,
    )


def evaluations_until(training: TrainingConfig, steps: int) -> int:
    """Return the number of evaluations on validation data in the first steps of a run."""
    return training.eval_at_start + steps // training.eval_interval


def build_datasets(
    data: DataConfig,
    counts: SampleCounts,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    tokenizer_hashes: Collection[str] = (),
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
        tokenizer_hashes: `known_hashes` of the run's tokenizer; none leave out this comparison.
        cache_dir: Directory of the index maps (default: `index_maps/` next to the data).
        masking: Settings of masked language modelling; None for causal language modelling.
        fill_in_middle: Rearrangement of the documents of each training dataset. By default there is none.

    Raises:
        DataError: If data are missing, damaged, or made with another tokenizer.
    """
    factory = DatasetFactory(data, seq_length, seed, vocab_size, tokenizer_hashes, cache_dir, masking, fill_in_middle)
    return _open_datasets(factory, counts)


def _open_datasets(factory: DatasetFactory, counts: SampleCounts, *, repeats_evaluations: bool = False) -> Datasets:
    """Open the datasets of all splits.

    Args:
        factory: Opens datasets.
        counts: Number of samples of each split.
        repeats_evaluations: Whether each evaluation reads the same samples. Then a single dataset is read as it is. In
            gpt-neox's blend of one it has a sample more, and its passes are shuffled together: a small set could lose
            a document and have another one twice.
    """
    data = factory.data
    datasets: list[Samples | BlendedDataset | None]
    if data.train_data_paths is not None:
        datasets = []
        for blend, count in zip(data.blends, counts, strict=True):
            is_named = blend.split == "valid" and data.validation_sets
            paths = blend.paths or ()
            if is_named:
                datasets.append(None)
            elif len(paths) == 1 and blend.split != "train" and repeats_evaluations and count:
                label = blend.labels[0] if blend.labels else None
                datasets.append(factory.whole(paths[0], label, count))
            else:
                datasets.append(factory.blend(blend, count))
    elif data.data_path is not None:
        datasets = factory.split(data.data_path, data.split, counts)
    else:
        raise DataError(
            'no data: set "data_path" to a prefix made by tools/preprocess_data.py (P_text_document for '
            '--output-prefix P), or "train_data_paths"'
        )
    validation_sets = {}
    if counts.valid:
        for name, item in data.validation_sets.items():
            validation_sets[name] = factory.whole(item.path, item.labels, counts.valid)
    train, valid, test = datasets
    return Datasets(train, valid, test, validation_sets)


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
    batches. The next one reads them again, or continues after them (`eval_order`).

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
    training = plan.config.training
    batch = plan.batch
    if training.train_iters is None:
        raise DataError('"train_iters" is missing; it determines how much data is read')
    if tokenizer is None:
        tokenizer = tokenizer_of(plan.config)
    factory = _factory(plan, tokenizer, cache_dir)
    counts = sample_counts(training, batch.train_batch_size)
    if plan.config.preferences.on_preferences:
        data, evaluation = _preferences(plan, factory, counts, reference)
    else:
        data, evaluation = _training_and_evaluation(plan, factory, counts, consumed_iterations, ledger)
    iterator = partial(_iterator, plan, tokenizer, dp_rank)
    train_start = plan.batch_schedule.samples(consumed_iterations) // batch.samples_at_once
    evaluations = _evaluations_done(training, consumed_iterations)
    valid_start = evaluations * training.eval_iters * batch.gradient_accumulation_steps
    fixed_start = None
    if training.eval_order == "fixed":
        valid_start = 0
        fixed_start = 0
    valid = []
    if evaluation.valid is not None:
        valid.append(EvaluationSet(iterator(evaluation.valid, valid_start, "valid"), start=fixed_start))
    for name, dataset in evaluation.validation_sets.items():
        weight = plan.config.data.validation_sets[name].weight
        valid.append(EvaluationSet(iterator(dataset, valid_start, f"valid-{name}"), name, weight, fixed_start))
    test = []
    if evaluation.test is not None:
        test.append(EvaluationSet(iterator(evaluation.test, 0, "test"), start=fixed_start))
    return DataIterators(iterator(data.dataset, train_start, "train"), tuple(valid), tuple(test), data.ledger_at)


def _evaluations_done(training: TrainingConfig, steps: int) -> int:
    """Return the number of evaluations that a run has done when it starts after some steps."""
    if steps == 0:
        return 0
    done = evaluations_until(training, steps)
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
        return readings(config, plan.batch_schedule, sizes, pass_tokens=pass_tokens)[0].shares

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


def _training_and_evaluation(
    plan: RunPlan, factory: DatasetFactory, counts: SampleCounts, steps: int, saved: Mapping[str, Any] | None
) -> tuple[TrainingData, Datasets]:
    """Return the training data after some steps, and the datasets of evaluations."""
    ledger = None
    if saved is not None:
        ledger = Ledger.from_json(saved)
    repeats = plan.config.training.eval_order == "fixed"
    if plan.config.data.data_stages:
        evaluation = _open_datasets(factory, counts._replace(train=0), repeats_evaluations=repeats)
        return in_stages(plan, factory.parts(factory.data.blends[0]), steps, ledger), evaluation
    samples = plan.batch_schedule.samples(plan.config.training.train_iters or 0)
    datasets = _open_datasets(factory, counts._replace(train=samples), repeats_evaluations=repeats)
    if datasets.train is None:
        raise DataError("there are no documents to train on: `split` needs a first part above 0, and train_iters too")
    return in_gpt_neox_order(plan, datasets.train, steps, ledger), datasets


def _preferences(
    plan: RunPlan, factory: DatasetFactory, counts: SampleCounts, reference: ReferenceLogProbs | None
) -> tuple[TrainingData, Datasets]:
    """Return the training data and the datasets of evaluations of a run that learns from preferences."""
    counts = counts._replace(train=plan.batch_schedule.samples(plan.config.training.train_iters or 0))
    train, valid, test = preference_datasets(plan, factory, counts, reference)
    if train is None:
        raise DataError("there are no answers to train on: give the files that train_impl reads, and train_iters")
    return TrainingData(train, None), Datasets(None, valid, test)


def _iterator(
    plan: RunPlan, tokenizer: Tokenizer, dp_rank: int, dataset: Dataset, start: int, split: str
) -> BatchIterator:
    """Build the iterator of the dataset of a split; its first micro batch is number `start`."""
    part = dataset.datasets[0] if isinstance(dataset, BlendedDataset) else dataset
    kind: Callable[..., BatchIterator] = BatchIterator
    if isinstance(part, SentencePairDataset):
        kind = partial(MaskedBatchIterator, part.split_rows)
    elif isinstance(part, PreferenceDataset):
        kind = PreferenceBatchIterator
    keys = plan.config.distillation
    if keys.teacher_logits is not None:
        logits = TeacherFile(Path(keys.teacher_logits), split, plan.vocab_size, tokenizer, keys.distillation_top_k)
        kind = partial(DistillationBatchIterator, logits)
    data = plan.config.data
    return kind(
        dataset,
        plan.batch.train_micro_batch_size_per_gpu,
        dp_rank=dp_rank,
        dp_size=plan.grid.data_size,
        start=start,
        num_workers=data.num_workers,
        eod=tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
        vocab_size=plan.vocab_size,
        mark_documents=data.reset_attention_mask,
        mark_padding=plan.marks_padding,
        boundaries=data.document_boundaries,
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
