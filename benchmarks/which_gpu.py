"""Write docs/recipes/which-gpu.md: what shipped models need on each kind of GPU, from the planner.

python benchmarks/which_gpu.py             writes the page
python benchmarks/which_gpu.py --check     status 1 if the page is another one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from neox.config import load_config
from neox.devices import GPUS
from neox.plan.report.text import PUBLISHED_MFU
from neox.preflight.gpu_choice import GpuChoice, choose_gpus
from neox.preflight.tokenizer_checks import read_vocabulary

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes" / "which-gpu.md"
MODELS = (
    "pythia/410M.yml",
    "llama/3.2-1B.yml",
    "smollm/3-3B.yml",
    "llama/3-8B.yml",
    "13B.yml",
    "20B.yml",
    "moe/olmoe-1B-7B.yml",
    "moe/qwen3-30B-A3B.yml",
)
KINDS = ("a100-40", "a100-80", "h100", "h200", "b200", "mi300x")
LORA = "lora={r: 16, alpha: 32, target: [query_key_value, dense]}"
_A100 = "{} to {} %".format(*PUBLISHED_MFU["a100"])
_H100 = "{} to {} %".format(*PUBLISHED_MFU["h100"])
_MAIN_MEMORY = ", ".join(f"{GPUS[kind].main_memory_gib:.0f} GiB ({kind})" for kind in KINDS)
_WITHOUT_FLASH = "faster with flash attention, which its file does not ask for"
TEXT = f"""# Which GPU, how many, how long

A cell is the smallest number of GPUs on which a model can be trained, and its GPU hours for a billion tokens; then
the number, up to eight times as many, that takes the fewest GPU hours, if that saves a tenth. Precision, length and
batch are those of its file in `configs/`: on any number of GPUs, a step has the samples that it has on the GPUs that
the file was made for. The files in `configs/moe/` name no number, so their batch grows with the GPUs. No GPU was asked:
memory is planned, and times are estimated for full power and fused kernels. Published runs reached {_A100} of an
A100's peak and {_H100} of an H100's ([comparison](../performance.md)); the estimates are above that.

States that do not fit may be in main memory. A GPU has its share of that of its usual host, as hosts are rented:
{_MAIN_MEMORY}.
With more (`--set host_memory_gib=N` says what each of your hosts has), fewer GPUs may do; the tool says how much
that takes.

For your model, your tokens and your prices, with the numbers of GPUs and the main memory that each needs; then how long
it takes on given numbers:

```bash
python tools/which_gpu.py configs/llama/3-8B.yml --tokens 5e9 --price 2
python tools/which_gpu.py configs/llama/3-8B.yml --gpu_type h100 --gpus 8 16 32 64
```

## How large a model

For some GPUs and some days (`--days`), a row says on how many tokens a model is trained, and how many these are for
each of its parameters, the embedding and the head included. About 20 for each give the lowest loss of a given compute
([Hoffmann et al., 2022](https://arxiv.org/abs/2203.15556)). Models that are used much are smaller and get 100 or more,
because they are cheaper to run. So take the largest model whose row has 20 or more:

```bash
for model in llama/3.2-1B granite/3.1-2B smollm/3-3B llama/3-8B; do
  python tools/which_gpu.py configs/$model.yml --gpu_type h100 --gpus 8 --days 7
done
for layers in 16 20 24 28; do
  python tools/which_gpu.py configs/llama/3-8B.yml --gpu_type h100 --gpus 8 --days 7 --set num_layers=$layers
done
```

The last column is the size that would get 20 in the same time: a token's FLOPs grow with the parameters, so the tokens
shrink with them. A loop knows only the sizes that it tries. The shipped files leap from 3 to 8 billion parameters, so
the second loop tries the larger network with fewer of its 32 layers: of 16 it has 4.5 billion.

The times are estimates, above what published runs reached. `--set expected_mfu=0.4` takes that share of the peak in
their place: choose with what you expect to reach, or measure it on your GPUs (`--suggest --measure`). The text must be
there too, because more than four passes over it help little. [A ladder](../ladder.md) predicts the loss of a model
before it is paid for. For fine-tuning it is memory that decides: the tables below, with LoRA or without.

"""
WHOLE = "## All weights"
ADAPTERS = "## LoRA of attention (`r: 16`)"
END = """
Written by `benchmarks/which_gpu.py` (`make reference`).
"""


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    page = TEXT
    page += "\n".join([WHOLE, "", *_table([]), "", ADAPTERS, "", *_table([LORA])]) + "\n" + END
    if arguments.check:
        return int(page != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    return 0


def _table(overrides: Sequence[str]) -> Iterator[str]:
    yield "| model | " + " | ".join(GPUS[kind].name for kind in KINDS) + " |"
    yield "|---" * (1 + len(KINDS)) + "|"
    for model in MODELS:
        yield row(model, overrides)


def row(model: str, overrides: Sequence[str]) -> str:
    """Return the row of a file in `configs/`, with further keys."""
    config = load_config([ROOT / "configs" / model], overrides=overrides).config
    vocab_size = read_vocabulary(config).size
    found: dict[str, list[GpuChoice]] = {kind: [] for kind in KINDS}
    for choice in choose_gpus(config, vocab_size, 1e9, KINDS):
        found[choice.gpu_type].append(choice)
    faster = any(choice.notes for choices in found.values() for choice in choices)
    name = f"`{model}` ({_WITHOUT_FLASH})" if faster else f"`{model}`"
    return f"| {name} | " + " | ".join(map(_cell, found.values())) + " |"


def _cell(choices: Sequence[GpuChoice]) -> str:
    fitting = [choice for choice in choices if choice.gpus is not None]
    return "; ".join(f"{choice.gpus}: {_hours(choice.gpu_hours)}" for choice in fitting) or "none"


def _hours(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h"


if __name__ == "__main__":
    sys.exit(main())
