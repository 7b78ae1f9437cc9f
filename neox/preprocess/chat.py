"""Encoding of conversations to token ids and labels, of which only the answers are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from neox.corpus import BadInput, BadRecord, LineBlock, convert_lines, kind_of
from neox.data.indexed_dataset import IGNORED
from neox.errors import TokenizerError
from neox.preprocess.encode import EncodedBlock, EncodedKey, EncodeJob
from neox.preprocess.settings import ChatSettings
from neox.tokenizer import HFTokenizer, Tokenizer
from neox.tokenizer.chat import ChatError, ChatRenderer

Messages = Sequence[Mapping[str, Any]]


class Conversation(NamedTuple):
    """Text of a conversation.

    Attributes:
        text: What the template makes of it.
        answers: First character of each counted part and the one after its last, in order.
        strict: Whether its line is strict JSON.
    """

    text: str
    answers: list[tuple[int, int]]
    strict: bool


class ChatEncoder:
    """Encoder of blocks of conversations in this process: ids, and labels that are IGNORED outside answers.

    The whole text is encoded at once, as `apply_chat_template` does. A token is counted where one of its characters is
    of an answer: of what follows the prompt that the template writes before it, its end included. Where the template's
    prompt is not that of the trained role, the message is counted with its beginning.
    """

    def __init__(self, job: EncodeJob, chat: ChatSettings, tokenizer: Tokenizer | None = None) -> None:
        """Compile the template.

        Args:
            job: Settings of encoding.
            chat: Its settings of conversations.
            tokenizer: The tokenizer of the job (default: it is built).

        Raises:
            TokenizerError: If the tokenizer is not one of Hugging Face's, or the template cannot be read.
        """
        built = tokenizer or job.settings.tokenizer.build()
        if not isinstance(built, HFTokenizer) or not built.special_in_text:
            raise TokenizerError(
                f"chat templates need a tokenizer that knows special tokens in texts, not {built.name}"
            )
        self.job, self.chat, self.tokenizer = job, chat, built
        self.renderer = ChatRenderer(chat.template)

    def encode(self, block: LineBlock) -> EncodedBlock:
        """Encode each conversation of a block."""
        found: list[Conversation] = []
        bad: list[BadInput] = []
        for each in convert_lines(block, self._conversation):
            (bad if isinstance(each, BadInput) else found).append(each)  # type: ignore[arg-type]
        encodings = self.tokenizer.backend.encode_batch([each.text for each in found], add_special_tokens=False)
        ids: list[np.ndarray] = [np.empty(0, np.int32)]
        labels: list[np.ndarray] = [np.empty(0, np.int32)]
        for conversation, encoding in zip(found, encodings, strict=True):
            own, counted = np.array(encoding.ids, np.int32), _counted(encoding.offsets, conversation.answers)
            if self.job.settings.append_eod:
                own, counted = np.append(own, np.int32(self.tokenizer.eod)), np.append(counted, counted[-1:])
            ids.append(own)
            labels.append(np.where(counted, own, np.int32(IGNORED)))
        lengths = np.array([len(each) for each in ids[1:]], np.int32)
        keys = (EncodedKey(np.concatenate(ids), lengths), EncodedKey(np.concatenate(labels), lengths))
        not_strict = sum(not each.strict for each in found)
        return EncodedBlock(block.end, keys, tuple(bad), not_strict, len(block.data), "off", None)

    def _conversation(self, record: Any, strict: bool) -> Conversation:
        """Render a line. Raises BadRecord."""
        if not isinstance(record, dict):
            raise BadRecord(f"the line is {kind_of(record)}, not an object")
        messages = self._messages(record)
        try:
            text, answers = self._render(messages, record.get("tools"))
            size = len(text.encode())
        except (ChatError, UnicodeEncodeError) as error:
            raise BadRecord(str(error)) from None
        if size > self.job.piece_bytes:
            raise BadRecord(f"its text has {size:,} bytes, more than the {self.job.piece_bytes:,} that memory allows")
        return Conversation(text, answers, strict)

    def _messages(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        parts = []
        for key, role in zip(self.chat.keys, ("user", self.chat.role), strict=False):
            if key not in record:
                raise BadRecord(f"no key {key!r} (it has {', '.join(map(repr, list(record)[:8])) or 'none'})")
            value = record[key]
            if isinstance(value, str) and len(self.chat.keys) == 2:
                value = [{"role": role, "content": value}]
            if not isinstance(value, list) or not value:
                raise BadRecord(f"{key!r} is {kind_of(value)}, not a list of messages")
            for number, message in enumerate(value):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise BadRecord(f"message {number} of {key!r} has no `role`")
            parts += value
        return parts

    def _render(self, messages: Messages, tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and its counted parts. Raises BadRecord or ChatError."""
        text = self.renderer.render(messages, tools)
        if not text:
            raise BadRecord("the chat template makes no text of it")
        if self.chat.count_all:
            return text, [(0, len(text))]
        wanted = [number for number, message in enumerate(messages) if message["role"] == self.chat.role]
        if not wanted:
            raise BadRecord(f"it has no message of the role {self.chat.role!r}, which would be trained")
        answers = []
        for number in wanted[-1:] if self.chat.only_last else wanted:
            up_to = self.renderer.render(messages[: number + 1], tools)
            before = self.renderer.render(messages[:number], tools, prompt=True)
            if not up_to.startswith(before):  # of another role, maybe
                before = self.renderer.render(messages[:number], tools) if number else ""
            if not up_to.startswith(before) or not text.startswith(up_to):
                raise BadRecord(
                    f"the chat template writes message {number} or those before it in another way once others follow, "
                    "so that its tokens are not those of its generation; train the last answer only: --only-last"
                )
            answers.append((len(before), len(up_to)))
        return text, answers


def _counted(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return whether each token has a character of an answer, bool [tokens]."""
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    counted = np.zeros(len(begins), dtype=bool)
    for first, stop in answers:
        counted |= (ends > first) & (begins < stop)
    return counted
