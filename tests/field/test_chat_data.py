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
from neox.preprocess import ChatSettings, PreferenceSettings, PreprocessSettings, TokenizerSpec
from neox.preprocess.chat_encoder import ChatEncoder
from neox.preprocess.encode import EncodedBlock, EncodeJob
from neox.preprocess.preference_encoder import PreferenceEncoder
from neox.tokenizer import build_tokenizer
from neox.tokenizer.chat import ChatRenderer, ChatTemplate, own_chat_template
from tests.transformers_versions import IS_4

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
    *("<|user|>", "<|assistant|>", "<|observation|>", "<think>"),
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


def as_saved_tokenizer(directory: Path) -> Path:
    """Save a byte-level tokenizer with ChatML's, Llama 3's and GLM's special tokens, and a first token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*SPECIALS, *alphabet, "Ġf", "Ġfo", "es", "ti"])}
    tokenizer = Tokenizer(models.BPE(ids, [("Ġ", "f"), ("Ġf", "o"), ("e", "s"), ("t", "i")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_saved_tokenizer(tmp_path_factory.mktemp("tok"))


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


def test_a_system_message_beside_the_others(vocab: Path) -> None:
    """axolotl PR 2397 (`field_system`), LLaMA-Factory's `system`: a column beside messages, a prompt, or pairs."""
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "The sun."}
    expected = rendered(vocab, [system, USER, answer])
    prompted = {"prompt": [USER], "completion": [answer]}
    for record in ({"messages": [USER, answer]}, {"messages": [system, USER, answer]}, prompted):
        assert chat(vocab, {"system": "Be brief.", **record}) == (expected, "The sun.<|im_end|>\n")
    for prompt in ("weather in Paris?", [USER], [system, USER]):
        answers = {"chosen": [answer], "rejected": [{**answer, "content": "No."}]}
        before, chosen, _ = pairs(vocab, {"system": "Be brief.", "prompt": prompt, **answers})
        assert before + chosen == expected
    texts = {"system": "Be brief.", "prompt": "Q:", "chosen": " Yes", "rejected": " No"}
    encoder = PreferenceEncoder(job(vocab), PreferenceSettings(None))
    assert ["system" in loss for loss in encoder.encode(as_block([texts])).losses] == [True]


def test_a_system_message_of_the_template_stands_in_the_prompt(vocab: Path) -> None:
    """alignment-handbook#117, #167: a template that writes one by itself writes it before the prompt only."""
    source = (
        "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{%- endif %}" + CHATML
    )
    answer = {"role": "assistant", "content": "The sun."}
    record = {"prompt": [USER], "chosen": [answer], "rejected": [{**answer, "content": "No."}]}
    assert pairs(vocab, record, source) == pairs_of_trl(vocab, record, source)


@pytest.mark.parametrize(("label", "reward"), [(1, 1), (0, -1), (1.0, 1), (True, 1), (False, -1)])
@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_judgements_as_numbers(vocab: Path, key: str, label: Any, reward: int) -> None:
    """TRL takes what is true or false of a number; LLaMA-Factory's name is `kto_tag`."""
    encoder = PreferenceEncoder(job(vocab), PreferenceSettings(ChatTemplate(CHATML, {}), labelled=True))
    block = encoder.encode(as_block([{"prompt": "How?", "completion": " So.", key: label}]))
    assert not block.bad
    assert set(block.keys[2].ids.tolist()) == {reward}
    for other in (2, None, "yes"):
        (bad,) = encoder.encode(as_block([{"prompt": "How?", "completion": " So.", key: other}])).bad
        assert key in bad.reason


@pytest.mark.skipif(IS_4, reason="transformers 4 reads `extra_special_tokens` and `special_tokens_map.json` otherwise")
@pytest.mark.parametrize("has_decoder", [False, True])
def test_special_tokens_of_older_and_newer_files(vocab: Path, tmp_path: Path, has_decoder: bool) -> None:
    """mistral.rs#2432, meta-pytorch/tokenizers PR 146: `special_tokens_map.json`, and names of a model."""
    source = "{{ bos_token }}[{{ pad_token }}|{{ image_token }}|{{ cut_token }}]{{ messages[0].content }}"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "image_token": "<sop>",
        "extra_special_tokens": {"cut_token": "<|user|>"},
        "chat_template": source,
    }
    if has_decoder:
        config["added_tokens_decoder"] = {}
    (tmp_path / "tokenizer.json").write_bytes(vocab.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    mapped = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "<|eot|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    template = own_chat_template(tmp_path / "tokenizer.json")
    assert template is not None
    tokenizer = theirs(tmp_path / "tokenizer.json")
    assert ChatRenderer(template).render([USER]) == tokenizer.apply_chat_template([USER], tokenize=False)
    ours = build_tokenizer("HFTokenizer", str(tmp_path / "tokenizer.json"))
    assert (ours.eod, ours.bos) == (tokenizer.eos_token_id, tokenizer.bos_token_id)


def test_the_token_that_ends_an_answer_is_trained(vocab: Path) -> None:
    """trl#5988: with GLM it is the next role's token, which the template counts to the next message."""
    messages = [USER, {"role": "assistant", "content": "Two."}]
    asked = [*messages, USER, messages[1]]
    observed = [*messages, {"role": "tool", "content": "sun"}, messages[1]]
    for conversation, end in ((asked, "<|user|>"), (observed, "<|observation|>")):
        ids, trained = chat(vocab, {"messages": conversation}, GLM)
        assert ids == rendered(vocab, conversation, GLM)
        assert trained == f"\nTwo.{end}\nTwo."
    encoder = ChatEncoder(job(vocab), ChatSettings(ChatTemplate(GLM, {})))
    assert ["--append-eod" in loss for loss in encoder.encode(as_block([{"messages": messages}])).losses] == [True]
    assert chat(vocab, {"messages": asked}, LLAMA3)[1] == "Two.<|eot|>Two.<|eot|>"
    assert chat(vocab, {"messages": asked})[1] == "Two.<|im_end|>\nTwo.<|im_end|>\n"


def test_an_end_that_is_no_token_of_the_vocabulary(vocab: Path) -> None:
    """ChatML on a base model, whose tokenizer has no `<|im_end|>`: its characters are trained."""
    chatml = CHATML.replace("<|im_end|>", "<|fin|>")
    conversation = {"messages": [USER, {"role": "assistant", "content": "Two."}]}
    assert chat(vocab, conversation, chatml)[1].startswith("Two.<|fin|>")
    encoder = ChatEncoder(job(vocab), ChatSettings(ChatTemplate(chatml, {})))
    assert not encoder.encode(as_block([conversation])).losses


def test_a_template_that_ends_the_text_once(vocab: Path) -> None:
    """Phi 3's template writes the end of the text after the last answer, and after each prefix of a conversation."""
    phi = (
        "{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- else %}{{ eos_token }}{%- endif %}"
    )
    messages = [USER, {"role": "assistant", "content": "Two."}] * 2
    ids, trained = chat(vocab, {"messages": messages}, phi)
    assert ids == rendered(vocab, messages, phi)
    assert trained == "Two.<|im_end|>\nTwo.<|im_end|>\n<|endoftext|>"


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


HUMAN = {"from": "human", "value": "weather in Paris?"}
GPT = {"from": "gpt", "value": "The sun."}
TURNS = [USER, {"role": "assistant", "content": "The sun."}]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"conversations": [HUMAN, GPT]}, TURNS),
        ({"conversation": [HUMAN, GPT], "id": "x"}, TURNS),
        ({"conversations": TURNS}, TURNS),
        ({"conversations": json.dumps([HUMAN, GPT])}, TURNS),
        ({"messages": json.dumps(TURNS)}, TURNS),
        ({"messages": [{**HUMAN, "weight": None}, {**GPT, "weight": 1}]}, TURNS),
        ({"messages": [{"role": "human", "content": USER["content"]}, {"role": "gpt", "value": "The sun."}]}, TURNS),
        ({"conversations": [HUMAN, GPT], "system": "Be kind."}, [{"role": "system", "content": "Be kind."}, *TURNS]),
        (
            {
                "conversations": [
                    HUMAN,
                    {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"town": "Paris"}}'},
                    {"from": "observation", "value": "sun"},
                    GPT,
                ]
            },
            CALLING,
        ),
        ({"instruction": USER["content"], "input": "", "output": "The sun."}, TURNS),
        ({"instruction": USER["content"], "output": "The sun.", "text": "Below is ..."}, TURNS),
        (
            {"instruction": "Translate.", "input": "sun", "output": "soleil", "system": "Be kind.", "history": []},
            [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Translate.\nsun"},
                {"role": "assistant", "content": "soleil"},
            ],
        ),
        ({"instruction": "b", "output": "B", "history": [["a", "A"]]}, None),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, TURNS),
    ],
)
def test_names_of_others(vocab: Path, record: Any, messages: Any) -> None:
    """trl#2083, litgpt#308, torchtune#2618, GraphGen#43: ShareGPT's, LLaMA-Factory's and Alpaca's names."""
    ids, trained = chat(vocab, record)
    if messages is None:
        messages = [
            {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "aAbB", strict=True)
        ]
    assert ids == rendered(vocab, messages)
    answers = [message for message in messages if message["role"] == "assistant"]
    assert trained.count("<|im_end|>") == len(answers)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"conversations": [HUMAN, {"from": "narrator", "value": "x"}]}, "'narrator'"),
        ({"conversations": [HUMAN, {"from": "function_call", "value": "get_weather()"}]}, "JSON"),
        ({"conversations": []}, "'conversations'"),
        ({"instruction": "a", "output": ""}, "'output'"),
        ({"instruction": "", "output": "a"}, "'instruction'"),
        ({"messages": [USER, {**TURNS[1], "weight": 0.5}]}, "weight"),
        ({"messages": [USER, {**TURNS[1], "weight": 0}]}, "'assistant'"),
        ({"messages": [USER, {**TURNS[1], "train": "yes"}]}, "'train'"),
        ({"messages": [USER, {**TURNS[1], "train_detail": [{"begin_offset": 0}]}]}, "'train_detail'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "'image_url'",
        ),
        ({"messages": TURNS, "chat_template_kwargs": {"messages": []}}, "'messages'"),
    ],
)
def test_what_is_refused_by_name(vocab: Path, record: Any, name: str) -> None:
    assert name in refusal(vocab, record)


def test_flags_of_messages(vocab: Path) -> None:
    """OpenAI's `weight` and axolotl's `train` choose the messages that are trained."""
    one, two = ({"role": "assistant", "content": text} for text in ("One.", "Two."))
    assert chat(vocab, {"messages": [USER, {**one, "weight": 0}, USER, two]})[1] == "Two.<|im_end|>\n"
    assert chat(vocab, {"messages": [USER, one, USER, {**two, "train": False}]})[1] == "One.<|im_end|>\n"
    assert chat(vocab, {"messages": [USER, {**one, "weight": 0}, USER, two]}, MARKED)[1] == "Two.<|im_end|>"
    asked = {"messages": [{**USER, "train": True}, {**one, "train": False}]}
    assert chat(vocab, asked)[1] == "<|im_start|>user\nweather in Paris?<|im_end|>\n"


def test_contents_in_parts(vocab: Path) -> None:
    """transformers gives parts to templates that read them; others would write them as Python shows them."""
    parts = [{"type": "text", "text": "weather in "}, {"type": "text", "text": "Paris?", "image_url": None}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "The sun."}]
    by_parts = WITHOUT_TOOLS.replace(
        "(message.content or '')",
        "(message.content if message.content is string else '|'.join(message.content | map(attribute='text')))",
    )
    only_parts = WITHOUT_TOOLS.replace("(message.content or '')", "message.content | map(attribute='text') | join('|')")
    plain = [USER, messages[1]]
    assert chat(vocab, {"messages": messages})[0] == rendered(vocab, plain)
    assert chat(vocab, {"messages": messages}, by_parts)[0] == rendered(vocab, messages, by_parts)
    listed = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in plain]
    assert chat(vocab, {"messages": plain}, only_parts)[0] == rendered(vocab, listed, only_parts)


def test_arguments_in_json(vocab: Path) -> None:
    """prime-rl#885, oumi#2605, transformers#45419: OpenAI's arguments are a text, which is not JSON once more."""
    calling = json.loads(json.dumps(CALLING))
    calling[1]["tool_calls"][0]["function"]["arguments"] = '{"town": "Paris"}'
    assert chat(vocab, {"messages": calling})[0] == rendered(vocab, CALLING)
    stored = [{**message, "tool_calls": json.dumps(message.get("tool_calls"))} for message in CALLING]
    assert chat(vocab, {"messages": stored})[0] == rendered(vocab, CALLING)
    tests_kind = CHATML.replace(
        "(c.function | tojson)",
        "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)",
    )
    calling[1]["tool_calls"][0]["function"]["arguments"] = '{"town":"Paris"}'
    assert chat(vocab, {"messages": calling}, tests_kind)[0] == rendered(vocab, calling, tests_kind)


def test_variables_of_a_line(vocab: Path) -> None:
    """TRL gives a line's `chat_template_kwargs` to the template."""
    source = "{%- if enable_thinking is defined and enable_thinking %}{{ '<think>' }}{%- endif %}" + CHATML
    ids, _ = chat(vocab, {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": True}}, source)
    assert ids == rendered(vocab, TURNS, source, enable_thinking=True)
    assert ids != rendered(vocab, TURNS, source)


THINKING = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
    "{{ m.content.split('</think>')[-1] }}{%- else %}{{ m.content }}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{%- endif %}"
)


def test_what_a_template_leaves_out_is_counted(vocab: Path) -> None:
    """Qwen 3's template leaves out the thoughts of earlier answers; older templates all of them, and tools."""
    one = {"role": "assistant", "content": "One.", "reasoning_content": "Hm."}
    inside = {"role": "assistant", "content": "<think>Hm.</think>One."}
    plain = {"role": "assistant", "content": "One."}
    cases: list[tuple[str, list[Any], set[str]]] = [
        (THINKING, [USER, plain], set()),
        (THINKING, [USER, one], set()),
        (THINKING, [USER, inside], {"thoughts"}),
        (THINKING, [USER, one, USER, plain], {"thoughts"}),
        (WITHOUT_TOOLS, [USER, {**plain, "thinking": "Hm."}], {"thoughts"}),
        (LLAMA3, CALLING, {"calls of tools", "descriptions of tools"}),
    ]
    for source, messages, losses in cases:
        tools = TOOLS if messages is CALLING else None
        encoder = ChatEncoder(job(vocab), ChatSettings(ChatTemplate(source, {}), only_last=True))
        block = encoder.encode(as_block([{"messages": messages, "tools": tools}]))
        assert not block.bad
        assert set(block.losses) == losses
    assert chat(vocab, {"messages": [USER, plain]}, THINKING)[1] == "One.<|im_end|>\n"


OPENED = (
    "{%- if messages[0].role != 'system' %}{{ '<s><|im_start|>system\nBe kind.<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content }}<|im_end|>{%- endgeneration %}"
    "{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\nPROMPTED' }}{%- endif %}"
)
"""A template with a system message of its own, whose prompt may be longer than what stands before answers."""


def unmarked(template: str) -> str:
    """The same template without the marks around answers, which then follow from the prompt."""
    return template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def marked_by_transformers(vocab: Path, messages: Any, template: str) -> str:
    """Text that transformers marks as answers."""
    tokenizer = theirs(vocab)
    both = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [own for own, mask in zip(both["input_ids"], both["assistant_masks"], strict=True) if mask]
    text: str = tokenizer.decode(marked)
    return text


@pytest.mark.parametrize("prompted", ["", "<think>\n"])
def test_a_conversation_that_begins_with_the_assistant(vocab: Path, prompted: str) -> None:
    """axolotl PR 723, NeMo Speech PR 16284: what a template writes before the first answer is not trained."""
    messages = [{"role": "assistant", "content": "Hi"}, USER, {"role": "assistant", "content": "Two."}]
    strict = "{%- if messages[0]['role'] == 'system' %}{%- endif %}" + LLAMA3
    ids, trained = chat(vocab, {"messages": messages}, strict)
    assert ids == rendered(vocab, messages, strict)
    assert trained == "Hi<|eot|>Two.<|eot|>"

    template = OPENED.replace("PROMPTED", prompted)
    expected = marked_by_transformers(vocab, messages, template)
    assert expected == "Hi<|im_end|>Two.<|im_end|>"
    assert chat(vocab, {"messages": messages}, unmarked(template))[1] == expected

    # Qwen 3 writes an empty thought into answers after the last question only.
    late = "{%- if loop.last and not loop.first %}{{ '<think></think>' }}{%- endif %}{{ m.content }}"
    template = OPENED.replace("PROMPTED", "").replace("{{ m.content }}", late)
    expected = marked_by_transformers(vocab, messages, template)
    assert expected == "Hi<|im_end|><think></think>Two.<|im_end|>"
    assert chat(vocab, {"messages": messages}, unmarked(template))[1] == expected


@pytest.mark.parametrize("content", ["", "<b>Two</b>", "<|", "Two."])
def test_an_answer_that_begins_like_the_prompt(vocab: Path, content: str) -> None:
    """DeepSeek-R1-Distill's prompt opens a thought, which answers in a conversation lack: tokens tell, as in TRL."""
    template = OPENED.replace("PROMPTED", "<think>\n")
    messages = [USER, {"role": "assistant", "content": content}, {"role": "tool", "content": "sun"}]
    conversation = [*messages, {"role": "assistant", "content": "Two."}]
    expected = marked_by_transformers(vocab, conversation, template)
    assert expected == f"{content}<|im_end|>Two.<|im_end|>"
    assert chat(vocab, {"messages": conversation}, unmarked(template))[1] == expected


def pairs(vocab: Path, record: Any, template: str | None = CHATML) -> tuple[list[int], list[int], list[int]]:
    """Prompt, chosen and rejected answer."""
    chosen = ChatTemplate(template, {"bos_token": "<s>"}) if template else None
    block = PreferenceEncoder(job(vocab), PreferenceSettings(chosen)).encode(as_block([record]))
    both = []
    for number in (0, 1):
        ((ids, trained),) = documents(block, number)
        begin = trained.index(True)
        assert all(trained[begin:])
        both.append((ids[:begin], ids[begin:]))
    assert both[0][0] == both[1][0]
    return both[0][0], both[0][1], both[1][1]


def pairs_of_trl(vocab: Path, record: Any, template: str | None = CHATML) -> tuple[list[int], list[int], list[int]]:
    """The same by TRL: what its DPOTrainer does with a line."""
    from trl.data_utils import _tokenize, common_prefix_length, extract_prompt

    tokenizer = theirs(vocab)
    tokenizer.chat_template = template
    if "prompt" not in record:
        record = extract_prompt(record)
    tools = record.get("tools")
    more = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
    if isinstance(record["chosen"], str):
        record = {**record, **{key: record[key] + "<|endoftext|>" for key in ("chosen", "rejected")}}
        more = {}
    prompted = {"add_generation_prompt": True} if more else {}
    prompt = _tokenize(tokenizer, record["prompt"], **more, **prompted)["input_ids"]
    both = [_tokenize(tokenizer, record["prompt"] + record[key], **more)["input_ids"] for key in ("chosen", "rejected")]
    begin = min(common_prefix_length(prompt, ids) for ids in both)
    return prompt[:begin], both[0][begin:], both[1][begin:]


@pytest.mark.parametrize(
    ("chosen", "rejected", "answers"),
    [
        ("问：为什么？答：散射。", "问：为什么？答：不知道。", ("散射。", "不知道。")),
        ("Question: why?\nAnswer:\nThe sun.", "Question: why?\nAnswer:\nNo idea.", ("The sun.", "No idea.")),
        ("How many? Two.", "How many? Few.", (" Two.", " Few.")),
        ("Say it: for", "Say it: foe", ("r", "e")),
    ],
)
def test_where_texts_without_a_prompt_are_cut(
    vocab: Path, chosen: str, rejected: str, answers: tuple[str, str]
) -> None:
    """trl#6472, trl#6498: TRL's `extract_prompt` cuts where the texts differ, before a blank."""
    tokenizer = Tokenizer.from_file(str(vocab))
    _, *found = pairs(vocab, {"chosen": chosen, "rejected": rejected}, None)
    assert tuple(tokenizer.decode(ids) for ids in found) == answers


@pytest.mark.slow  # imports TRL
@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("问：天空为什么是蓝色的？答：因为散射。", "问：天空为什么是蓝色的？答：不知道。"),
        ("Question: why?\nAnswer:\nThe sun.", "Question: why?\nAnswer:\nNo idea."),
        ("Human:\nhow many\n\nAssistant:\nmany", "Human:\nhow many\n\nAssistant:\nfew"),
        ("How many? Two.", "How many? Few."),
        ("How many? Yes and yes", "How many? Yes"),
        ("Say it: estimate", "Say it: ester"),
        ("Say it: for", "Say it: foe"),
    ],
)
def test_a_prompt_that_both_answers_begin_with(vocab: Path, chosen: str, rejected: str) -> None:
    """trl#6472, trl#6498: TRL's `extract_prompt` cuts where the texts differ, before a blank."""
    record = {"chosen": chosen, "rejected": rejected}
    first = slice(1, None)  # TRL's begin with the tokenizer's first token
    prompt, *answers = pairs_of_trl(vocab, record, None)
    found, *found_answers = pairs(vocab, record, None)
    assert (found[-len(prompt[first]) :], found_answers) == (prompt[first], answers)


@pytest.mark.slow  # imports TRL
@pytest.mark.parametrize(
    "record",
    [
        {"chosen": TURNS, "rejected": [USER, {"role": "assistant", "content": "No."}]},
        {"chosen": [*TURNS, USER, TURNS[1]], "rejected": [*TURNS, USER, {"role": "assistant", "content": "No."}]},
        {"prompt": [USER], "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "The moon."}]},
        {"prompt": [USER], "chosen": CALLING[1:], "rejected": TURNS[1:], "tools": json.dumps(TOOLS)},
    ],
)
@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML, THINKING + "{{ '' if tools else '' }}"])
def test_pairs_of_conversations_are_those_of_trl(vocab: Path, record: Any, template: str) -> None:
    """trl#5118 and trl#6472 for conversations; a template writes the first token itself, once."""
    assert pairs(vocab, record, template) == pairs_of_trl(vocab, record, template)


@pytest.mark.slow  # imports TRL
def test_pairs_as_others_write_them(vocab: Path) -> None:
    """LLaMA-Factory's ranking data, and answers without the question or as texts beside messages."""
    no = {"role": "assistant", "content": "No."}
    expected = pairs_of_trl(vocab, {"prompt": [USER], "chosen": TURNS[1:], "rejected": [no]})
    for record in (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}},
        {"messages": [USER], "chosen": TURNS[1], "rejected": no},
        {"instruction": USER["content"], "input": "", "chosen": [TURNS[1]], "rejected": [no]},
        {"instruction": USER["content"], "chosen": "The sun.", "rejected": "No."},
        {"prompt": USER["content"], "chosen": TURNS[1:], "rejected": [no]},
        {"prompt": USER["content"], "chosen": TURNS, "rejected": [USER, no]},
        {"prompt": [USER], "chosen": TURNS, "rejected": [USER, no]},
        {"prompt": [USER], "chosen": "The sun.", "rejected": "No."},
        {"chosen": [HUMAN, GPT], "rejected": [HUMAN, {"from": "gpt", "value": "No."}]},
    ):
        assert pairs(vocab, record) == expected, record


def test_an_end_that_is_already_there(vocab: Path) -> None:
    """TRL adds the end of a text only where it is missing."""
    prompt, chosen, rejected = pairs(vocab, {"prompt": "Two?", "chosen": " Yes<|endoftext|>", "rejected": " No"}, None)
    assert (chosen.count(0), rejected.count(0), prompt.count(0)) == (1, 1, 0)


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [HUMAN, GPT], "label": True},
        {"messages": TURNS, "label": True},
        {"prompt": [USER], "completion": TURNS[1:], "label": True},
        {"prompt": USER["content"], "completion": TURNS[1:], "label": True},
        {"instruction": USER["content"], "output": "The sun.", "label": True},
        {"messages": TURNS, "kto_tag": True},
    ],
)
def test_judged_answers_as_others_write_them(vocab: Path, record: Any) -> None:
    template = ChatTemplate(CHATML, {})
    block = PreferenceEncoder(job(vocab), PreferenceSettings(template, labelled=True)).encode(as_block([record]))
    ((ids, trained),) = documents(block)
    assert ids == rendered(vocab, TURNS)
    assert sum(trained) == len("The sun.") + 2
