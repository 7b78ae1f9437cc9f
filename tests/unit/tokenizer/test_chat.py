"""Chat templates, compared with their rendering by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neox.errors import TokenizerError
from neox.tokenizer.chat import ChatError, ChatRenderer, ChatTemplate, read_chat_template
from tests.errors import raises_naming

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
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": " How are you? "},
    {"role": "assistant", "content": "Well é 你"},
    {"role": "user", "content": "Good."},
]


@pytest.mark.parametrize("source", [CHATML, INST])
@pytest.mark.parametrize("prompt", [True, False])
def test_text_is_that_of_transformers(source: str, prompt: bool) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    for tools in (None, [{"type": "function", "function": {"name": "é"}}]):
        expected = theirs.apply_chat_template(
            CHAT, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        assert ChatRenderer(ChatTemplate(source, TOKENS)).render(CHAT, tools, prompt=prompt) == expected


def test_what_a_template_refuses_and_may_not_do() -> None:
    renderer = ChatRenderer(ChatTemplate(CHATML, TOKENS))
    for messages in ([{"role": "secret", "content": ""}], [{"role": "assistant"}, {"role": "user", "content": 1}]):
        with pytest.raises(ChatError):
            renderer.render(messages)
    for source in ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "{{ strftime_now('%Y') }}"):
        with pytest.raises(ChatError):
            ChatRenderer(ChatTemplate(source, {})).render(CHAT)
    with raises_naming(TokenizerError, "line 2"):
        ChatRenderer(ChatTemplate("\n{% if %}", {}))


def test_where_a_template_is_found(tmp_path: Path) -> None:
    vocab = tmp_path / "tokenizer.json"
    config = tmp_path / "tokenizer_config.json"
    with raises_naming(TokenizerError, vocab, "--chat-template"):
        read_chat_template(vocab)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "from a list"}]
    config.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}, "bos_token": None}))
    assert read_chat_template(vocab) == ChatTemplate("from a list", {"eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("from its file")
    assert read_chat_template(vocab).source == "from its file"
    (tmp_path / "mine").write_text("given")
    assert read_chat_template(vocab, tmp_path / "mine").source == "given"
    with raises_naming(TokenizerError, tmp_path / "none"):
        read_chat_template(vocab, tmp_path / "none")
