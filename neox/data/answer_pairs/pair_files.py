"""Opening of the token files of pairs of answers, and of answers that are judged one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neox.config.sections.preferences import SplitAnswers
from neox.data.answer_pairs.answers import (
    AnswerFiles,
    AnswerPairs,
    JudgedAnswers,
    PreferencePairs,
    RewardPairs,
    desirable_answers,
)
from neox.data.token_files.indexed_dataset import IndexedDataset
from neox.errors import DataError

Open = Callable[[str], IndexedDataset]


def open_pairs(answers: SplitAnswers, seq_length: int, open_file: Open, open_rewards: Open) -> AnswerPairs:
    """Open the answers of a split.

    Args:
        answers: Their files.
        seq_length: Number of positions of a row.
        open_file: Function that opens a token file, given its prefix.
        open_rewards: The same for a file of judgements, which has one number per token or one per answer.

    Raises:
        DataError: If files are missing, damaged, or do not fit together.
    """
    first = _answers(answers.paths or (), answers.labels, open_file)
    if answers.rewards is None:
        kind = RewardPairs if answers.scored else PreferencePairs
        return kind(first, _answers(answers.others or (), answers.other_labels, open_file))
    rewards = _answers(answers.rewards, None, open_rewards)
    one_each = len(rewards) == len(first) and bool((rewards.sizes == 1).all())
    if not one_each and rewards.sizes.tolist() != first.sizes.tolist():
        raise DataError(
            f"{answers.split}_reward_data_paths do not have the same documents as {answers.split}_data_paths; give "
            "the files that were made with them, in the same order"
        )
    return JudgedAnswers(first, desirable_answers(rewards), seq_length)


def _answers(prefixes: Sequence[str], labels: Sequence[str] | None, open_file: Open) -> AnswerFiles:
    """Open token files, and their labels if there are any."""
    own_labels: list[IndexedDataset | None] = [None] * len(prefixes)
    if labels is not None:
        own_labels = list(map(open_file, labels))
    return AnswerFiles(list(map(open_file, prefixes)), own_labels)
