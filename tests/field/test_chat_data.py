"""Conversations and preferences as others write them, compared with transformers and TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from neox.corpus import BadInput, LineBlock, Position, read_blocks
from neox.preprocess import ChatSettings, PreprocessSettings, TokenizerSpec
from neox.preprocess.chat import ChatEncoder
from neox.preprocess.encode import EncodedBlock, EncodeJob
from neox.tokenizer.chat import ChatTemplate, own_chat_template

IGNORED = -100
CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{ '\n' + (tool | tojson) }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- if message.tool_calls %}{%- for c in message.tool_calls %}"
    "{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{%- endfor %}{%- endif %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
WITHOUT_TOOLS = CHATML[CHATML.index("{%- for message") :]
GLM = (
    "[gMASK]<sop>{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content }}"
    "{%- elif m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{%- endif %}"
)
SPECIALS = [
    *("<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "[gMASK]", "<sop>"),
    *("<|user|>", "<|assistant|>", "<|observation|>"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "weather of a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
]
USER = {"role": "user", "content": "weather in Paris?"}
CALLING = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"town": "Paris"}}}],
    },
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "The sun."},
]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level tokenizer with ChatML's, Llama 3's and GLM's special tokens, and a first token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*SPECIALS, *alphabet, "Ġf", "Ġfo", "es", "ti"])}
    tokenizer = Tokenizer(models.BPE(ids, [("Ġ", "f"), ("Ġf", "o"), ("e", "s"), ("t", "i")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
    tokenizer.save(str(path))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    return path


def theirs(vocab: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(vocab.parent))


def job(vocab: Path, **settings: Any) -> EncodeJob:
    spec = TokenizerSpec("HFTokenizer", str(vocab), None, True)
    return EncodeJob(PreprocessSettings((), "", spec, **settings), "int32", (), 1 << 20)


def as_block(records: list[Any]) -> LineBlock:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    return LineBlock("in.jsonl", data, Position(), Position(1 + len(records), len(data)))


def documents(block: EncodedBlock, number: int = 0) -> list[tuple[list[int], list[bool]]]:
    """Ids of each document, and whether each is trained."""
    assert not block.bad, block.bad
    ids, labels = block.keys[2 * number : 2 * number + 2]
    ends = np.cumsum(ids.lengths)[:-1]
    pairs = zip(np.split(ids.ids, ends), np.split(labels.ids, ends), strict=True)
    return [(own.tolist(), (label != IGNORED).tolist()) for own, label in pairs]


def chat(vocab: Path, record: Any, template: str | ChatTemplate = CHATML, **settings: Any) -> tuple[list[int], str]:
    """Ids of a conversation, and its trained text."""
    (result,) = chats(vocab, [record], template, **settings)
    return result


def chats(
    vocab: Path, records: list[Any] | LineBlock, template: str | ChatTemplate = CHATML, **settings: Any
) -> list[tuple[list[int], str]]:
    if isinstance(template, str):
        template = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "<|endoftext|>"})
    encoder = ChatEncoder(job(vocab), ChatSettings(template, **settings))
    block = records if isinstance(records, LineBlock) else as_block(records)
    result = []
    for ids, trained in documents(encoder.encode(block)):
        chosen = [number for number, is_trained in zip(ids, trained, strict=True) if is_trained]
        result.append((ids, encoder.tokenizer.decode(chosen)))
    return result


def refusal(vocab: Path, record: Any, template: str = CHATML, **settings: Any) -> str:
    """Reason why a conversation is bad."""
    encoder = ChatEncoder(job(vocab), ChatSettings(ChatTemplate(template, {}), **settings))
    (bad,) = encoder.encode(as_block([record])).bad
    return bad.reason


def rendered(vocab: Path, messages: Any, template: str = CHATML, **more: Any) -> list[int]:
    """Ids that transformers gives."""
    ids: list[int] = theirs(vocab).apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=False, **more
    )
    return ids


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]], ids=["list", "text", "texts"])
def test_tools_stored_as_json(vocab: Path, tools: Any) -> None:
    """trl#5118: datasets store `tools` as JSON."""
    ids, _ = chat(vocab, {"messages": CALLING, "tools": tools})
    assert ids == rendered(vocab, CALLING, tools=TOOLS)
    assert "'tools'" in refusal(vocab, {"messages": CALLING, "tools": "get_weather"}).replace("`", "'")


def test_no_tools_and_openais_older_functions(vocab: Path) -> None:
    """prime-rl#885: the column is there for all lines, and empty or null for some."""
    for tools in (None, "", "null"):
        assert chat(vocab, {"messages": CALLING, "tools": tools})[0] == rendered(vocab, CALLING)
    functions = [tool["function"] for tool in TOOLS]
    assert chat(vocab, {"messages": CALLING, "functions": functions})[0] == rendered(vocab, CALLING, tools=TOOLS)


def test_nulls_of_a_table_are_absent_keys(vocab: Path, tmp_path: Path) -> None:
    """trl#5376, prime-rl#2988: Parquet gives each message and each call's arguments the keys of all rows."""

    def calling(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]

    named = CHATML.replace("message.role +", "message.role + (' ' ~ message.name if 'name' in message else '') +")
    conversations = [
        [USER, {"role": "assistant", "content": "Two.", "name": "bot"}],
        calling("sky", {"town": "Paris"}),
        calling("sum", {"a": 1, "b": 2}),
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": each} for each in conversations]), tmp_path / "chats.parquet")
    (block,) = read_blocks(str(tmp_path / "chats.parquet"), block_bytes=1 << 20)
    assert not isinstance(block, BadInput)
    assert [ids for ids, _ in chats(vocab, block, named)] == [rendered(vocab, each, named) for each in conversations]


def test_nulls_that_mean_something_stay(vocab: Path) -> None:
    """prime-rl#2968: a null among the arguments of a line is the caller's own."""
    messages = json.loads(json.dumps(CALLING))
    messages[1]["tool_calls"][0]["function"]["arguments"]["unit"] = None
    ids, _ = chat(vocab, {"messages": messages})
    assert ids == rendered(vocab, messages)
    assert "null" in theirs(vocab).decode(ids)


def test_the_template_for_tools(vocab: Path, tmp_path: Path) -> None:
    """transformers#31429: a list of templates, of which `tool_use` is for conversations with tools."""
    entries = [{"name": "default", "template": WITHOUT_TOOLS}, {"name": "tool_use", "template": CHATML}]
    config = json.loads(vocab.with_name("tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes(vocab.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": entries}))
    tokenizer = theirs(tmp_path / "tokenizer.json")
    template = own_chat_template(tmp_path / "tokenizer.json")
    assert template is not None
    assert ChatTemplate.from_json(template.as_json()) == template
    for tools in (TOOLS, [], None):
        expected = tokenizer.apply_chat_template(CALLING, tools=tools, tokenize=True, return_dict=False)
        assert chat(vocab, {"messages": CALLING, "tools": tools}, template)[0] == expected
    tokenizer.save_pretrained(str(tmp_path / "saved"))  # as files of their own
    assert own_chat_template(tmp_path / "saved" / "tokenizer.json") == template


def test_the_token_that_ends_an_answer_is_trained(vocab: Path) -> None:
    """trl#5988: with GLM it is the next role's token, which the template counts to the next message."""
    messages = [USER, {"role": "assistant", "content": "Two."}]
    asked = [*messages, USER, messages[1]]
    observed = [*messages, {"role": "tool", "content": "sun"}, messages[1]]
    for conversation, end in ((asked, "<|user|>"), (observed, "<|observation|>")):
        ids, trained = chat(vocab, {"messages": conversation}, GLM)
        assert ids == rendered(vocab, conversation, GLM)
        assert trained == f"\nTwo.{end}\nTwo."
    assert chat(vocab, {"messages": asked}, LLAMA3)[1] == "Two.<|eot|>Two.<|eot|>"
    assert chat(vocab, {"messages": asked})[1] == "Two.<|im_end|>\nTwo.<|im_end|>\n"


MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content }}<|im_end|>{%- endgeneration %}{%- else %}{{ m.content + '<|im_end|>' }}"
    "{%- endif %}{{ '\n' }}{%- endfor %}"
)


def test_marked_answers_are_those_of_transformers(vocab: Path) -> None:
    """transformers#47325: `return_assistant_tokens_mask`, also of an answer that begins the text."""
    messages = [{"role": "assistant", "content": "Hi"}, USER, {"role": "assistant", "content": "Two."}, USER]
    for source in (MARKED, "{{ messages[1].content }}" + MARKED):
        encoder = ChatEncoder(job(vocab), ChatSettings(ChatTemplate(source, {})))
        ((ids, trained),) = documents(encoder.encode(as_block([{"messages": messages}])))
        expected = theirs(vocab).apply_chat_template(
            messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
        )
        assert (ids, trained) == (expected["input_ids"], [bool(mask) for mask in expected["assistant_masks"]])
    assert chat(vocab, {"messages": messages}, MARKED, only_last=True)[1] == "Two.<|im_end|>"


def test_a_mark_without_the_end_of_the_answer(vocab: Path) -> None:
    """trl#5988: a template may mark the content only."""
    source = MARKED.replace("<|im_end|>{%- endgeneration %}", "{%- endgeneration %}<|im_end|>")
    messages = [USER, {"role": "assistant", "content": "Two."}] * 2
    assert chat(vocab, {"messages": messages}, source)[1] == "Two.<|im_end|>" * 2
