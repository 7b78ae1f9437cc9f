# PYTHON_ARGCOMPLETE_OK
"""Continue prompts with a trained checkpoint.

On as many ranks as the configuration says:

    python deepy.py generate.py -d configs MODEL.yml text_generation.yml

or in one process that holds the whole model:

    python tools/generate.py -d configs MODEL.yml text_generation.yml

With --chat (or text_gen_type: chat) it keeps a conversation, for a model with a chat template.
"""

from __future__ import annotations

import os
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.errors import run_script
from neox.generation.chat_format import chat_template_for
from neox.generation.load import load_model
from neox.generation.request import check_generation, check_output, mode
from neox.generation.run import run_generation
from neox.generation.startup import (
    add_plan_arguments,
    choose_checkpoint,
    end_ranks,
    plan_from_arguments,
    start_ranks,
    use_end_ids,
)
from neox.log import setup_logging
from neox.plan import RunPlan
from neox.tokenizer import Tokenizer
from neox.tokenizer.chat import ChatRenderer


def prepare(plan: RunPlan, tokenizer: Tokenizer) -> Path:
    """Check the request before the model is loaded, and return the checkpoint."""
    check_generation(plan.config, tokenizer)
    check_output(plan.config)
    checkpoint = choose_checkpoint(plan, tokenizer)
    if mode(plan.config) == "chat":
        ChatRenderer(chat_template_for(plan.config, checkpoint, tokenizer))  # raises if there is none, or a bad one
    return checkpoint


def main() -> None:
    parser = ScriptParser(description=__doc__)
    add_plan_arguments(parser)
    parser.add_argument("-i", "--sample_input_file", help="file of prompts, one on each line, or a .jsonl")
    parser.add_argument("-o", "--sample_output_file", help="file for the completions, a JSON object on each line")
    parser.add_argument("--chat", action="store_true", help="keep a conversation (text_gen_type: chat)")
    args = parser.parse_intermixed_args()
    if args.chat:
        args.set.append("text_gen_type=chat")
    for key in ("sample_input_file", "sample_output_file"):
        if (value := getattr(args, key)) is not None:
            args.set.append(f"{key}={value}")
    setup_logging()
    plan, tokenizer = plan_from_arguments(args)
    grid, device, checkpoint = start_ranks(plan, lambda: prepare(plan, tokenizer))
    use_end_ids(plan, checkpoint, tokenizer)
    if os.isatty(0) and not os.isatty(1):
        # The launcher connects rank 0 to the terminal's input; line editing and history need its output too.
        os.dup2(os.open(os.ttyname(0), os.O_WRONLY), 1)
    model = load_model(plan, checkpoint, grid, device, recompute=plan.config.generation.recompute)
    run_generation(plan, model, tokenizer, grid, checkpoint)
    end_ranks(grid)


if __name__ == "__main__":
    run_script(main)
