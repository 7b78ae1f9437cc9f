"""Time recurrent networks beside transformers' paths without kernels, in turn: a training pass, and generation.

    benchmarks/recurrent.py [--models mamba mamba2 bamba qwen3_5_text] [--layers 2] [--hidden 768] [--tokens 2048]
                            [--new 64] [--rounds 3] [--no-training-of mamba] [--out FILE.json]

Both sides hold the same random weights, fp32 on a CPU, with as many threads as torch chooses (OMP_NUM_THREADS). A
training pass is forward and backward over one sample; generation reads a prompt of as many tokens and makes new ones,
greedily, with a cache. Each round runs one side after the other, and then the matrix products alone that both sides
have to compute (weights and hidden states, the same number of operations on both). Shown are medians, the ratio of the
sides, and the ratio that would remain if our side computed nothing but these products: the bound of any implementation
with them. Seconds are those that the process computed, over all threads: other processes of the machine do not count.
`--memory` shows the bytes that generation keeps after prompts of 1k to 32k tokens instead: states, and keys and values
of hybrids' attention, which grow; there `gated_delta` is a network of such blocks alone, which transformers does not
have.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.machine import describe
from neox.architecture import AttentionImpl
from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert import from_hf
from neox.convert.verification import load_reference_model, single_rank_plan
from neox.model import GPT, Context
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve

VOCAB = 4096
HEAD = 64


def config_of(model_type: str, layers: int, hidden: int) -> dict[str, Any]:
    """Return the `config.json` of a model of a family, with its published proportions."""
    common = {"vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers, "pad_token_id": None}
    heads = 2 * hidden // HEAD
    if model_type == "mamba":
        return common
    if model_type == "mamba2":
        return {**common, "num_heads": heads, "head_dim": HEAD, "n_groups": 1}
    if model_type == "qwen3_5_text":
        key_heads = hidden // 128
        linear = {"linear_num_key_heads": key_heads, "linear_num_value_heads": 2 * key_heads}
        kinds = {"layer_types": [*["linear_attention"] * (layers - 1), "full_attention"]}
        attention = {"num_attention_heads": hidden // 256, "num_key_value_heads": 1, "intermediate_size": 3 * hidden}
        return {**common, **linear, **kinds, **attention, "max_position_embeddings": 65_536}
    mixers = {"mamba_n_heads": heads, "mamba_d_state": 128, "attn_layer_indices": [layers - 1]}
    attention = {"num_attention_heads": hidden // HEAD, "num_key_value_heads": hidden // HEAD // 3 or 1}
    return {**common, **mixers, **attention, "intermediate_size": 4 * hidden, "max_position_embeddings": 65_536}


def both_sides(model_type: str, layers: int, hidden: int) -> tuple[GPT, Any]:
    """Return our model and that of transformers, with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **config_of(model_type, layers, hidden))
    theirs = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(Path(directory, "hf"))
        imported = from_hf(Path(directory, "hf"), Path(directory, "neox"))
        loaded = config_from_files([imported.config_file])
        reader = CheckpointReader(imported.checkpoint, single_rank_plan(loaded, VOCAB).layers)
        # transformers takes torch's kernel of attention, and so do we: the reference model's is explicit.
        plan = single_rank_plan(loaded, VOCAB, exported=True)
        flash: AttentionImpl = "flash"
        ours = GPT(replace(plan, attention=(flash,) * layers), ParallelGrid.single(), dtype=torch.float32)
        ours.load_state_dict(load_reference_model(reader, loaded).state_dict())
        return ours, theirs


def our_pass(model: GPT, tokens: torch.Tensor) -> None:
    """Run forward and backward."""
    labels = tokens.roll(-1, 1)
    weights = torch.full(labels.shape, 1 / labels.numel())
    model.zero_grad()
    model(tokens, loss=lambda output: output.head.cross_entropy(output.hidden, labels, weights)).backward()


def their_pass(model: Any, tokens: torch.Tensor) -> None:
    """Run forward and backward."""
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()


def our_text(model: GPT, tokens: torch.Tensor, new: int) -> torch.Tensor:
    """Make new tokens. As in generation, and on the other side, the head computes the last token's logits only."""
    cache = model.new_cache(1, tokens.shape[1] + new)
    made = [tokens]
    with torch.inference_mode():
        for _ in range(new):
            hidden = model.hidden(made[-1], Context(cache=cache))
            made.append(model.logits(hidden[:, -1:]).argmax(-1))
    return torch.cat(made, 1)


def their_text(model: Any, tokens: torch.Tensor, new: int) -> torch.Tensor:
    """Make new tokens."""
    settings = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "eos_token_id": None}
    made: torch.Tensor = model.generate(tokens, pad_token_id=0, **settings)
    return made


class Products(TorchDispatchMode):
    """Notes the factors of matrix products with weights, and multiplies such factors again.

    Attributes:
        shapes: Shapes of both factors of each product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a product and let it happen."""
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            self.shapes.append((a.shape, b.shape))
        return func(*args, **(kwargs or {}))

    def replay(self, factors: dict[torch.Size, torch.Tensor]) -> None:
        """Multiply random factors of these shapes."""
        for a, b in self.shapes:
            for shape in (a, b):
                if shape not in factors:
                    factors[shape] = torch.randn(shape)
            torch.mm(factors[a], factors[b])


def timed(function: Callable[..., Any], *args: Any) -> float:
    """Return the processor's seconds of a call, of all threads together."""
    begun = time.process_time()
    function(*args)
    return time.process_time() - begun


def compare(model_type: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time both sides of one family in turn."""
    ours, theirs = both_sides(model_type, options.layers, options.hidden)
    tokens = torch.randint(0, VOCAB, (1, options.tokens), generator=torch.Generator().manual_seed(2))
    works: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
        "generation": (our_text, their_text, (tokens, options.new))
    }
    if model_type not in options.no_training_of:
        works["training"] = (our_pass, their_pass, (tokens,))
    found: dict[str, Any] = {"model": model_type, "parameters": sum(p.numel() for p in ours.parameters())}
    for name, (mine, other, args) in works.items():
        ours.train(name == "training")
        theirs.train(name == "training")
        with Products() as products:  # also warms up their side
            other(theirs, *args)
        factors: dict[torch.Size, torch.Tensor] = {}
        products.replay(factors)
        mine(ours, *args)
        rounds = []
        for _ in range(options.rounds):
            times = (timed(mine, ours, *args), timed(other, theirs, *args), timed(products.replay, factors))
            rounds.append(times)
        of_ours, of_theirs, of_products = (median(times) for times in zip(*rounds, strict=True))
        ratio, bound = of_theirs / of_ours, of_theirs / of_products
        found[name] = {"ours": of_ours, "theirs": of_theirs, "products": of_products, "ratio": ratio, "bound": bound}
        found[name]["rounds"] = rounds
        sides = f"{of_ours:8.2f} s {of_theirs:8.2f} s {ratio:6.2f} x"
        print(f"{model_type:12} {name:10} {sides}, products {of_products:6.2f} s, bound {bound:5.2f} x", flush=True)
    return found


def gated_delta_alone(options: argparse.Namespace) -> GPT:
    """Return a network of `gated_delta` blocks without attention, with random weights."""
    keys = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "attention_config": [[["gated_delta"], "all"]],
        "linear_num_key_heads": options.hidden // 128,
        "linear_num_value_heads": 2 * (options.hidden // 128),
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "pos_emb": "none",
        "max_position_embeddings": 65_536,
        "seq_length": 2048,
        "train_micro_batch_size_per_gpu": 1,
        "train_iters": 1,
    }
    model = GPT(resolve(NeoXConfig.from_flat(keys), 1, VOCAB), ParallelGrid.single(), dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def state_bytes(model_type: str, options: argparse.Namespace) -> list[dict[str, int]]:
    """Return the bytes of everything that generation keeps, after prompts of several lengths."""
    ours = (
        gated_delta_alone(options)
        if model_type == "gated_delta"
        else both_sides(model_type, options.layers, options.hidden)[0]
    )
    found = []
    for length in (1024, 4096, 16_384, 32_768):
        cache = ours.new_cache(1, length)
        with torch.inference_mode():
            for first in range(0, length, 1024):
                ours(torch.randint(0, VOCAB, (1, 1024)), Context(cache=cache))
                assert cache.length == first + 1024
        states = sum(tensor.nbytes for tensors in cache.states.values() for tensor in tensors)
        keys = sum(store.pairs.nbytes for store in cache.stores)
        found.append({"tokens": length, "states": states, "keys_and_values": keys})
        print(f"{model_type:12} {length:6} tokens {states:12,} bytes of states, {keys:12,} of keys", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mamba", "mamba2", "bamba", "qwen3_5_text"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-training-of", nargs="*", default=[], help="their backward pass of Mamba takes minutes")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    run = state_bytes if options.memory else compare
    results = {model_type: run(model_type, options) for model_type in options.models}
    if options.out is not None:
        measured = {"machine": describe(torch.device("cpu")), "results": results}
        options.out.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
