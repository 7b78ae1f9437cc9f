"""Chat templates, compared with their rendering by transformers."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from neox.errors import TokenizerError
from neox.tokenizer import HFTokenizer, build_tokenizer
from neox.tokenizer.chat import (
    AnswerForm,
    ChatError,
    ChatRenderer,
    ChatTemplate,
    find_answer_form,
    fixed_clock,
    own_chat_template,
    read_chat_template,
)
from tests.errors import raises_naming
from tests.transformers_versions import hands_thinking_over

VOCAB = Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json"
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>tools ' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'secret' %}{{ raise_exception('no secrets') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}<|im_end|>{% endgeneration -%}
    {% else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# The forms that widely used models have: loops with conditions, namespaces, macros, dates, thoughts, tags.
LLAMA3 = """\
{{- bos_token }}
{%- if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% else %}{% set date = '1' %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content']|trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>' }}
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
NAMESPACES = """\
{%- set ns = namespace(turns=0, last=dict(role='none')) %}
{%- macro shown(role, text) %}{{ '<|' ~ role ~ '|>' ~ text ~ '</s>' }}{% endmacro %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- set ns.last = message %}
    {{- shown(message.role, (message.reasoning_content or '') ~ message.content) }}
{%- endfor %}
{{- '<|' ~ ns.turns ~ ns.last.role ~ '|>' }}{{ dict(a=1) | tojson(indent=2) }}
{%- if add_generation_prompt and not messages[-1].role == 'assistant' %}<|assistant|>{% endif %}
"""
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": " How are you? "},
    {"role": "assistant", "content": "Well é 你", "thinking": "Hm."},
    {"role": "user", "content": "Good."},
]


@pytest.mark.parametrize(
    "source", [CHATML, INST, LLAMA3, GEMMA, pytest.param(NAMESPACES, marks=hands_thinking_over), ZEPHYR]
)
@pytest.mark.parametrize("prompt", [True, False])
def test_text_is_that_of_transformers(source: str, prompt: bool) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    for tools in (None, [{"type": "function", "function": {"name": "é"}}]):
        expected = theirs.apply_chat_template(
            CHAT, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        renderer = ChatRenderer(ChatTemplate(source, TOKENS), clock=datetime.datetime.now().strftime)
        assert renderer.render(CHAT, tools, prompt=prompt) == expected


def test_what_a_template_refuses_and_may_not_do() -> None:
    renderer = ChatRenderer(ChatTemplate(CHATML, TOKENS))
    for messages in ([{"role": "secret", "content": ""}], [{"role": "assistant"}, {"role": "user", "content": 1}]):
        with pytest.raises(ChatError):
            renderer.render(messages)
    for source in (
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ strftime_now('%Y') }}",
        "{% set ns = namespace(_hidden=1) %}",
        "{{ dict.mro() }}",
    ):
        with pytest.raises(ChatError):
            ChatRenderer(ChatTemplate(source, {})).render(CHAT)
    with raises_naming(TokenizerError, "line 2"):
        ChatRenderer(ChatTemplate("\n{% if %}", {}))


def test_a_date_that_only_conversations_with_tools_need_is_asked_for() -> None:
    dated = "{{ strftime_now('%Y') }}"
    for needs in (ChatTemplate(dated, {}), ChatTemplate(INST, TOKENS, dated)):
        with raises_naming(TokenizerError, "strftime_now", "--date"):
            ChatRenderer(needs).check_date()
        ChatRenderer(needs, fixed_clock("2025-01-31")).check_date()
    ChatRenderer(ChatTemplate(INST, TOKENS)).check_date()


def test_where_a_template_is_found(tmp_path: Path) -> None:
    vocab = tmp_path / "tokenizer.json"
    config = tmp_path / "tokenizer_config.json"
    with raises_naming(TokenizerError, vocab, "--chat-template"):
        read_chat_template(vocab)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "from a list"}]
    config.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}, "bos_token": None}))
    assert read_chat_template(vocab) == ChatTemplate("from a list", {"eos_token": "</s>"}, "x")
    (tmp_path / "chat_template.jinja").write_text("from its file")
    assert read_chat_template(vocab).source == "from its file"
    (tmp_path / "mine").write_text("given")
    assert read_chat_template(vocab, tmp_path / "mine").source == "given"
    with raises_naming(TokenizerError, tmp_path / "none"):
        read_chat_template(vocab, tmp_path / "none")


def test_a_tokenizer_without_a_configuration_has_the_tokens_of_its_export(tmp_path: Path) -> None:
    vocab = tmp_path / "tokenizer.json"
    vocab.write_bytes(VOCAB.read_bytes())
    tokenizer = build_tokenizer("HFTokenizer", vocab)
    assert own_chat_template(vocab, tokenizer) is None
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert own_chat_template(vocab, tokenizer) == ChatTemplate("{{ eos_token }}", {"eos_token": "<|endoftext|>"})
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert read_chat_template(vocab, None, tokenizer).tokens == {"bos_token": "<s>"}


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (CHATML, AnswerForm(end_ids=(301,))),
        (INST.replace("eos_token", "'<|endoftext|>'"), AnswerForm(begin=" ")),  # always ends a generation
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}",
            AnswerForm(begin=" ", end_strings=("\n\nuser:",)),
        ),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}",
            AnswerForm(begin="<assistant>", end_strings=("</assistant>",)),
        ),
        ("{{ raise_exception('never') }}", AnswerForm()),
    ],
)
def test_what_stands_around_an_answer(source: str, form: AnswerForm) -> None:
    tokenizer = build_tokenizer("HFTokenizer", VOCAB)
    assert isinstance(tokenizer, HFTokenizer)
    tokenizer.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if form.end_ids:
        form = AnswerForm(end_ids=(tokenizer.backend.token_to_id("<|im_end|>"),))
    assert find_answer_form(ChatTemplate(source, TOKENS), tokenizer) == form
