"""Generation speed beside transformers and beside the memory-bandwidth bound, in turn, in one run.

python benchmarks/generate.py --threads 2
python benchmarks/generate.py --dtype bf16 --layers 24 --hidden 2048 --heads 16 --vocab 50304    # on a GPU

Both sides run the same random weights, greedily, with a KV cache, from the same prompts. A round is one generation of
each and one probe of the memory; medians over rounds count, so that other work on the machine slows all three. Every
step reads every weight but the embedding's, and the cache: bandwidth / those bytes is the most steps a second that
memory allows. The probe is the better of a sum and a matrix-vector product over half a gigabyte: the most that
these threads were seen to read. "of it" compares that with the median of our steps behind the first token, sampling and
all; the other figures include the first token, for both sides. "best" takes each side's least disturbed round (and
tenth of the steps): what the machine would give alone.
Weights that fit into a cache can be read faster than the memory's bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from neox.checkpoint import write_client_state, write_full_layer
from neox.config import NeoXConfig
from neox.convert import to_hf
from neox.generation.decoding import decode
from neox.generation.load import load_model
from neox.generation.request import SamplingParams
from neox.model import build_layer
from neox.parallel import ParallelGrid
from neox.plan import RunPlan, resolve
from neox.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NoText(Tokenizer):
    """Ids only: both sides are timed without a tokenizer."""

    name = "no text"
    vocab_size = 1
    eod = 0

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def _content(self) -> None:
        return None


def make_plan(args: argparse.Namespace) -> RunPlan:
    """Return the plan of the model to be timed."""
    flat = {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.heads,
        "seq_length": args.context,
        "pos_emb": "rotary",
        "rotary_pct": 0.25,
        "no_weight_tying": True,
        "gpt_j_residual": True,
        "output_layer_parallelism": "column",
        "bias_gelu_fusion": True,
        "cuda_graphs": not args.one_by_one,
        "precision": args.dtype,
        "train_micro_batch_size_per_gpu": 1,
    }
    return resolve(NeoXConfig.from_flat(flat), 1, args.vocab)


def write_model(plan: RunPlan, directory: Path) -> tuple[Path, Path]:
    """Write initial weights as a checkpoint and as its export; return both directories."""
    checkpoint = directory / "global_step0"
    checkpoint.mkdir()
    for layer in plan.layers.weight_layers:
        module = build_layer(plan, layer.index, ParallelGrid.single(), dtype=DTYPES[plan.precision])
        write_full_layer(checkpoint, layer, dict(module.named_parameters()), 1)
    write_client_state(checkpoint, 0, {"iteration": 0})
    to_hf(checkpoint, plan.config, directory / "hf", verify=False)
    return checkpoint, directory / "hf"


class Stopwatch:
    """Seconds of a piece of work: by the clock, or of the CPU (which other work on the machine does not lengthen)."""

    def __init__(self, device: torch.device, cpu_seconds: bool) -> None:
        self.device = device
        self.clock = time.process_time if cpu_seconds else time.perf_counter

    def __call__(self, work: Callable[[], object]) -> float:
        self._finish()
        started = self.clock()
        work()
        self._finish()
        return self.clock() - started

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Probe:
    """Bytes per second that can be read from memory now."""

    def __init__(self, device: torch.device, timed: Stopwatch) -> None:
        self.timed = timed
        self.rows = torch.ones(2048, 2**16, device=device)  # 512 MB
        self.vector = torch.ones(2**16, device=device)

    def __call__(self) -> float:
        works = (self.rows.sum, lambda: torch.mv(self.rows, self.vector))
        repeats = 20 if self.rows.is_cuda else 1  # a GPU reads this in the time of a few starts of kernels
        return (
            repeats * self.rows.numel() * 4 / min(self.timed(lambda w=w: [w() for _ in range(repeats)]) for w in works)
        )


def bytes_per_step(plan: RunPlan, batch: int, length: float) -> float:
    """Return what one step must read: every weight but the embedding's, and the cache of `length` tokens on average."""
    size = DTYPES[plan.precision].itemsize
    weights = plan.layers.numel - plan.layers.padded_vocab_size * plan.layers.architecture.hidden_size
    cache = 2 * plan.layers.architecture.num_layers * plan.layers.architecture.hidden_size * batch * length
    return size * (weights + cache)


@dataclass
class Measured:
    """Seconds of whole generations and of our steps, and bytes a second that the memory gave beside them."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)

    def row(self, batch: int, new: int, step_bytes: float) -> dict[str, float]:
        """Return tokens a second of both sides and of the memory's bound, and what they make of each other."""
        mine, other = (batch * new / statistics.median(side) for side in (self.ours, self.theirs))
        bound = statistics.median(self.bandwidths) / step_bytes
        undisturbed = sorted(self.steps)[len(self.steps) // 20]  # the middle of the quickest tenth
        return {
            "ours": mine,
            "transformers": other,
            "bound": batch * bound,
            "ratio": mine / other,
            "of_bound": 1 / statistics.median(self.steps) / bound,
            "best_ratio": min(self.theirs) / min(self.ours),
            "best_of_bound": step_bytes / undisturbed / max(self.bandwidths),
        }


def compare(args: argparse.Namespace, plan: RunPlan, device: torch.device, directory: Path) -> list[dict[str, float]]:
    """Time both sides in turn for each batch size."""
    from transformers import AutoModelForCausalLM

    checkpoint, hf = write_model(plan, directory)
    ours = load_model(plan, checkpoint, ParallelGrid.single(), device)
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=DTYPES[plan.precision]).to(device).eval()
    params = SamplingParams(max_new_tokens=args.new, min_new_tokens=args.new)
    timed = Stopwatch(device, args.cpu_seconds)
    probe = Probe(device, timed)
    probe()
    rows = []
    stamps: list[float] = []  # after each of our steps
    for batch in args.batch:
        prompts = torch.randint(1, args.vocab, (batch, args.prompt), generator=torch.Generator().manual_seed(0))
        inputs = prompts.to(device)

        def stamp() -> bool:
            stamps.append(timed.clock())
            return False

        def our_side(prompts: Tensor = prompts) -> list[list[int]]:
            return [row.tokens for row in decode(ours, prompts.tolist(), params, NoText(), should_stop=stamp)]

        def their_side(inputs: Tensor = inputs) -> list[list[int]]:
            new = {"max_new_tokens": args.new, "min_new_tokens": args.new, "do_sample": False, "pad_token_id": 0}
            out = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), **new)
            return out[:, args.prompt :].tolist()

        same = our_side() == their_side()  # also the warm-up

        measured = Measured()
        for _ in range(args.rounds):
            stamps.clear()
            measured.ours.append(timed(our_side))
            measured.steps += [after - before for before, after in pairwise(stamps)]
            measured.theirs.append(timed(their_side))
            measured.bandwidths.append(probe())
        step_bytes = bytes_per_step(plan, batch, args.prompt + args.new / 2)
        rows.append({"batch": batch, **measured.row(batch, args.new, step_bytes), "same_tokens": same})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=20_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=32, help="tokens in each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--one-by-one", action="store_true", help="without CUDA graphs, on a GPU")
    parser.add_argument("--threads", type=int, help="torch threads on a CPU")
    parser.add_argument("--cpu-seconds", action="store_true", help="time the CPU's seconds; with --threads 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    args = parser.parse_args()
    if args.cpu_seconds and args.threads != 1:
        parser.error("--cpu-seconds adds up the seconds of all threads: give --threads 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = make_plan(args)
    with tempfile.TemporaryDirectory() as directory:
        rows = compare(args, plan, device, Path(directory))
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if args.json:
        for row in rows:
            print(json.dumps({"parameters": plan.layers.numel, "dtype": args.dtype, "device": where, **row}))
        return
    print(f"{plan.layers.numel / 1e6:.1f} M parameters, {args.dtype}, {where}, torch {torch.__version__}")
    print(f"prompts of {args.prompt} tokens, {args.new} new; tokens/s, medians of {args.rounds} rounds in turn")
    for row in rows:
        same = "yes" if row["same_tokens"] else "NO"
        print(
            f"batch {row['batch']:>2}  ours {row['ours']:8.1f}  transformers {row['transformers']:8.1f}"
            f"  ratio {row['ratio']:.2f}  bound {row['bound']:8.1f}  of it {row['of_bound']:.2f}"
            f"  best: ratio {row['best_ratio']:.2f}, of bound {row['best_of_bound']:.2f}  same tokens: {same}"
        )


if __name__ == "__main__":
    main()
