"""Order of the training data: gpt-neox's, in stages, or continued where another mixture has stopped.

A batch is a function of the step. The order of a mixture begins at one sample of the run, `Ledger.start`:

    samples of the run    0 ................... start .................. samples ........>
                          read of other mixtures  | read of this mixture   | next batch
                          `Ledger.at_start`       | `Ledger.records`

    ledger of the checkpoint            start of the order
    none                                sample 0; with `data_stages` the next sample
    of the same mixture and batch       as before
    of another mixture or batch         the next sample: each dataset is read on from where it was

Only an order that starts at sample 0 can be gpt-neox's. Every later one is a `StagedDataset`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from neox.data.batches import SampleSource
from neox.data.mixtures.blend import BlendedDataset, SampleDataset
from neox.data.mixtures.ledger import SKIPPED_SAMPLES, DatasetRecord, IndexMapArguments, Ledger, dataset_keys
from neox.data.mixtures.passes import GptNeoxPasses
from neox.data.mixtures.staged import MixtureSegment, StagedDataset
from neox.data.mixtures.stream import DatasetStream
from neox.data.samples.gpt_dataset import GPTDataset
from neox.data.samples.rows import TrainingDocuments
from neox.log import get_logger
from neox.plan.batches.dataset_shares import shares_of_stages
from neox.plan.run_plan import RunPlan

_log = get_logger(__name__)


class TrainingData(NamedTuple):
    """Training data of a run.

    Attributes:
        dataset: Samples of the run.
        ledger_at: Function from a number of steps to the ledger after them, as JSON; None if nothing is recorded.
    """

    dataset: SampleSource
    ledger_at: Callable[[int], dict[str, Any]] | None


def in_gpt_neox_order(
    plan: RunPlan, dataset: SampleDataset | BlendedDataset, steps: int, saved: Ledger | None
) -> TrainingData:
    """Return training data in gpt-neox's order, or continued if the checkpoint has read another mixture.

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
    documents = [member.training_documents for member in members]
    keys = dataset_keys(documents)
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
        rest = _samples_of_run(plan) - origin.start
        segment = MixtureSegment(origin.start, rest, dataset.seq_length, shares)
        return _continued(plan, documents, keys, [segment], origin)

    def ledger_at(steps: int) -> dict[str, Any]:
        samples = plan.batch_schedule.samples(steps)
        records = {}
        for key, member, count in zip(keys, members, _samples_of_each(dataset, samples), strict=True):
            assert member.requested_samples is not None, "training reads a number of samples"
            order = IndexMapArguments(member.requested_samples, member.seq_length, member.seed)
            records[key] = DatasetRecord(gpt_neox=order).with_read(member.seq_length, count)
        return Ledger(mixture, 0, {}, samples, records).to_json()

    return TrainingData(dataset, ledger_at)


def in_stages(plan: RunPlan, documents: Sequence[TrainingDocuments], steps: int, saved: Ledger | None) -> TrainingData:
    """Return training data in `data_stages`.

    Args:
        plan: Plan of the run.
        documents: Documents of each training dataset.
        steps: Number of steps that are done.
        saved: Ledger of the checkpoint; None if there is none.

    Raises:
        ConfigError: If `train_data_max_passes` leaves too few tokens.
        DataError: If a dataset has no sample of a stage's length.
    """
    schedule = plan.batch_schedule
    keys = dataset_keys(documents)
    stages = []
    for stage in schedule.mixtures:
        weights = None if stage.weights is None else list(stage.weights)
        stages.append([schedule.samples(stage.step), stage.seq_length, weights, stage.temperature])
    max_passes = plan.config.data.max_passes
    mixture = {
        "order": "stages",
        "datasets": keys,
        "stages": stages,
        "max_passes": None if max_passes is None else list(max_passes),
        "seed": plan.config.training.seed,
    }
    if steps and saved is None:
        _log.warning("the checkpoint does not say what was read of the training data: every dataset starts again")
    origin = _origin(plan, mixture, steps, saved)

    # The stages that are left, or what is left of one. The last one ends with the run.
    sizes = []
    read = []
    for key, each in zip(keys, documents, strict=True):
        sizes.append(each.rows.indexed.num_tokens)
        read.append(origin.before(key).tokens)
    first_step = schedule.steps(origin.start)
    planned = shares_of_stages(plan.config, schedule, sizes, read=read, from_step=first_step)
    segments = []
    end = _samples_of_run(plan)
    for number in reversed(range(len(planned))):
        reading = planned[number]
        # Shares that follow from sizes and limits are kept: computed again, they would differ by what has been read.
        shares = origin.shares[number] if origin.shares else reading.shares
        start = schedule.samples(max(first_step, reading.mixture.step))
        segments.append(MixtureSegment(start, max(0, end - start), reading.mixture.seq_length, shares))
        end = start
    segments.reverse()
    return _continued(plan, documents, keys, segments, origin)


def _origin(plan: RunPlan, mixture: Mapping[str, Any], steps: int, saved: Ledger | None) -> Ledger:
    """Return the ledger of the place where the order of samples starts, as in the table above."""
    samples = plan.batch_schedule.samples(steps)
    if saved is None:
        start = samples if mixture["order"] == "stages" else 0
        return Ledger(mixture, start, {}, start, {})
    if saved.mixture == mixture and saved.samples == samples:
        return saved

    unread = set(mixture["datasets"]) - set(saved.mixture.get("datasets", ()))
    if unread:
        _log.warning(
            "the run reads other training data from here on (%d of %d datasets were not read before): other documents, "
            "or another `split`",
            len(unread),
            len(mixture["datasets"]),
        )
    skipped = saved.mixture.get(SKIPPED_SAMPLES, 0)
    before = {key: value for key, value in saved.mixture.items() if key != SKIPPED_SAMPLES}
    if before != mixture:
        change = "the mixture of the training data has changed"
        if {**before, "passes": None} == {**mixture, "passes": None}:
            change = "the number of passes over the training data has changed"
    elif skipped:
        change = f"{skipped:,} samples are skipped after a loss spike"
    else:
        change = "the batch has changed"
    _log.info("%s: each dataset is read on from where it was", change)
    return Ledger(mixture, samples, saved.records, samples, saved.records)


def _continued(
    plan: RunPlan,
    documents: Sequence[TrainingDocuments],
    keys: Sequence[str],
    segments: Sequence[MixtureSegment],
    origin: Ledger,
) -> TrainingData:
    """Return samples that follow those of a ledger."""
    records = []
    streams = []
    for key, each in zip(keys, documents, strict=True):
        record = origin.before(key)
        gpt_neox = None
        if record.gpt_neox is not None:  # the rest of the order that the run began with comes first
            num_samples, seq_length, seed = record.gpt_neox
            first = GPTDataset(each.rows.indexed, each.documents, num_samples, seq_length, seed, each.cache_dir)
            gpt_neox = GptNeoxPasses(first.maps, seq_length)
        records.append(record)
        streams.append(DatasetStream(each, plan.config.training.seed, gpt_neox))
    dataset = StagedDataset(streams, segments, records, documents[0].cache_dir)
    shares = tuple(segment.shares for segment in segments)

    def ledger_at(steps: int) -> dict[str, Any]:
        samples = plan.batch_schedule.samples(steps)
        at_samples = dict(zip(keys, dataset.records_at(samples), strict=True))
        records = {**origin.at_start, **at_samples}  # with datasets that are no longer read
        return Ledger(origin.mixture, origin.start, origin.at_start, samples, records, shares).to_json()

    return TrainingData(dataset, ledger_at)


def _joined_datasets(dataset: SampleDataset | BlendedDataset) -> list[GPTDataset]:
    """Return the datasets of a blend, or the only one; none if one of them does not join its documents."""
    members: Sequence[SampleDataset] = [dataset] if not isinstance(dataset, BlendedDataset) else dataset.datasets
    joined = []
    for member in members:
        if not isinstance(member, GPTDataset) or member.packing.is_padded:
            return []
        joined.append(member)
    return joined


def _samples_of_each(dataset: SampleDataset | BlendedDataset, samples: int) -> list[int]:
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
