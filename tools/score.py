# PYTHON_ARGCOMPLETE_OK
r"""Score texts: the log-probability of each under a language model, or answers with a reward model (`train_impl: rm`).

    python tools/score.py -d configs MODEL.yml --input sentences.jsonl --output scores.jsonl

A line of the input is `{"text": ...}` or `{"prompt": ..., "completion": ...}`. A language model adds `log_probability`
(natural logarithm), `tokens`, `bytes`, `perplexity` (per token) and `bits_per_byte` of the text, or of the completion
after the prompt, as lm-evaluation-harness does. A text that is longer than the context is scored in windows. To
`{"prompt": ..., "chosen": ..., "rejected": ...}`, whose prompt may be left out, it adds `chosen_log_probability` and
`rejected_log_probability`.

A reward model adds `score`, or `chosen_score` and `rejected_score`; it takes no `text`. Texts and messages are
tokenized as in training (tools/preprocess_preferences.py).

For pairs the accuracy is printed: the fraction in which the chosen answer has the higher score.

One number for a whole file: tools/evaluate.py --eval_tasks perplexity=FILE. Compare models with different tokenizers
by bits per byte, never by perplexities: docs/generation.md#scores-of-your-own-text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.checkpoint import find_chat_template
from neox.errors import DataError, os_errors, run_script
from neox.evaluation.text_probabilities import TextSummary, lines_with_probabilities
from neox.evaluation.text_scores import ScoreSummary, answer_encoder, scored_lines
from neox.files import atomic_write
from neox.generation.load import load_model
from neox.generation.startup import add_plan_arguments, choose_checkpoint, plan_from_arguments, start_ranks
from neox.log import setup_logging


def main() -> None:
    parser = ScriptParser(description=__doc__)
    add_plan_arguments(parser, "-o")
    parser.add_argument("--input", nargs="+", required=True, help=".jsonl or .jsonl.zst files, or directories")
    parser.add_argument("--output", required=True, help="output file: the input lines with scores")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="texts per forward pass")
    parser.add_argument("--skip-bad", type=int, default=0, metavar="N", help="number of bad lines that may be skipped")
    args = parser.parse_intermixed_args()
    setup_logging()
    plan, tokenizer = plan_from_arguments(args, takes_reward_models=True)
    grid, device, checkpoint = start_ranks(plan, lambda: choose_checkpoint(plan, tokenizer))
    batch = max(1, args.batch_size)
    summary: ScoreSummary | TextSummary
    lines: Iterator[str]
    if plan.architecture.score_head:
        keys = plan.config.tokenizer
        template = find_chat_template(keys.chat_template, checkpoint, keys.vocab_file, tokenizer)
        encoder = answer_encoder(plan.config, template)
        model = load_model(plan, checkpoint, grid, device)
        summary = ScoreSummary()
        lines = scored_lines(model, encoder, args.input, summary, batch=batch, skip_bad=args.skip_bad)
    else:
        model = load_model(plan, checkpoint, grid, device)
        summary = TextSummary()
        lines = lines_with_probabilities(model, tokenizer, args.input, summary, batch=batch, skip_bad=args.skip_bad)
    output = Path(args.output)
    with os_errors(DataError, f"{output} cannot be written"), atomic_write(output) as file:
        for line in lines:
            file.write(f"{line}\n".encode())
    print(f"{summary}; lines with scores are in {output}")


if __name__ == "__main__":
    run_script(main)
