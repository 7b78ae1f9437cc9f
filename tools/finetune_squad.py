# PYTHON_ARGCOMPLETE_OK
"""Fine-tune an exported BERT to answer questions in SQuAD's format, and score it by the official rules.

    python tools/finetune_squad.py --model bert-hf --train train-v1.1.json --dev dev-v1.1.json --output squad

Files of SQuAD 2.0 work too: questions without answers train the empty answer.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import _checkout  # noqa: F401
import numpy as np
from finetune_classifier import LOADING, add_training, check_training, fine_tune, load_tokenizer, rows_of, save

from neox.arguments import ScriptParser
from neox.errors import ConfigError, run_script
from neox.evaluation.squad import Question, Window, best_answers, read_squad, score, span_of
from neox.files import write_text
from neox.log import setup_logging


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = ScriptParser(description=__doc__)
    add_training(p)
    p.add_argument(
        "--stride", type=int, default=128, help="tokens that neighbouring windows of a text share (default: 128)"
    )
    p.add_argument("--longest-answer", type=int, default=30, help="most tokens of an answer (default: 30)")
    return p


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    check_training(args)
    train = read_squad(args.train)
    dev = read_squad(args.dev)
    from transformers import AutoModelForQuestionAnswering, default_data_collator, set_seed

    tokenizer = load_tokenizer(args)
    if not 0 <= args.stride < tokenizer.model_max_length // 2:
        raise ConfigError(f"--stride {args.stride}: give less than half of {tokenizer.model_max_length} tokens")
    set_seed(args.seed)
    model = AutoModelForQuestionAnswering.from_pretrained(args.model, **LOADING)
    inputs, windows = encode(dev, tokenizer, args.stride)
    examples, training_windows = encode(train, tokenizer, args.stride)
    add_positions(train, examples, training_windows)
    starts, ends = fine_tune(args, model, examples, inputs, default_data_collator)[:2]
    empty = not all(question.answers for question in (*train, *dev))
    answers = best_answers(dev, windows, starts, ends, longest=args.longest_answer, may_be_empty=empty)
    save(args, model, tokenizer, score(dev, answers))
    write_text(args.output / "predictions.json", json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    return 0


def encode(questions: list[Question], tokenizer: Any, stride: int) -> tuple[list[dict[str, Any]], list[Window]]:
    """Return the model's inputs for the windows of all texts, and the windows."""
    fields = tokenizer(
        [question.question.lstrip() for question in questions],
        [question.context for question in questions],
        truncation="only_second",
        stride=stride,
        padding="max_length",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = fields.pop("overflow_to_sample_mapping")
    offsets = fields.pop("offset_mapping")
    windows = []
    for i, (owner, places) in enumerate(zip(owners, offsets, strict=True)):
        inside = np.array([sequence == 1 for sequence in fields.sequence_ids(i)])
        windows.append(Window(owner, np.where(inside[:, None], np.array(places), -1)))
    return rows_of(fields), windows


def add_positions(questions: list[Question], inputs: list[dict[str, Any]], windows: list[Window]) -> None:
    """Add the place of the first answer's first and last token to each input; 0 if the window lacks the answer."""
    for example, window in zip(inputs, windows, strict=True):
        question = questions[window.question]
        span = None
        if question.answers:
            start = question.starts[0]
            span = span_of(window, start, start + len(question.answers[0]))
        first, last = span or (0, 0)
        example["start_positions"] = first
        example["end_positions"] = last


if __name__ == "__main__":
    run_script(main)
