"""Encoding of conversations to token ids, and to labels that train the answers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from neox.corpus import BadInput, BadRecord, LineBlock, convert_lines, find_value, kind_of
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
        text: Text that the template makes.
        answers: Ranges of characters that are trained, in order, each as its start and its end.
        strict: Whether the line of the conversation is strict JSON.
    """

    text: str
    answers: list[tuple[int, int]]
    strict: bool


class ChatEncoder:
    """Encoder of blocks of conversations in this process. It makes ids, and labels that are IGNORED outside answers.

    The text of a conversation is encoded at once, as by `apply_chat_template`. A token is trained if one of its
    characters belongs to an answer. An answer is the text after the prompt for generation, with the message's end:

        <|user|>How many?<|end|><|assistant|>Twelve.<|end|>
                                             |-- answer --|

    If the template writes another prompt than that of the trained role, the whole message is trained.
    """

    def __init__(self, job: EncodeJob, chat: ChatSettings, tokenizer: Tokenizer | None = None) -> None:
        """Compile the template.

        Args:
            job: Settings of encoding.
            chat: Settings of conversations.
            tokenizer: Tokenizer of the job, if it is already built.

        Raises:
            TokenizerError: If the tokenizer does not recognize special tokens, or the template is not valid.
        """
        tokenizer = tokenizer or job.settings.tokenizer.build()
        if not isinstance(tokenizer, HFTokenizer) or not tokenizer.special_in_text:
            raise TokenizerError(
                f"chat templates need a tokenizer that recognizes special tokens in texts, not {tokenizer.name}"
            )
        self.job = job
        self.chat = chat
        self.tokenizer = tokenizer
        self.renderer = ChatRenderer(chat.template)

    def encode(self, block: LineBlock) -> EncodedBlock:
        """Encode each conversation of a block."""
        conversations: list[Conversation] = []
        bad: list[BadInput] = []
        filtered: list[int] = []
        for line in convert_lines(block, self._conversation, filtered):
            if isinstance(line, BadInput):
                bad.append(line)
            else:
                conversations.append(line)
        ids: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        texts = [conversation.text for conversation in conversations]
        encodings = self.tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        for conversation, encoding in zip(conversations, encodings, strict=True):
            own_ids = np.array(encoding.ids, np.int32)
            trained = is_trained(encoding.offsets, conversation.answers)
            if self.job.settings.append_eod:
                own_ids = np.append(own_ids, np.int32(self.tokenizer.eod))
                trained = np.append(trained, trained[-1:])
            ids.append(own_ids)
            labels.append(np.where(trained, own_ids, np.int32(IGNORED)))
        lengths = np.array([len(each) for each in ids], np.int32)
        nothing = np.empty(0, np.int32)  # numpy cannot join an empty list
        return EncodedBlock(
            end=block.end,
            keys=(
                EncodedKey(np.concatenate([nothing, *ids]), lengths),
                EncodedKey(np.concatenate([nothing, *labels]), lengths),
            ),
            bad=tuple(bad),
            not_strict=sum(not conversation.strict for conversation in conversations),
            text_bytes=len(block.data),
            accelerator="off",
            note=None,
            filtered=len(filtered),
        )

    def _conversation(self, record: Any, strict: bool) -> Conversation:
        """Render the conversation of a line. Raises BadRecord if the line is bad."""
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
        """Return the messages of a line: those under one key, or of a prompt and its answer. Raises BadRecord."""
        messages = []
        for key, role in zip(self.chat.keys, ("user", self.chat.role), strict=False):
            value = find_value(record, key)
            if isinstance(value, str) and len(self.chat.keys) == 2:
                value = [{"role": role, "content": value}]
            if not isinstance(value, list) or not value:
                raise BadRecord(f"{key!r} is {kind_of(value)}, not a list of messages")
            for number, message in enumerate(value):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise BadRecord(f"message {number} of {key!r} has no `role`")
            messages += value
        return messages

    def _render(self, messages: Messages, tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages, and its trained ranges of characters. Raises BadRecord or ChatError."""
        text = self.renderer.render(messages, tools)
        if not text:
            raise BadRecord("the chat template turns it into an empty text")
        if self.chat.count_all:
            return text, [(0, len(text))]
        trained = [number for number, message in enumerate(messages) if message["role"] == self.chat.role]
        if not trained:
            raise BadRecord(f"it has no message of the role {self.chat.role!r}, which would be trained")
        if self.chat.only_last:
            trained = trained[-1:]
        return text, [self._answer(messages, number, tools, text) for number in trained]

    def _answer(self, messages: Messages, number: int, tools: Any, text: str) -> tuple[int, int]:
        """Return the range of characters of a message in the text of all messages. Raises BadRecord or ChatError."""
        up_to_answer = self.renderer.render(messages[: number + 1], tools)
        before_answer = self.renderer.render(messages[:number], tools, prompt=True)
        if not up_to_answer.startswith(before_answer):  # the prompt may be that of another role
            before_answer = ""
            if number:
                before_answer = self.renderer.render(messages[:number], tools)
        if not up_to_answer.startswith(before_answer) or not text.startswith(up_to_answer):
            raise BadRecord(
                f"the chat template changes message {number}, or messages before it, when others follow; its tokens "
                "would not be those of its generation; train the last answer only: --only-last"
            )
        return len(before_answer), len(up_to_answer)


def is_trained(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return, for each token, whether one of its characters belongs to an answer, bool [tokens]."""
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    trained = np.zeros(len(begins), dtype=bool)
    for answer_begin, answer_end in answers:
        trained |= (ends > answer_begin) & (begins < answer_end)
    return trained
