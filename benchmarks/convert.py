"""Export to Hugging Face: straight to safetensors, against converting through the model, in turn, in one run.

    benchmarks/convert.py [--megabytes 800] [--tensor-ranks 2] [--repeats 3] [--work DIR]

Writes a synthetic fp32 checkpoint of that size, then exports it both ways, each in a process of its own so that peak
memory is its own. "Through the model" is the usual converter: build `transformers`' model, fill its state dict from
the layer files, `save_pretrained`. Prints seconds, CPU seconds and peak memory of each, and the ratio.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, LAYERS_OF_100MB, VOCAB, HEADS = 1024, 2, 50432, 16
BASELINE_MB = 250  # of a process with torch in it, allowed beside 1.3 x the largest tensor


def config_keys(num_layers: int) -> dict[str, object]:
    return {
        "num_layers": num_layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "seq_length": 2048,
        "pos_emb": "rotary",
        "rotary_pct": 0.25,
        "no_weight_tying": True,
        "gpt_j_residual": True,
        "output_layer_parallelism": "column",
    }


def make_checkpoint(directory: Path, megabytes: int, tp_size: int) -> tuple[dict[str, object], int]:
    """Write layer files with seeded weights of about that size; return the config's keys and the bytes."""
    import torch

    from neox.checkpoint import write_client_state, write_full_layer
    from neox.config import NeoXConfig
    from neox.convert.verification import single_rank_plan

    per_block = 4 * 12 * HIDDEN * HIDDEN
    num_layers = max(1, (megabytes * 10**6 - 8 * VOCAB * HIDDEN) // per_block)
    keys = config_keys(num_layers)
    layers = single_rank_plan(NeoXConfig.from_flat(keys), VOCAB).layers
    directory.mkdir(parents=True)
    for layer in layers.weight_layers:
        generator = torch.Generator().manual_seed(layer.index)
        state = {p.name: torch.randn(p.shape, generator=generator) * 0.02 for p in layer.parameters}
        write_full_layer(directory, layer, state, tp_size)
    for rank in range(tp_size):
        write_client_state(directory, rank, {"iteration": 1})
    return keys, 4 * layers.numel


def straight(checkpoint: Path, keys: dict[str, object], output: Path) -> None:
    """Ours."""
    from neox.config import NeoXConfig
    from neox.convert import to_hf

    to_hf(checkpoint, NeoXConfig.from_flat(keys), output, verify=False)


def through_the_model(checkpoint: Path, keys: dict[str, object], output: Path) -> None:
    """The usual way: the whole model in memory, then its own `save_pretrained`."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    count = int(str(keys["num_layers"]))
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=count,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        rotary_pct=0.25,
        max_position_embeddings=2048,
    )
    model = GPTNeoXForCausalLM(config)

    def ranks(index: int) -> list[dict[str, torch.Tensor]]:
        files = sorted(checkpoint.glob(f"layer_{index:02d}-*"))
        return [torch.load(file, weights_only=True) for file in files]

    states = ranks(0)
    model.gpt_neox.embed_in.load_state_dict({"weight": torch.cat([s["word_embeddings.weight"] for s in states])})
    for i, block in enumerate(model.gpt_neox.layers):
        states, full = ranks(i + 2), {}
        for name in states[0]:
            parts = [s[name] for s in states]
            if name in ("attention.dense.weight", "mlp.dense_4h_to_h.weight"):
                full[name] = torch.cat(parts, 1)
            elif "query_key_value" in name or "h_to_4h" in name:
                full[name] = torch.cat(parts)
            else:
                full[name] = torch.stack(parts).sum(0) if "dense" in name else parts[0]
        block.load_state_dict(full, strict=False)
    states = ranks(count + 3)
    model.gpt_neox.final_layer_norm.load_state_dict({k.removeprefix("norm."): v for k, v in states[0].items()})
    states = ranks(count + 4)
    model.lm_head.load_state_dict({"weight": torch.cat([s["final_linear.weight"] for s in states])})
    model.save_pretrained(output)


WAYS = {"straight": straight, "through the model": through_the_model}


def measure(way: str, checkpoint: Path, keys: dict[str, object], output: Path) -> dict[str, float]:
    """Run one way in a process of its own; seconds and CPU seconds of the conversion, peak MB of the process."""
    shutil.rmtree(output, ignore_errors=True)
    order = json.dumps([way, str(checkpoint), keys, str(output)])
    done = subprocess.run(
        [sys.executable, __file__, "--one", order], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(order: str) -> None:
    way, checkpoint, keys, output = json.loads(order)
    import torch  # noqa: F401  the imports are not what is measured

    import neox.convert  # noqa: F401

    if way != "straight":
        import transformers.models.gpt_neox.modeling_gpt_neox  # noqa: F401
    os.sync()  # earlier files still on their way to the disk would slow this down
    start, cpu = time.perf_counter(), time.process_time()
    WAYS[way](Path(checkpoint), keys, Path(output))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    peak = peak_megabytes()
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak}))


def peak_megabytes() -> float:
    """Peak memory of this process; `ru_maxrss` would start at the parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1000


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two exports hold the same tensors, whatever their files."""

    def digest(directory: Path) -> dict[str, str]:
        from safetensors import safe_open

        found = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(str(file), "np") as opened:
                for key in opened.keys():  # noqa: SIM118
                    found[key] = hashlib.sha256(opened.get_tensor(key).tobytes()).hexdigest()
        return found

    return digest(first) == digest(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--tensor-ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="directory for the files (a temporary one)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        checkpoint = Path(work) / "global_step1"
        keys, size = make_checkpoint(checkpoint, args.megabytes, args.tensor_ranks)
        limit = BASELINE_MB + 1.3 * 4 * VOCAB * HIDDEN / 1e6
        largest = 4 * VOCAB * HIDDEN / 1e6
        print(f"{size / 1e6:.0f} MB fp32, {args.tensor_ranks} tensor ranks; largest tensor {largest:.0f} MB")
        results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.repeats):
            for way, found in results.items():
                found.append(measure(way, checkpoint, keys, Path(work) / way.replace(" ", "_")))
        for way, found in results.items():
            best = min(found, key=lambda r: r["seconds"])
            print(f"{way:18s} {best['seconds']:6.2f} s  {best['cpu_seconds']:6.2f} s CPU  {best['peak_mb']:6.0f} MB")
        ours, theirs = (min(r["seconds"] for r in results[way]) for way in WAYS)
        peak = max(r["peak_mb"] for r in results["straight"])
        print(f"ratio {theirs / ours:.1f} in time; peak {peak:.0f} MB of {limit:.0f} MB allowed")
        print(f"same tensors: {same_tensors(Path(work) / 'straight', Path(work) / 'through_the_model')}")


if __name__ == "__main__":
    main()
