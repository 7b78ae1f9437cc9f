# PYTHON_ARGCOMPLETE_OK
r"""Compute a teacher's largest logits for the samples of a distillation run (`teacher_logits`).

    python tools/teacher_logits.py teacher/config.yml --run student/config.yml configs/preferences/distillation.yml \
        --output data/teacher

The YAML files before --run are the teacher's, as for tools/evaluate.py. Those after it are the run's; its data, seed,
seq_length and number of samples determine the samples. The result takes 8 bytes per token and logit. Teacher and run
must have the same tokenizer.
"""

from __future__ import annotations

from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.checkpoint import hash_of_weights
from neox.data.teacher_file import TeacherIdentity
from neox.errors import ConfigError, run_script
from neox.generation.load import load_model
from neox.generation.startup import add_plan_arguments, choose_checkpoint, plan_from_arguments, start_ranks
from neox.generation.teacher import write_teacher_logits
from neox.log import setup_logging
from neox.plan import config_from_files, resolve
from neox.tokenizer import tokenizer_of


def main() -> None:
    parser = ScriptParser(description=__doc__)
    add_plan_arguments(parser, "-o")
    parser.add_argument("--run", nargs="+", required=True, metavar="FILE", help="YAML files of the run")
    parser.add_argument(
        "--run-set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run (repeatable)"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="number of ranks of the run")
    parser.add_argument("--output", required=True, help="directory for the logits: `teacher_logits` of the run")
    parser.add_argument("--top-k", type=int, metavar="K", help="logits per token (default: distillation_top_k)")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="samples per forward pass")
    args = parser.parse_intermixed_args()
    setup_logging()
    plan, tokenizer = plan_from_arguments(args)
    config = config_from_files(args.run, overrides=args.run_set).updated({}, without=["teacher_logits"])
    run_tokenizer = tokenizer_of(config)
    if set(run_tokenizer.known_hashes).isdisjoint(tokenizer.known_hashes):
        raise ConfigError(
            f"the teacher's tokenizer ({tokenizer.vocab_size:,} tokens) is not the run's ({run_tokenizer.vocab_size:,} "
            "tokens): use a teacher with the run's tokenizer"
        )
    top_k = config.distillation.distillation_top_k
    if args.top_k is not None:
        top_k = args.top_k
    if not 1 <= top_k <= tokenizer.vocab_size:
        raise ConfigError(
            f"--top-k or distillation_top_k: {top_k} is not between 1 and the {tokenizer.vocab_size:,} ids of the "
            "tokenizer"
        )
    run = resolve(config, args.ranks, run_tokenizer.vocab_size)
    grid, device, checkpoint = start_ranks(plan, lambda: choose_checkpoint(plan, tokenizer))
    teacher = load_model(plan, checkpoint, grid, device)
    weights = f"{plan.config.checkpoint.load_weights} weights {hash_of_weights(checkpoint)}"
    identity = TeacherIdentity(weights, tokenizer.vocab_size, tokenizer.known_hashes, top_k)
    output = Path(args.output)
    samples = write_teacher_logits(run, run_tokenizer, teacher, identity, output, batch=max(1, args.batch_size))
    print(f"the {top_k} largest logits of {samples:,} samples by {checkpoint} are in {output}")


if __name__ == "__main__":
    run_script(main)
