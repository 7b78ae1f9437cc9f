"""Encoding of preferences: two answers to one prompt, or one answer with a judgement.

    line of JSON    {"prompt", "chosen", "rejected"}, {"prompt", "completion", "label"}, LLaMA-Factory's names
        |  _read_line        the prompt by its name, or the common beginning of both answers
        |  _answer_text      prompt and answer as one text, joined or by the chat template; where the answer begins
        v
    AnswerText
        |  _encode_answers   ids of the whole text; labels, IGNORED before the answer; both answers begin together
        v
    EncodedAnswer

The datasets are chosen, chosen_label, rejected and rejected_label, or completion, completion_label, completion_reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from neox.corpus import BadInput, BadRecord, LineBlock, convert_lines, find_value, kind_of, missing_key
from neox.data.token_files.indexed_dataset import IGNORED
from neox.errors import TokenizerError
from neox.preprocess.chat_encoder import common_length, is_trained, lost_in_template
from neox.preprocess.conversations import (
    ASSISTANT,
    MESSAGES,
    SYSTEM,
    USER,
    add_system,
    instruction_messages,
    read_messages,
    tools_and_variables,
    without_nulls,
)
from neox.preprocess.encode import EncodedBlock, EncodedKey, EncodeJob
from neox.preprocess.settings import PreferenceSettings
from neox.tokenizer import Tokenizer, positions
from neox.tokenizer.chat import ChatRenderer, fixed_clock
from neox.tokenizer.chat_messages import ChatError, DateNeededError, Message

PROMPT = "prompt"
CHOSEN = "chosen"
REJECTED = "rejected"
COMPLETION = "completion"
LABEL = "label"
_KTO_TAG = "kto_tag"  # LLaMA-Factory's name for it
FIELDS = (PROMPT, CHOSEN, REJECTED, COMPLETION, LABEL, "tools")
Messages = list[Message]
_SYSTEM_OF_TEXTS = "`system` beside texts (write prompt and answers as messages)"


class AnswerText(NamedTuple):
    """Text of a prompt and one answer to it.

    Attributes:
        text: Prompt and answer.
        begin: First character of the answer.
        ends_with_eod: Whether the end-of-document id follows the text.
        is_document: Whether the text begins with what the tokenizer writes before a text; a chat template writes it
            itself.
        losses: What the chat template leaves out.
    """

    text: str
    begin: int
    ends_with_eod: bool
    is_document: bool
    losses: tuple[str, ...] = ()


class PreferenceLine(NamedTuple):
    """Line of the input.

    Attributes:
        answers: The chosen and the rejected answer, or the only one.
        desirable: Whether the only answer is a good one; None for two answers.
    """

    answers: tuple[AnswerText, ...]
    desirable: bool | None

    @property
    def losses(self) -> set[str]:
        """What the chat template leaves out of an answer or the prompt."""
        return set().union(*(answer.losses for answer in self.answers))


class EncodedAnswer(NamedTuple):
    """Ids of a prompt and one answer to it.

    Attributes:
        ids: Ids [tokens].
        labels: The same ids, IGNORED in the prompt [tokens].
    """

    ids: np.ndarray
    labels: np.ndarray

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the answer."""
        return int(np.argmax(self.labels != IGNORED))


class PreferenceEncoder:
    """Encoder of blocks of preferences in this process. Labels are IGNORED outside answers.

    An answer is a text that continues the prompt, or messages that follow those of the prompt. A token belongs to the
    answer if one of its characters does. Texts begin and end as documents do (an end of their own is not doubled); the
    chat template begins and ends messages.
    """

    def __init__(self, job: EncodeJob, preferences: PreferenceSettings, tokenizer: Tokenizer | None = None) -> None:
        """Compile the template.

        Args:
            job: Settings of encoding.
            preferences: Settings of preferences.
            tokenizer: Tokenizer of the job, if it is already built.

        Raises:
            TokenizerError: If the tokenizer does not recognize special tokens in texts, or the template is not valid.
        """
        self.job = job
        self.preferences = preferences
        self.tokenizer = job.marks_tokenizer(tokenizer, "preferences need")
        self.renderer: ChatRenderer | None = None
        if preferences.template is not None:
            self.renderer = ChatRenderer(preferences.template, fixed_clock(preferences.date))

    def encode(self, block: LineBlock) -> EncodedBlock:
        """Encode each line of a block."""
        columns: dict[str, list[np.ndarray]] = {name: [] for name in self.preferences.datasets}
        not_strict = 0
        losses: Counter[str] = Counter()

        def encode_line(record: Any, strict: bool) -> bool:
            """Encode a line, and add its documents. Raises BadRecord if the line is bad."""
            line = self._read_line(without_nulls(record) if block.fills_nulls else record)
            documents = self._encode_answers(line)
            losses.update(line.losses)
            arrays: list[np.ndarray] = []
            for document in documents:
                arrays += [document.ids, document.labels]
            if line.desirable is not None:
                reward = 1 if line.desirable else -1
                arrays.append(np.full(len(arrays[0]), reward, np.int32))
            for column, array in zip(columns.values(), arrays, strict=True):
                column.append(array)
            return strict

        bad: list[BadInput] = []
        filtered: list[int] = []
        for is_strict in convert_lines(block, encode_line, filtered):
            if isinstance(is_strict, BadInput):
                bad.append(is_strict)
            elif not is_strict:
                not_strict += 1
        return EncodedBlock(
            end=block.end,
            keys=tuple(map(EncodedKey.of, columns.values())),
            bad=tuple(bad),
            not_strict=not_strict,
            text_bytes=len(block.data),
            accelerator="off",
            note=None,
            filtered=len(filtered),
            losses=losses,
        )

    def pair(self, record: Any) -> tuple[EncodedAnswer, EncodedAnswer]:
        """Return both answers of a line. Raises BadRecord if the line is bad."""
        chosen, rejected = self._encode_answers(self._read_line(record))
        return chosen, rejected

    def completion(self, record: Any) -> EncodedAnswer:
        """Return the only answer of a line, which needs no judgement. Raises BadRecord if the line is bad."""
        if not isinstance(record, dict):
            raise BadRecord(f"the line is {kind_of(record)}, not an object")
        return self._encode_answer(self._read_completion(_with_prompt(record)))

    def _read_line(self, record: Any) -> PreferenceLine:
        """Return the answers of a line. Raises BadRecord if the line is bad."""
        if not isinstance(record, dict):
            raise BadRecord(f"the line is {kind_of(record)}, not an object")
        named = {name: find_value(record, key) for name, key in self.preferences.fields}
        record = _with_prompt({**record, **named})
        if not self.preferences.labelled:
            return self._read_pair(record)
        answer = self._read_completion(record)
        key = LABEL if LABEL in record or _KTO_TAG not in record else _KTO_TAG
        if key not in record:
            raise missing_key(record, key)
        desirable = record[key]
        if not isinstance(desirable, bool | int | float) or desirable not in (0, 1):
            raise BadRecord(f"{key!r} is {kind_of(desirable)}, not true or false (or 1 or 0)")
        return PreferenceLine((answer,), bool(desirable))

    def _read_pair(self, record: Mapping[str, Any]) -> PreferenceLine:
        """Return the answers of a line with two answers. Raises BadRecord if the line is bad."""
        for key in (CHOSEN, REJECTED):
            if key not in record:
                raise missing_key(record, key)
        chosen = _as_given(CHOSEN, record[CHOSEN])
        rejected = _as_given(REJECTED, record[REJECTED])
        if chosen == rejected:
            raise BadRecord(f"{CHOSEN!r} and {REJECTED!r} are equal, so that nothing is preferred")
        if isinstance(chosen, list) != isinstance(rejected, list):
            raise BadRecord(f"{CHOSEN!r} is {kind_of(chosen)}, and {REJECTED!r} is {kind_of(rejected)}")
        prompt = _prompt_of(record, chosen)
        if isinstance(prompt, str) and isinstance(chosen, list):
            prompt = None  # the conversations contain it
        if prompt is None:
            # It is what both begin with. Texts are cut before a blank, as TRL's `extract_prompt` does.
            shared = min(common_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
            if isinstance(chosen, str) and chosen[shared - 1 : shared] == " ":
                shared -= 1
            if shared <= 0:
                raise BadRecord(f"it has no prompt: no {PROMPT!r}, and {CHOSEN!r} and {REJECTED!r} share no beginning")
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if isinstance(prompt, list) and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]  # the answers repeat it
        answers = []
        for key, value in ((CHOSEN, chosen), (REJECTED, rejected)):
            answers.append(self._answer_text(prompt, key, value, record))
        begin = min(answer.begin for answer in answers)
        return PreferenceLine(tuple(answer._replace(begin=begin) for answer in answers), None)

    def _read_completion(self, record: Mapping[str, Any]) -> AnswerText:
        """Return the answer of a line with one answer. Raises BadRecord if it has none."""
        for key in (PROMPT, COMPLETION):
            if key not in record:
                raise missing_key(record, key)
        completion = _as_given(COMPLETION, record[COMPLETION])
        return self._answer_text(_prompt_of(record, completion), COMPLETION, completion, record)

    def _answer_text(self, prompt: Any, key: str, value: Any, record: Mapping[str, Any]) -> AnswerText:
        """Return the text of a prompt and an answer of a line. Raises BadRecord if they are bad."""
        if isinstance(prompt, str) and isinstance(value, str):
            if not prompt:
                raise BadRecord("it has no prompt: the text before the answer is empty")
            if not value:
                raise BadRecord(f"{key!r} is empty")
            has_end = value.endswith(self.tokenizer.eod_token)
            lost = (_SYSTEM_OF_TEXTS,) if record.get(SYSTEM) else ()
            joined = AnswerText(prompt + value, len(prompt), ends_with_eod=not has_end, is_document=True, losses=lost)
            return self._within_memory(joined)
        before = add_system(record, _messages(PROMPT, prompt))
        if isinstance(value, str) and value:
            value = [{"role": ASSISTANT, "content": value}]
        after = _messages(key, value)
        if self.renderer is None:
            raise BadRecord(
                "it holds messages, and the tokenizer has no chat template: give one with --chat-template FILE"
            )
        tools, variables = tools_and_variables(record)
        try:
            text = self.renderer.render(before + after, tools, variables=variables)
            begin = self.renderer.render(before, tools, prompt=True, variables=variables)
            if not text.startswith(begin):  # the template writes another prompt, or a longer one
                if not text.startswith(self.renderer.render(before, tools, variables=variables)):
                    raise BadRecord(f"the chat template changes the prompt when {key!r} follows it")
                begin = begin[: common_length(begin, text)]
            losses = lost_in_template(before + after, tools, text)
        except DateNeededError as error:
            raise TokenizerError(str(error)) from error  # of every line: not one to skip
        except ChatError as error:
            raise BadRecord(str(error)) from None
        append_eod = self.job.settings.append_eod
        return self._within_memory(AnswerText(text, len(begin), append_eod, is_document=False, losses=losses))

    def _within_memory(self, answer: AnswerText) -> AnswerText:
        """Return an answer whose text can be encoded at once. Raises BadRecord for others."""
        try:
            size = len(answer.text.encode())
        except UnicodeEncodeError as error:
            raise BadRecord(str(error)) from None
        if size > self.job.piece_bytes:
            raise BadRecord(f"its text has {size:,} bytes, more than the {self.job.piece_bytes:,} that memory allows")
        return answer

    def _encode_answer(self, answer: AnswerText) -> EncodedAnswer:
        """Return the ids of an answer and of its prompt. Raises BadRecord if one of them has no tokens."""
        encoding = self.tokenizer.backend.encode(answer.text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        trained = is_trained(encoding.offsets, [(answer.begin, len(answer.text))])
        if answer.is_document:
            ids = np.array(positions.with_beginning(self.tokenizer.before_text, encoding.ids), np.int32)
            trained = np.append(np.zeros(len(ids) - len(trained), bool), trained)
        if answer.ends_with_eod:
            ids = np.append(ids, np.int32(self.tokenizer.eod))
            trained = np.append(trained, True)
        if not trained.any():
            raise BadRecord("an answer has no tokens")
        if trained[0]:
            raise BadRecord("it has no prompt: no token comes before the answer")
        return EncodedAnswer(ids, np.where(trained, ids, np.int32(IGNORED)))

    def _encode_answers(self, line: PreferenceLine) -> list[EncodedAnswer]:
        """Return the ids of the answers of a line.

        Both answers begin at the same token, as in TRL: if one of them divides a token of the other, the earlier one.

        Raises:
            BadRecord: If both answers have the same ids, or a row of training cannot hold them.
        """
        answers = list(map(self._encode_answer, line.answers))
        begin = min(answer.prompt_length for answer in answers)
        for answer in answers:
            answer.labels[begin:] = answer.ids[begin:]
        if len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids):
            raise BadRecord(f"{CHOSEN!r} and {REJECTED!r} have the same tokens, so that nothing is preferred")
        room = self.preferences.seq_length
        if room is None:
            return answers
        needed = sum(len(answer.ids) for answer in answers)
        holds = "both answers with the prompt"
        if len(answers) == 1:
            needed += answers[0].prompt_length + 1
            holds = "the answer, and the prompt again with another answer"
        if needed > room:
            raise BadRecord(f"a row of {room:,} tokens (--seq-length) cannot hold {holds}, {needed:,} tokens")
        return answers


def _with_prompt(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line whose prompt has its name: LLaMA-Factory's are `conversations`, or Alpaca's `instruction`.

    Raises BadRecord if they are no messages or texts.
    """
    if record.get(PROMPT) is not None:
        return record
    for key in ("conversations", MESSAGES):
        if record.get(key) is not None:
            messages = read_messages(record[key], key)
            if COMPLETION in record or CHOSEN in record:
                if CHOSEN in record and messages[-1]["role"] == ASSISTANT:  # a whole conversation, not its prompt
                    return record
                return {**record, PROMPT: messages}
            if messages[-1]["role"] == ASSISTANT:  # the last message is the one that is judged
                return {**record, PROMPT: messages[:-1], COMPLETION: messages[-1:]}
    if record.get("instruction") is not None:
        return {COMPLETION: record.get("output"), **record, PROMPT: instruction_messages(record)}
    return record


def _as_given(key: str, value: Any) -> str | Messages:
    """Return an answer: a text, or messages. Raises BadRecord if it is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | dict):
        raise BadRecord(f"{key!r} is {kind_of(value)}, neither a text nor a list of messages")
    return _messages(key, value)


def _prompt_of(record: Mapping[str, Any], answer: str | Messages) -> Any:
    """Return the prompt of a line: a text, messages, or None. Raises BadRecord for a list that is no messages.

    A text next to messages that begin with the answer is the question.
    """
    prompt = record.get(PROMPT)
    if isinstance(prompt, str) and isinstance(answer, list) and answer[0]["role"] == ASSISTANT:
        return [{"role": USER, "content": prompt}]
    if isinstance(prompt, list | dict) and prompt:
        return _messages(PROMPT, prompt)
    return prompt


def _messages(key: str, value: Any) -> Messages:
    """Return the messages under a key. Raises BadRecord if they are none."""
    if not isinstance(value, list | dict):
        raise BadRecord(f"{key!r} is {kind_of(value)}, and the other part of the conversation is not")
    if not value:
        if key == PROMPT:
            raise BadRecord("it has no prompt: there is no message before the answer")
        raise BadRecord(f"{key!r} is empty")
    return read_messages(value, key)
