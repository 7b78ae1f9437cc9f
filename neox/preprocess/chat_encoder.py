"""Encoding of conversations to token ids, and to labels that train the answers only.

    line of JSON    {"messages": [...]}, ShareGPT's, Alpaca's, TRL's
        |  read_conversation     (conversations.py) messages in OpenAI's form, tools, variables of the template
        v
    messages
        |  render_marked         the chat template (neox.tokenizer.chat) makes one text
        |  _answers              ranges of its characters that are trained
        v
    text, ranges
        |  encode_batch          the text is encoded at once: ids, and the characters of each token
        |  AnswerEnds.included   a range takes the token that ends the answer
        |  is_trained            a token of which one character is in a range
        v
    ids, labels     two datasets, NAME and NAME_label

A label is the token's id, or IGNORED where nothing is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from neox.corpus import BadInput, BadRecord, LineBlock, convert_lines, kind_of
from neox.data.token_files.indexed_dataset import IGNORED
from neox.preprocess.conversations import (
    ASSISTANT,
    USER,
    Conversation,
    read_conversation,
    trained_messages,
    without_nulls,
)
from neox.preprocess.encode import EncodedBlock, EncodedKey, EncodeJob
from neox.preprocess.settings import ChatSettings
from neox.tokenizer import HFTokenizer, Tokenizer
from neox.tokenizer.chat import ChatRenderer, ChatTemplate, find_answer_form, fixed_clock
from neox.tokenizer.chat_messages import ChatError, Message, names_of_calls, thoughts_of, tools_of

Range = tuple[int, int]
_NOTHING_TRAINED = "it has no message of the role {!r}, which would be trained"
_QUESTION: Message = {"role": USER, "content": "Hi"}
_LAST_END = "the end of the last answer (--append-eod adds a token for it)"


class RenderedConversation(NamedTuple):
    """Text of a conversation.

    Attributes:
        text: Text that the template makes.
        answers: Ranges of characters that are trained, in order, each as its start and its end.
        losses: What the template leaves out.
    """

    text: str
    answers: list[Range]
    losses: tuple[str, ...]


class ChatEncoder:
    """Encoder of blocks of conversations in this process. It makes ids, and labels that are IGNORED outside answers.

    The text of a conversation is encoded at once, as by `apply_chat_template`. A token is trained if one of its
    characters belongs to an answer. An answer is what the template marks with `{% generation %}`. Without this tag it
    is the text after the prompt for generation, with the message's end:

        <|user|>How many?<|end|><|assistant|>Twelve.<|end|>
                                             |-- answer --|

    The token that ends an answer is trained in any case, even if the template counts it to the next message:

        <|user|>How many?<|assistant|>Twelve.<|user|>And now?
                                      |-- answer --|

    If the template writes another prompt than that of the trained role, the whole message is trained.

    Some templates, such as Qwen 3's, write an earlier answer in another way once a question follows: without its
    thoughts. With `split_answers` each answer then is trained as it is generated, in a sample of its own.
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
        self.job = job
        self.chat = chat
        self.tokenizer = job.marks_tokenizer(tokenizer, "chat templates need")
        self.renderer = ChatRenderer(chat.template, fixed_clock(chat.date))
        self.ends = AnswerEnds.of(chat.template, self.tokenizer)

    def encode(self, block: LineBlock) -> EncodedBlock:
        """Encode each conversation of a block."""
        conversations: list[RenderedConversation] = []
        bad: list[BadInput] = []
        filtered: list[int] = []
        not_strict = 0

        def read(record: Any, strict: bool) -> list[RenderedConversation]:
            nonlocal not_strict
            samples = self._samples(without_nulls(record) if block.fills_nulls else record)
            not_strict += not strict
            return samples

        for line in convert_lines(block, read, filtered):
            if isinstance(line, BadInput):
                bad.append(line)
            else:
                conversations += line
        ids: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        losses: Counter[str] = Counter()
        texts = [conversation.text for conversation in conversations]
        encodings = self.tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        for conversation, encoding in zip(conversations, encodings, strict=True):
            own_ids = np.array(encoding.ids, np.int32)
            answers = conversation.answers
            if not self.chat.count_all:
                answers = self.ends.included(answers, conversation.text, encoding.ids, encoding.offsets)
            trained = is_trained(encoding.offsets, answers)
            losses.update(conversation.losses)
            if trained[-1:].any() and not self._has_end(conversation.text, encoding.ids):
                losses.update((_LAST_END,))
            if self.job.settings.append_eod:
                own_ids = np.append(own_ids, np.int32(self.tokenizer.eod))
                trained = np.append(trained, trained[-1:])
            ids.append(own_ids)
            labels.append(np.where(trained, own_ids, np.int32(IGNORED)))
        return EncodedBlock(
            end=block.end,
            keys=(EncodedKey.of(ids), EncodedKey.of(labels)),
            bad=tuple(bad),
            not_strict=not_strict,
            text_bytes=len(block.data),
            accelerator="off",
            note=None,
            filtered=len(filtered),
            losses=losses,
        )

    def _has_end(self, text: str, ids: Sequence[int]) -> bool:
        """Return whether what ends the last answer stands at the end of a text, perhaps before blanks."""
        if self.job.settings.append_eod or ids[-1] in self.ends.special:
            return True
        if text.rstrip().endswith(self.ends.strings):
            return True
        blanks = len(self.tokenizer.encode_bare(text[len(text.rstrip()) :]))
        return 0 < blanks < len(ids) and ids[-1 - blanks] in self.ends.special

    def _samples(self, record: Any) -> list[RenderedConversation]:
        """Render the conversation of a line, or with `split_answers` each answer with what comes before it.

        Raises:
            BadRecord: If the line is bad, the template refuses it, or no answer can be told apart.
        """
        if not isinstance(record, dict):
            raise BadRecord(f"the line is {kind_of(record)}, not an object")
        conversation = read_conversation(record, self.chat.keys, self.chat.role)
        if not self.chat.split_answers:
            return [self._rendered(conversation)]
        samples = []
        for number in trained_messages(conversation, self.chat.role):
            samples.append(self._rendered(conversation._replace(messages=conversation.messages[: number + 1])))
        if not samples:
            raise BadRecord(_NOTHING_TRAINED.format(self.chat.role))
        return samples

    def _rendered(self, conversation: Conversation) -> RenderedConversation:
        """Apply the template to a conversation, and find its answers. Raises BadRecord."""
        messages = conversation.messages
        try:
            text, marked = self.renderer.render_marked(messages, conversation.tools, conversation.variables)
            answers = self._answers(conversation, text, marked)
            size = len(text.encode())
            if self.chat.split_answers:
                messages = messages[-1:]  # the template is to leave out thoughts of earlier ones
            losses = lost_in_template(messages, conversation.tools, text)
        except (ChatError, UnicodeEncodeError) as error:
            raise BadRecord(str(error)) from None
        if size > self.job.piece_bytes:
            raise BadRecord(f"its text has {size:,} bytes, more than the {self.job.piece_bytes:,} that memory allows")
        return RenderedConversation(text, answers, losses)

    def _answers(self, conversation: Conversation, text: str, marked: Sequence[Range] | None) -> list[Range]:
        """Return the ranges of characters that are trained, from which the loss mask follows.

        Args:
            conversation: The conversation.
            text: Its text.
            marked: What the template marks with `{% generation %}`; None if it has no such tag.

        Raises:
            BadRecord: If there is no answer, or the template changes answers when others follow.
            ChatError: If the template refuses the messages.
        """
        if not text:
            raise BadRecord("the chat template turns it into an empty text")
        if self.chat.count_all:
            return [(0, len(text))]
        numbers = trained_messages(conversation, self.chat.role)
        if not numbers:
            raise BadRecord(_NOTHING_TRAINED.format(self.chat.role))
        if self.chat.only_last or self.chat.split_answers:
            numbers = numbers[-1:]
        if marked is None or self.chat.role != ASSISTANT:
            return [self._message_range(conversation, number, text) for number in numbers]

        # The template marks answers. If only some of them are trained, the marks within those messages count.
        roles = [message["role"] for message in conversation.messages]
        answers = []
        if numbers == [number for number, role in enumerate(roles) if role == ASSISTANT]:
            answers = [(begin, end) for begin, end in marked if begin < end]
        else:
            for number in numbers:
                begin, end = self._message_range(conversation, number, text)
                if roles[number] != ASSISTANT:  # a flag of the message says that it is trained
                    answers.append((begin, end))
                for marked_begin, marked_end in marked:
                    if max(begin, marked_begin) < min(end, marked_end):
                        answers.append((max(begin, marked_begin), min(end, marked_end)))
        if not answers:
            raise BadRecord("the chat template marks none of its text as an answer with {% generation %}")
        return answers

    def _message_range(self, conversation: Conversation, number: int, text: str) -> Range:
        """Return the range of characters of a message in the text of all messages.

            up_to_answer   <|user|>How many?<|end|><|assistant|>Twelve.<|end|>
            before         <|user|>How many?<|end|>
            prompt         <|user|>How many?<|end|><|assistant|>
                                                                |-- range --|

        Raises BadRecord or ChatError.
        """
        up_to_answer = self._text_of_first(conversation, number + 1)
        if not text.startswith(up_to_answer):  # some templates end each text, and not each answer, with this token
            up_to_answer = up_to_answer.removesuffix(self.tokenizer.eod_token)
        before = ""
        if number:
            before = self._text_of_first(conversation, number)
        try:
            prompt = self._text_of_first(conversation, number, prompt=True)
        except ChatError:  # a template may need messages
            prompt = before

        begin = None
        is_answer = conversation.messages[number]["role"] == ASSISTANT
        if up_to_answer.startswith(prompt) and (prompt or not is_answer):
            begin = len(prompt)
        elif is_answer and number == 0:
            begin = self._begin_of_first(conversation, up_to_answer)
        elif up_to_answer.startswith(before):
            begin = len(before)
            if is_answer:
                # The prompt may be longer than what stands before an answer, as with an open thought. The answer then
                # begins where their tokens differ, as in TRL. For other roles, the prompt may be that of another role.
                begin = max(begin, self._common_tokens(prompt, up_to_answer))
        if begin is None or not text.startswith(up_to_answer):
            raise BadRecord(
                f"the chat template changes message {number}, or messages before it, when others follow; its tokens "
                "would not be those of its generation; --split-answers makes a sample of each answer with what comes "
                "before it, and --only-last trains the last answer only"
            )
        return begin, len(up_to_answer)

    def _begin_of_first(self, conversation: Conversation, up_to_answer: str) -> int | None:
        """Return where an answer begins that is the first message; None if that cannot be told.

        A template may write a first token or a system message of its own in front of it, which it does not write
        without messages. So the answer is rendered after a question, too:

            up_to_answer   <s><|system|>Be kind.<|end|><|assistant|>Hello.<|end|>
            asked          <s><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hello.<|end|>
            prompt         <s><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>
            opening                                                     |-- here --|

        Raises ChatError.
        """
        with_question = conversation._replace(messages=[_QUESTION, *conversation.messages])
        asked = self._text_of_first(with_question, 2)
        prompt = self._text_of_first(with_question, 1, prompt=True)
        opening = prompt.removeprefix(self._text_of_first(with_question, 1))
        answer = asked[self._common_tokens(prompt, asked) :]
        if up_to_answer.endswith(answer):
            return len(up_to_answer) - len(answer)
        place = up_to_answer.find(opening)  # the template writes the answer in another way if no question stands before
        return place + len(opening) if place >= 0 else None

    def _common_tokens(self, prompt: str, text: str) -> int:
        """Return how many characters of a text its first tokens have that are those of a prompt, too."""
        ids = self.tokenizer.backend.encode(prompt, add_special_tokens=False).ids
        encoding = self.tokenizer.backend.encode(text, add_special_tokens=False)
        common = common_length(ids, encoding.ids)
        return encoding.offsets[common][0] if common < len(encoding.ids) else len(text)

    def _text_of_first(self, conversation: Conversation, count: int, *, prompt: bool = False) -> str:
        """Return the text of the first messages, with the prompt for an answer if it is asked for. Raises ChatError."""
        messages = conversation.messages[:count]
        return self.renderer.render(messages, conversation.tools, prompt=prompt, variables=conversation.variables)


class AnswerEnds(NamedTuple):
    """Tokens that end answers of a chat template.

    Attributes:
        ends: Ids that end a generation.
        special: Ids of all special tokens.
        strings: Texts that end answers, if the template has no token for it.
    """

    ends: frozenset[int]
    special: frozenset[int]
    strings: tuple[str, ...]

    @staticmethod
    def of(template: ChatTemplate, tokenizer: HFTokenizer) -> AnswerEnds:
        """Return the tokens of a template. Raises TokenizerError if it is not valid."""
        form = find_answer_form(template, tokenizer)
        ends = frozenset({tokenizer.eod, *form.end_ids})
        added = tokenizer.backend.get_added_tokens_decoder()
        special = ends | {number for number, token in added.items() if token.special}
        return AnswerEnds(ends, special, form.end_strings)

    def included(
        self, answers: Sequence[Range], text: str, ids: Sequence[int], offsets: Sequence[Range]
    ) -> list[Range]:
        """Return ranges of characters of answers, each with the token that ends the answer.

        Args:
            answers: Ranges of characters of answers.
            text: The whole text.
            ids: Ids of its tokens.
            offsets: Ranges of characters of its tokens.
        """
        begins = np.array(offsets, np.int64).reshape(-1, 2)[:, 0]
        result = []
        for begin, end in answers:
            after = int(np.searchsorted(begins, end))
            last = after - 1
            while last > 0 and text[slice(*offsets[last])].isspace() and offsets[last][0] >= begin:
                last -= 1
            has_end = last >= 0 and offsets[last][0] >= begin and ids[last] in self.special
            while after < len(ids) and text[slice(*offsets[after])].isspace():
                after += 1
            if not has_end and after < len(ids) and ids[after] in self.special:
                end = offsets[after][1]
            result.append((begin, end))
        return result


def is_trained(offsets: Sequence[Range], answers: Sequence[Range]) -> np.ndarray:
    """Return, for each token, whether one of its characters belongs to an answer, bool [tokens]."""
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    trained = np.zeros(len(begins), dtype=bool)
    for answer_begin, answer_end in answers:
        trained |= (ends > answer_begin) & (begins < answer_end)
    return trained


def lost_in_template(messages: Sequence[Message], tools: Any, text: str) -> tuple[str, ...]:
    """Return what a template leaves out of a conversation.

    Args:
        messages: Messages of the conversation.
        tools: Descriptions of tools.
        text: Text that the template made.
    """
    expected: dict[str, list[str]] = {
        "thoughts": [],
        "calls of tools": [],
        "descriptions of tools": names_of_calls({"tool_calls": tools_of(tools)}),
    }
    for message in messages:
        expected["thoughts"].append(thoughts_of(message))
        expected["calls of tools"] += names_of_calls(message)
    return tuple(what for what, texts in expected.items() if not all(part in text for part in texts))


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of characters or messages with which two texts or conversations begin alike."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length
