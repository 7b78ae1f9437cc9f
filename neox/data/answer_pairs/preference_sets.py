"""Datasets of a run that learns from preferences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from neox.data.answer_pairs.answers import AnswerPairs
from neox.data.answer_pairs.pair_files import open_pairs
from neox.data.answer_pairs.pair_rows import PreferenceDataset
from neox.data.run_datasets import DatasetFactory
from neox.errors import DataError
from neox.log import get_logger
from neox.plan.run_plan import RunPlan

_log = get_logger(__name__)

ReferenceLogProbs = Callable[[AnswerPairs, str], np.ndarray]
"""Function from pairs, and the prefix of their first file, to their log-probabilities by the reference [pairs, 2]."""


def preference_datasets(
    plan: RunPlan, factory: DatasetFactory, counts: Sequence[int], reference: ReferenceLogProbs | None
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
        if not count or not answers.paths:
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
