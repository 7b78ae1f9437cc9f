"""Answers to prompts in token files: pairs of two answers, and answers that are judged one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from neox.config.sections.preferences import SplitAnswers
from neox.data.token_files.indexed_dataset import IGNORED, IndexedDataset
from neox.data.token_files.sidecar import check_labels
from neox.errors import DataError

ANSWERS_PER_PAIR = 2
"""Answers of a pair."""

OpenFile = Callable[[str], IndexedDataset]
"""Function that opens a token file, given its prefix."""


class PromptAnswer(NamedTuple):
    """A prompt and an answer to it.

    Attributes:
        ids: Token ids [tokens].
        in_answer: Whether each token belongs to the answer; the first one never does, bool [tokens].
    """

    ids: np.ndarray
    in_answer: np.ndarray


class AnswerFiles:
    """Documents of several token files with labels, numbered through.

    Args:
        files: Token files, with the same sequences as their labels.
        labels: Their labels, IGNORED outside answers; None if every token is of the answer.

    Attributes:
        sizes: Number of tokens of each document [documents].
    """

    def __init__(self, files: Sequence[IndexedDataset], labels: Sequence[IndexedDataset | None]) -> None:
        for tokens, own_labels in zip(files, labels, strict=True):
            if own_labels is not None:
                check_labels(tokens, own_labels)
        self._files = files
        self._labels = labels
        self._ends = np.cumsum([len(tokens) for tokens in files])
        self.sizes = np.concatenate([np.asarray(tokens.sizes) for tokens in files]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def locate(self, number: int) -> tuple[int, int]:
        """Return the file of a document, and its number there."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        first = 0
        if file:
            first = int(self._ends[file - 1])
        return file, number - first

    def name(self, number: int) -> str:
        """Return the name of a document in messages."""
        file, document = self.locate(number)
        return f"{self._files[file].prefix}, document {document}"

    def ids(self, number: int) -> np.ndarray:
        """Return the tokens of a document."""
        file, document = self.locate(number)
        return np.asarray(self._files[file][document])

    def document(self, number: int) -> PromptAnswer:
        """Return a document."""
        file, document = self.locate(number)
        ids = np.asarray(self._files[file][document])
        in_answer = np.ones(len(ids), dtype=bool)
        labels = self._labels[file]
        if labels is not None:
            in_answer = np.asarray(labels[document]) != IGNORED
        in_answer[:1] = False
        return PromptAnswer(ids, in_answer)


class AnswerPairs(ABC):
    """Pairs of documents that a row of training holds together.

    Attributes:
        sizes: Number of positions of both documents in a row [pairs, 2]. The last token of a document is only
            predicted, so it takes none.
        desirable: Whether the first document of each pair has a good answer, bool [pairs]; None for two answers, of
            which the first one is preferred.
        keeps_last: Whether a row includes the last token of each document, because its hidden state is scored.
    """

    sizes: np.ndarray
    desirable: np.ndarray | None = None
    keeps_last = False

    def __len__(self) -> int:
        return len(self.sizes)

    @abstractmethod
    def documents(self, number: int) -> tuple[PromptAnswer, PromptAnswer]:
        """Return the documents of a pair."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return the name of a pair in messages."""

    def problem(self, number: int, seq_length: int) -> str | None:
        """Return why a pair cannot be trained on; None if it can.

        Args:
            number: Number of the pair.
            seq_length: Number of positions of a row.
        """
        needed = int(self.sizes[number].sum())
        if needed > seq_length:
            return f"it needs {needed:,} positions, and a row has seq_length: {seq_length:,}"
        first, second = self.documents(number)
        if not first.in_answer.any() or not second.in_answer.any():
            return "an answer has no labelled token"
        return None


class PreferencePairs(AnswerPairs):
    """A preferred and another answer to each prompt.

    Args:
        chosen: Preferred answers.
        rejected: The other answers, in the same order.

    Raises:
        DataError: If their numbers differ.
    """

    def __init__(self, chosen: AnswerFiles, rejected: AnswerFiles) -> None:
        if len(chosen) != len(rejected):
            raise DataError(
                f"there are {len(chosen):,} preferred answers and {len(rejected):,} others: give the files that were "
                "made together, in the same order"
            )
        self._chosen = chosen
        self._rejected = rejected
        self.sizes = np.stack([chosen.sizes, rejected.sizes], axis=1) - 1

    def documents(self, number: int) -> tuple[PromptAnswer, PromptAnswer]:
        """Return the preferred answer and the other one."""
        return self._chosen.document(number), self._rejected.document(number)

    def name(self, number: int) -> str:
        """Return the name of a pair in messages."""
        return self._chosen.name(number)

    def problem(self, number: int, seq_length: int) -> str | None:
        """Return why a pair cannot be trained on; None if it can."""
        if np.array_equal(self._chosen.ids(number), self._rejected.ids(number)):
            return "both answers are equal, so that nothing is preferred"
        return super().problem(number, seq_length)


class RewardPairs(PreferencePairs):
    """Chosen and rejected answers for a reward model, which scores the last token of each.

    gpt-neox's tool appends a second end-of-document token. Its label marks the first one as the token that gpt-neox
    scores. The second one is removed here.
    """

    keeps_last = True

    def __init__(self, chosen: AnswerFiles, rejected: AnswerFiles) -> None:
        super().__init__(chosen, rejected)
        self.sizes = self.sizes + 1

    def documents(self, number: int) -> tuple[PromptAnswer, PromptAnswer]:
        """Return the chosen and the rejected answer."""
        chosen, rejected = super().documents(number)
        return _without_marker(chosen), _without_marker(rejected)


def _without_marker(document: PromptAnswer) -> PromptAnswer:
    """Return a document without gpt-neox's second end-of-document token, which only marks the first one."""
    ids = document.ids
    marked = document.in_answer.sum() == 1 and document.in_answer[-1]
    if not marked or len(ids) < 2 or ids[-1] != ids[-2]:
        return document
    in_answer = document.in_answer[:-1].copy()
    in_answer[-1] = True
    return PromptAnswer(ids[:-1], in_answer)


class JudgedAnswers(AnswerPairs):
    """Judged answers, each with its prompt followed by the answer to another prompt.

    KTO estimates with the second document how far the model is from the reference. It has the answer of the last
    document before that has another prompt: TRL takes the one before in the batch, whatever its prompt. It is cut to
    what a row has left.

    Args:
        answers: The answers.
        desirable: Whether each answer is good, bool [documents].
        seq_length: Number of positions of a row.

    Raises:
        DataError: If all answers are to one prompt.
    """

    def __init__(self, answers: AnswerFiles, desirable: np.ndarray, seq_length: int) -> None:
        self._answers = answers
        self.desirable = desirable
        prompts = np.array([_prompt_length(answers.document(number)) for number in range(len(answers))])
        self._prompts = prompts
        self._others = self._with_other_prompts()
        mismatched = prompts + (answers.sizes - prompts)[self._others] - 1
        own = answers.sizes - 1
        room = np.maximum(seq_length - own, prompts)  # at least one token of the answer
        self.sizes = np.stack([own, np.minimum(mismatched, room)], axis=1)

    def documents(self, number: int) -> tuple[PromptAnswer, PromptAnswer]:
        """Return an answer, and its prompt with the answer to another prompt."""
        own = self._answers.document(number)
        before = int(self._others[number])
        prompt = int(self._prompts[number])
        other = self._answers.document(before).ids[int(self._prompts[before]) :]
        ids = np.concatenate([own.ids[:prompt], other])[: int(self.sizes[number, 1]) + 1]
        return own, PromptAnswer(ids, np.arange(len(ids)) >= max(1, prompt))

    def _with_other_prompts(self) -> np.ndarray:
        """Return the last document before each one that has another prompt; before the first one come the last ones."""
        texts = []
        for number, length in enumerate(self._prompts.tolist()):
            texts.append(self._answers.ids(number)[:length].astype(np.int64).tobytes())
        number_of = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        if len(number_of) < 2:
            raise DataError(
                f"{self._answers.name(0)}: all {len(texts):,} judged answers are to one prompt, and KTO compares each "
                "prompt with an answer to another one; give answers to several prompts, or another train_impl"
            )
        prompts = np.array([number_of[text] for text in texts])
        places = np.arange(len(prompts))
        begins = np.where(prompts != np.roll(prompts, 1), places, -1)  # of runs of one prompt
        begins[0 : int(np.argmax(begins >= 0))] = begins.max() - len(prompts)  # a run that goes on from the end
        return (np.maximum.accumulate(begins) - 1) % len(prompts)

    def name(self, number: int) -> str:
        """Return the name of an answer in messages."""
        return self._answers.name(number)


def desirable_answers(rewards: AnswerFiles) -> np.ndarray:
    """Return whether each answer is good, bool [documents], from a file of rewards: above 0 for good answers.

    Raises:
        DataError: If a document has good and bad rewards, no reward, or one that is not finite.
    """
    result = np.zeros(len(rewards), dtype=bool)
    for number in range(len(rewards)):
        values = rewards.ids(number)
        if not np.isfinite(values).all():
            raise DataError(f"{rewards.name(number)}: a reward is not finite")
        good = values > 0
        if not len(good) or good.any() != good.all():
            raise DataError(f"{rewards.name(number)}: the rewards of an answer are not all above 0, or all not")
        result[number] = good[0]
    return result


def _prompt_length(document: PromptAnswer) -> int:
    """Return the number of tokens before the answer; all if there is none."""
    if not document.in_answer.any():
        return len(document.ids)
    return int(np.argmax(document.in_answer))


def open_pairs(answers: SplitAnswers, seq_length: int, open_file: OpenFile, open_rewards: OpenFile) -> AnswerPairs:
    """Open the answers of a split.

    Args:
        answers: Their files.
        seq_length: Number of positions of a row.
        open_file: Function that opens a token file, given its prefix.
        open_rewards: The same for a file of judgements, which has one number per token or one per answer.

    Raises:
        DataError: If files are missing, damaged, or do not fit together.
    """
    first = _open_answers(answers.paths or (), answers.labels, open_file)
    if answers.rewards is None:
        kind = RewardPairs if answers.scored else PreferencePairs
        return kind(first, _open_answers(answers.others or (), answers.other_labels, open_file))
    rewards = _open_answers(answers.rewards, None, open_rewards)
    one_each = len(rewards) == len(first) and bool((rewards.sizes == 1).all())
    if not one_each and rewards.sizes.tolist() != first.sizes.tolist():
        raise DataError(
            f"{answers.split}_reward_data_paths do not have the same documents as {answers.split}_data_paths; give "
            "the files that were made with them, in the same order"
        )
    return JudgedAnswers(first, desirable_answers(rewards), seq_length)


def _open_answers(prefixes: Sequence[str], labels: Sequence[str] | None, open_file: OpenFile) -> AnswerFiles:
    """Open token files, and their labels if there are any."""
    own_labels: list[IndexedDataset | None] = [None] * len(prefixes)
    if labels is not None:
        own_labels = list(map(open_file, labels))
    return AnswerFiles(list(map(open_file, prefixes)), own_labels)
