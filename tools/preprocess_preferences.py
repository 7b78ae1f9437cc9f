# PYTHON_ARGCOMPLETE_OK
r"""Convert preferences to token datasets with labels, for training by DPO, KTO and their relatives.

    python tools/preprocess_preferences.py --input pairs.jsonl --output-prefix data/pairs \
        --vocab-file model/tokenizer.json --seq-length 2048

A line is `{"prompt": ..., "chosen": ..., "rejected": ...}`: texts, or lists of messages, for which the tokenizer's chat
template makes the text. Without `prompt` it is what both answers begin with, as in TRL. --fields names fields that are
called otherwise. It writes data/pairs_chosen_document and
data/pairs_rejected_document with their labels, for `pos_train_data_paths`, `pos_train_label_data_paths` and the same
keys with `neg`.

With --labelled a line is `{"prompt": ..., "completion": ..., "label": true or false}`. It writes
data/pairs_completion_document, its labels and its rewards, for `train_data_paths`, `train_label_data_paths` and
`train_reward_data_paths`.

Lines that cannot be trained on are refused by name, or up to --skip-bad of them skipped: equal answers, no prompt, a
label that is not boolean, an answer that --seq-length tokens cannot hold. The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _checkout  # noqa: F401
from preprocess_chat import add_template, vocab_file
from preprocess_data import add_files, add_running, run, shared_settings, text_key

from neox.arguments import ScriptParser
from neox.errors import run_script
from neox.preprocess import PreferenceSettings, PreprocessSettings, TokenizerSpec, check_settings
from neox.preprocess.preference_encoder import FIELDS
from neox.tokenizer import Tokenizer
from neox.tokenizer.chat import ChatRenderer, ChatTemplate, fixed_clock, own_chat_template, read_chat_template


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = ScriptParser(description=__doc__)
    data = add_files(p)
    data.add_argument(
        "--labelled", action="store_true", help="lines hold one answer with a label, instead of two answers"
    )
    data.add_argument(
        "--fields",
        nargs="+",
        type=renamed_field,
        default=[],
        metavar="NAME=KEY",
        help=r"fields of other names, such as prompt=question chosen=answers.best; KEY may be a path with dots or a "
        r"template ('{title}\n\n{text}')",
    )
    tokens = p.add_argument_group("tokenizer")
    add_template(tokens)
    tokens.add_argument(
        "--append-eod",
        action="store_true",
        help="end conversations with the end-of-document id too; texts always end with it",
    )
    tokens.add_argument(
        "--seq-length", type=int, metavar="N", help="`seq_length` of the training: refuse answers that it cannot hold"
    )
    out = p.add_argument_group("output")
    out.add_argument("--output-prefix", required=True, help="path without _chosen_document.bin")
    add_running(p, out)
    return p


def renamed_field(text: str) -> tuple[str, str]:
    """Return the name and the key of a word of --fields. Raises ValueError for another word."""
    name, equals, key = text.partition("=")
    if name not in FIELDS or not equals or not key:
        raise ValueError(text)
    return name, text_key(key)


def settings_of(args: argparse.Namespace) -> PreprocessSettings:
    """Return the settings of a run from the flags. Raises NeoXError if flags, inputs or the template are wrong."""
    vocab = vocab_file(args)
    tokenizer = TokenizerSpec(args.tokenizer_type, str(vocab), None, True, tuple(args.added_tokens))
    template = template_of(args, vocab, tokenizer.build())
    preferences = PreferenceSettings(template, args.labelled, args.seq_length, tuple(args.fields), args.date)
    if preferences.template is not None:
        renderer = ChatRenderer(preferences.template, fixed_clock(preferences.date))  # raises if it is no template
        if args.chat_template is not None:  # the tokenizer's own may not be used, as texts need none
            renderer.check_date()
    return shared_settings(
        args, tokenizer=tokenizer, keys=preferences.datasets, accelerator="off", preferences=preferences
    )


def template_of(args: argparse.Namespace, vocab: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template; None if none is given and the tokenizer has none, which texts do not need.

    Raises TokenizerError if one cannot be read.
    """
    if args.chat_template is None:
        return own_chat_template(vocab, tokenizer)
    return read_chat_template(vocab, args.chat_template, tokenizer)


def check(args: argparse.Namespace) -> None:
    """Raise NeoXError if the run cannot work. `deepy.py` calls this before it starts ranks."""
    check_settings(settings_of(args))


def main() -> int:
    """Run the tool."""
    return run(parser().parse_args(), settings_of)


if __name__ == "__main__":
    run_script(main)
