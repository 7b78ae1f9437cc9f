# PYTHON_ARGCOMPLETE_OK
r"""Convert conversations to token datasets with labels, so that training counts only the answers.

    python tools/preprocess_chat.py --input chats.jsonl --output-prefix data/chats --vocab-file model/tokenizer.json

It writes data/chats_messages_document and data/chats_messages_label_document, for `train_data_paths` and
`train_label_data_paths`. A line is `{"messages": [{"role": "user", "content": ...}, ...]}`, or with --jsonl-keys prompt
response `{"prompt": ..., "response": ...}`; ShareGPT's and Alpaca's names are read, too. The tokenizer's own chat
template makes the text. Labels are the tokens of answers, and -100 elsewhere. Checkpoints of a training with these
datasets carry the template, and so do their exports.
The same command resumes an interrupted run. On several machines: `python deepy.py preprocess_chat.py -H hostfile ...`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _checkout  # noqa: F401
from preprocess_data import add_added_tokens, add_input, add_running, run, shared_settings

from neox.arguments import ScriptParser
from neox.errors import ConfigError, TokenizerError, run_script
from neox.preprocess import (
    ChatSettings,
    PreprocessSettings,
    TokenizerSpec,
    check_settings,
)
from neox.tokenizer import TOKENIZER_FILE
from neox.tokenizer.chat import ChatRenderer, fixed_clock, read_chat_template


def parser() -> argparse.ArgumentParser:
    """Return the parser: the flags of gpt-neox's tool for chat templates, and ours."""
    p = ScriptParser(description=__doc__)
    keys_help = (
        "key of a list of messages (default: messages), or keys of prompt and answer: texts, or lists of messages"
    )
    add_input(p, ["messages"], keys_help)
    tokens = p.add_argument_group("tokenizer")
    add_template(tokens)
    tokens.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    loss = p.add_argument_group("labels")
    loss.add_argument("--generation-role", default="assistant", help="role that is trained (default: assistant)")
    loss.add_argument("--only-last", action="store_true", help="train only the last message of this role")
    loss.add_argument(
        "--split-answers",
        action="store_true",
        help="make a sample of each answer with what comes before it, for templates that change earlier answers",
    )
    loss.add_argument("--no-mask", action="store_true", help="train every token")
    out = p.add_argument_group("output")
    out.add_argument("--output-prefix", required=True, help="path without _messages_document.bin")
    add_running(p, out)
    return p


def add_template(tokens: argparse._ArgumentGroup) -> None:
    """Add the flags of a tokenizer with a chat template, which `preprocess_preferences.py` has too."""
    vocabulary = tokens.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--vocab-file", "--vocab", help="tokenizer.json")
    vocabulary.add_argument("--tokenizer-path", metavar="DIRECTORY", help="directory with tokenizer.json")
    tokens.add_argument("--tokenizer-type", default="HFTokenizer", choices=["HFTokenizer", "HFGPT2Tokenizer"])
    tokens.add_argument("--chat-template", metavar="FILE", help="Jinja template (default: the tokenizer's own)")
    tokens.add_argument(
        "--date",
        metavar="YYYY-MM-DD",
        type=known_date,
        help="day that the template writes as today's; without it `strftime_now` is left out of templates",
    )
    add_added_tokens(tokens)


def known_date(text: str) -> str:
    """Return a date. Raises ValueError if there is no such day."""
    fixed_clock(text)
    return text


def vocab_file(args: argparse.Namespace) -> Path:
    """Return the tokenizer's file. Raises TokenizerError for a directory without one."""
    if args.tokenizer_path is None:
        return Path(args.vocab_file)
    file = Path(args.tokenizer_path, TOKENIZER_FILE)
    if not file.is_file():
        raise TokenizerError(
            f"--tokenizer-path {args.tokenizer_path}: there is no {TOKENIZER_FILE} in it; give the directory of a "
            "Hugging Face model with a fast tokenizer, downloaded before"
        )
    return file


def settings_of(args: argparse.Namespace) -> PreprocessSettings:
    """Return the settings of a run from the flags. Raises NeoXError if flags or the template are wrong."""
    if len(args.jsonl_keys) > 2:
        raise ConfigError("--jsonl-keys takes the key of messages, or those of prompt and answer")
    if args.no_mask and args.only_last:
        raise ConfigError("--no-mask and --only-last exclude each other: leave one out")
    if args.split_answers and (args.no_mask or args.only_last):
        raise ConfigError("--split-answers excludes --no-mask and --only-last: it trains each answer, once")
    vocab = vocab_file(args)
    tokenizer = TokenizerSpec(args.tokenizer_type, str(vocab), None, True, tuple(args.added_tokens))
    chat = ChatSettings(
        template=read_chat_template(vocab, args.chat_template, tokenizer.build()),
        keys=tuple(args.jsonl_keys),
        role=args.generation_role,
        only_last=args.only_last,
        count_all=args.no_mask,
        split_answers=args.split_answers,
        date=args.date,
    )
    ChatRenderer(chat.template, fixed_clock(chat.date)).check_date()  # raises if it is no template, too
    return shared_settings(args, tokenizer=tokenizer, keys=chat.datasets, accelerator="off", chat=chat)


def check(args: argparse.Namespace) -> None:
    """Raise NeoXError if the run cannot work. `deepy.py` calls this before it starts ranks."""
    check_settings(settings_of(args))


def main() -> int:
    """Run the tool."""
    return run(parser().parse_args(), settings_of)


if __name__ == "__main__":
    run_script(main)
