# PYTHON_ARGCOMPLETE_OK
"""Show which kinds of GPU a training needs, how many of each, and how long and how expensive it is on them.

python tools/which_gpu.py configs/llama/3-8B.yml
python tools/which_gpu.py configs/llama/3-8B.yml lora.yml --tokens 5e7
python tools/which_gpu.py configs/20B.yml --tokens 4e11 --gpu_type h100 a100-80 --gpus 64 96 128 --price 2.5
python tools/which_gpu.py configs/llama/3.2-1B.yml --gpu_type h100 --gpus 8 --days 7

A row is the smallest number of GPUs on which the run fits with its batch and precision, in its fastest layout, and one
more the number that takes the fewest GPU hours, if that saves 10 %. With --gpus, each of these numbers is a row.
The batch is that of the GPUs that the files were made for, and a line says which keys decide it.
Offloaded states and weights take main memory: a GPU has its share of that of its usual host, as hosts are rented, or of
what --set host_memory_gib=N says of each of yours. Where fewer GPUs would do with more of it, a line says how much.
With --days, the tokens are those that are trained in this time, and are also shown for each parameter.
Nothing is started, and no GPU is asked: memory is planned, times are estimated for full power and fused kernels.
--set expected_mfu=0.4 takes that share of the peak in place of the estimates.
"""

from __future__ import annotations

import json

import _checkout  # noqa: F401

from neox.arguments import ScriptParser, add_overrides
from neox.config import load_config
from neox.devices import GPUS
from neox.errors import ConfigError, run_script
from neox.plan.report.text import main_memory_basis, network_basis, times_basis
from neox.preflight.gpu_choice import COUNTS, choose_gpus, describe_batch, format_choices
from neox.preflight.tokenizer_checks import read_vocabulary


def main() -> int:
    """Run the tool."""
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("conf_file", nargs="+", help="YAML files of the run")
    add("-d", "--conf_dir", help="directory that is searched first for configuration files")
    add_overrides(parser)
    add("--tokens", type=float, help="tokens to train (default: 1e9)")
    add("--days", type=float, help="days to train, instead of --tokens")
    add("--gpu_type", nargs="+", default=list(GPUS), help=f"kinds of GPU (default: all): {', '.join(GPUS)}")
    add("--gpus", nargs="+", type=int, help="numbers of GPUs, a row each (default: powers of 2 up to 512 are tried)")
    add("--price", type=float, help="price of one GPU for an hour")
    add("--json", action="store_true", help="one JSON object a line, with the keys of the fastest layout")
    args = parser.parse_args()
    if args.tokens is not None and args.days is not None:
        parser.error("--tokens and --days: each decides how long it is trained; give one of them")
    for flag, value in (("--tokens", args.tokens), ("--days", args.days)):
        if value is not None and not value > 0:
            parser.error(f"{flag} {value:g}: a number above 0")
    tokens = args.tokens or 1e9
    if args.gpus and min(args.gpus) < 1:
        parser.error(f"--gpus {min(args.gpus)}: numbers from 1")
    loaded = load_config(args.conf_file, conf_dir=args.conf_dir, overrides=args.set)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    vocab_size = read_vocabulary(loaded.config).size
    counts = COUNTS if args.gpus is None else sorted(set(args.gpus))
    every = args.gpus is not None
    kinds = args.gpu_type
    choices = choose_gpus(loaded.config, vocab_size, tokens, kinds, counts, args.price, days=args.days, every=every)
    if args.json:
        for choice in choices:
            print(json.dumps(choice.as_json()), flush=True)
        return 0
    fp8 = bool(loaded.config.training.fp8)
    amount = f"{tokens:,.0f} tokens" if args.days is None else f"{args.days:g} days"
    title = f"GPUs for {' '.join(args.conf_file)}; {amount}"
    if loaded.config.given("expected_mfu"):
        title += f"\ntimes follow from {loaded.config.describe_setting('expected_mfu')}; layouts are those of estimates"
    else:
        title += f"\ntimes are {times_basis(kinds, fp8=fp8)}"
    title += f"\n{network_basis(kinds)}"
    title += f"\n{main_memory_basis(loaded.config, kinds)}"
    title += f"\nbatch: {describe_batch(loaded.config)}"
    print(format_choices(list(choices), title, with_tokens=args.days is not None))
    return 0


if __name__ == "__main__":
    run_script(main)
