"""Training data of a run: in gpt-neox's order, or in stages, or going on where another mixture has stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from neox.data.answer_pairs.pair_rows import PreferenceDataset
from neox.data.mixtures.blend import BlendedDataset
from neox.data.mixtures.ledger import SKIPPED_SAMPLES, DatasetRecord, IndexMapArguments, Ledger, dataset_keys
from neox.data.mixtures.passes import GptNeoxPasses
from neox.data.mixtures.staged import MixtureSegment, StagedDataset
from neox.data.mixtures.stream import DatasetStream
from neox.data.run_datasets import Samples
from neox.data.samples.gpt_dataset import GPTDataset
from neox.data.samples.rows import TrainingDocuments
from neox.log import get_logger
from neox.plan.readings import readings
from neox.plan.run_plan import RunPlan

_log = get_logger(__name__)

Dataset = Samples | BlendedDataset | StagedDataset | PreferenceDataset


class TrainingData(NamedTuple):
    """Training data of a run.

    Attributes:
        dataset: Samples of the run.
        ledger_at: Function from a number of steps to the ledger after them, as JSON; None if nothing is recorded.
    """

    dataset: Dataset
    ledger_at: Callable[[int], dict[str, Any]] | None


def in_gpt_neox_order(
    plan: RunPlan, dataset: Samples | BlendedDataset, steps: int, saved: Ledger | None
) -> TrainingData:
    """Return training data in gpt-neox's order, or going on if the checkpoint has read another mixture.

    Args:
        plan: Plan of the run.
        dataset: The samples in gpt-neox's order.
        steps: Number of steps that are done.
        saved: Ledger of the checkpoint; None if there is none.
    """
    members = _joined_datasets(dataset)
    if not members:
        return TrainingData(dataset, None)
    shares: tuple[float, ...] = (1.0,)
    if isinstance(dataset, BlendedDataset):
        shares = dataset.shares
    parts = [member.part for member in members]
    keys = dataset_keys(parts)
    mixture = {
        "order": "gpt-neox",
        "datasets": keys,
        "shares": list(shares),
        "passes": [member.passes for member in members],
        "seq_length": dataset.seq_length,
        "seed": plan.config.training.seed,
    }
    origin = _origin(plan, mixture, steps, saved)
    if origin.start:
        samples = _samples_of_run(plan) - origin.start
        segment = MixtureSegment(origin.start, samples, dataset.seq_length, shares)
        return _going_on(plan, parts, keys, [segment], origin)

    def ledger_at(steps: int) -> dict[str, Any]:
        samples = plan.batch_schedule.samples(steps)
        counts = _counts(dataset, samples)
        records = {}
        for key, member, count in zip(keys, members, counts, strict=True):
            order = IndexMapArguments(member.requested_samples, member.seq_length, member.seed)
            records[key] = DatasetRecord(gpt_neox=order).with_read(member.seq_length, count)
        return Ledger(mixture, 0, {}, samples, records).to_json()

    return TrainingData(dataset, ledger_at)


def in_stages(plan: RunPlan, parts: Sequence[TrainingDocuments], steps: int, saved: Ledger | None) -> TrainingData:
    """Return training data in `data_stages`.

    Args:
        plan: Plan of the run.
        parts: Training datasets.
        steps: Number of steps that are done.
        saved: Ledger of the checkpoint; None if there is none.

    Raises:
        ConfigError: If `train_data_max_passes` leaves too few tokens.
        DataError: If a dataset has no sample of a stage's length.
    """
    schedule = plan.batch_schedule
    keys = dataset_keys(parts)
    stages = []
    for stage in schedule.mixtures:
        weights = None if stage.weights is None else list(stage.weights)
        stages.append([schedule.samples(stage.step), stage.seq_length, weights, stage.temperature])
    limits = plan.config.data.max_passes
    mixture = {
        "order": "stages",
        "datasets": keys,
        "stages": stages,
        "max_passes": None if limits is None else list(limits),
        "seed": plan.config.training.seed,
    }
    if steps and saved is None:
        _log.warning("the checkpoint does not say what was read of the training data: every dataset starts again")
    origin = _origin(plan, mixture, steps, saved)
    return _going_on(plan, parts, keys, _segments(plan, parts, keys, origin), origin)


def _segments(
    plan: RunPlan, parts: Sequence[TrainingDocuments], keys: Sequence[str], origin: Ledger
) -> list[MixtureSegment]:
    """Return the segments of `data_stages` from the start of a ledger's mixture on."""
    schedule = plan.batch_schedule
    first_step = schedule.steps(origin.start)
    sizes = []
    read = []
    for key, part in zip(keys, parts, strict=True):
        sizes.append(part.rows.indexed.num_tokens)
        read.append(origin.before(key).tokens)
    segments = []
    end = _samples_of_run(plan)
    planned = readings(plan.config, schedule, sizes, read=read, from_step=first_step)
    for number in reversed(range(len(planned))):
        reading = planned[number]
        shares = origin.shares[number] if origin.shares else reading.shares
        start = schedule.samples(max(first_step, reading.mixture.step))
        segments.append(MixtureSegment(start, max(0, end - start), reading.mixture.seq_length, shares))
        end = start
    return segments[::-1]


def _origin(plan: RunPlan, mixture: Mapping[str, Any], steps: int, saved: Ledger | None) -> Ledger:
    """Return the ledger of the place from which the order of samples follows.

    It is that of the checkpoint, unless the mixture has changed since then, or the batch.
    """
    samples = plan.batch_schedule.samples(steps)
    if saved is None:
        start = samples if mixture["order"] == "stages" else 0
        return Ledger(mixture, start, {}, start, {})
    if saved.mixture == mixture and saved.samples == samples:
        return saved
    if _other_documents(mixture, saved):
        _log.warning(
            "the run reads other training data from here on (%d of %d datasets were not read before): other documents, "
            "or another `split`",
            _other_documents(mixture, saved),
            len(mixture["datasets"]),
        )
    _log.info("%s: each dataset is read on from where it was", _what_changed(mixture, saved))
    return Ledger(mixture, samples, saved.records, samples, saved.records)


def _other_documents(mixture: Mapping[str, Any], saved: Ledger) -> int:
    """Return the number of datasets that the ledger's run has not read."""
    return len(set(mixture["datasets"]) - set(saved.mixture.get("datasets", ())))


def _what_changed(mixture: Mapping[str, Any], saved: Ledger) -> str:
    """Return why a run does not continue in the order of a ledger."""
    skipped = saved.mixture.get(SKIPPED_SAMPLES, 0)
    before = {key: value for key, value in saved.mixture.items() if key != SKIPPED_SAMPLES}
    if before != mixture:
        if {**before, "passes": None} == {**mixture, "passes": None}:
            return "the number of passes over the training data has changed"
        return "the mixture of the training data has changed"
    if skipped:
        return f"{skipped:,} samples are skipped after a loss spike"
    return "the batch has changed"


def _going_on(
    plan: RunPlan,
    parts: Sequence[TrainingDocuments],
    keys: Sequence[str],
    segments: Sequence[MixtureSegment],
    origin: Ledger,
) -> TrainingData:
    """Return samples that follow those of a ledger."""
    before = []
    streams = []
    for key, part in zip(keys, parts, strict=True):
        record = origin.before(key)
        before.append(record)
        streams.append(_stream(part, record, plan.config.training.seed))
    dataset = StagedDataset(streams, segments, before, parts[0].cache_dir)
    shares = tuple(segment.shares for segment in segments)

    def ledger_at(steps: int) -> dict[str, Any]:
        samples = plan.batch_schedule.samples(steps)
        records = {**origin.at_start, **dict(zip(keys, dataset.records_at(samples), strict=True))}
        return Ledger(origin.mixture, origin.start, origin.at_start, samples, records, shares).to_json()

    return TrainingData(dataset, ledger_at)


def _stream(part: TrainingDocuments, record: DatasetRecord, seed: int) -> DatasetStream:
    gpt_neox = None
    if record.gpt_neox is not None:
        num_samples, seq_length, first_seed = record.gpt_neox
        first = GPTDataset(part.rows.indexed, part.documents, num_samples, seq_length, first_seed, part.cache_dir)
        gpt_neox = GptNeoxPasses(first.maps, seq_length)
    return DatasetStream(part, seed, gpt_neox)


def _joined_datasets(dataset: Samples | BlendedDataset) -> list[GPTDataset]:
    """Return the datasets of a blend, or the only one; none if one of them does not join its documents."""
    members: Sequence[Samples]
    if isinstance(dataset, BlendedDataset):
        members = dataset.datasets
    else:
        members = [dataset]
    joined = []
    for member in members:
        if not isinstance(member, GPTDataset) or member.packing.is_padded:
            return []
        joined.append(member)
    return joined


def _counts(dataset: Samples | BlendedDataset, samples: int) -> list[int]:
    """Return the number of samples of each dataset among the first ones of a run, which may have started again."""
    if not isinstance(dataset, BlendedDataset):
        return [samples]
    rounds, rest = divmod(samples, len(dataset.dataset_index))
    counts = np.bincount(dataset.dataset_index[:rest], minlength=len(dataset.datasets))
    if rounds:
        counts += rounds * np.bincount(dataset.dataset_index, minlength=len(dataset.datasets))
    found: list[int] = counts.tolist()
    return found


def _samples_of_run(plan: RunPlan) -> int:
    return plan.batch_schedule.samples(plan.config.training.train_iters or 0)
