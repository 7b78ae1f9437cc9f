"""gpt-neox's networks and files in plain torch, independent of this project: what tests of its files compare with.

A network is its files: for each tensor rank a dictionary from a layer's number to its tensors, under gpt-neox's names.
`logits` computes what gpt-neox computes from them, rank by rank, each with its own copy of norms and biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Layers = dict[int, dict[str, Tensor]]
"""Tensors of one tensor rank by layer and name."""


@dataclass(frozen=True)
class Network:
    """Sizes and choices of a network.

    Attributes:
        kv_heads: Number of key heads; that of query heads without grouped queries.
        llama: RMSNorm, swiglu and no biases, instead of LayerNorm, gelu and biases.
        parallel: gpt-neox's `gpt_j_residual`.
    """

    blocks: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 4
    vocab: int = 128
    width: int = 128
    rotary: int = 2
    llama: bool = False
    parallel: bool = True
    outer_epsilon: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def rotated(self) -> int:
        """Rotated dimensions of a head."""
        return self.head_dim if self.llama else self.rotary

    def config(self, tokenizer: Path | str, **changes: Any) -> dict[str, Any]:
        """Return the YAML keys of the network."""
        keys = {
            "num_layers": self.blocks,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "seq_length": 32,
            "max_position_embeddings": 32,
            "pos_emb": "rotary",
            "rotary_pct": self.rotated / self.head_dim,
            "no_weight_tying": True,
            "gpt_j_residual": self.parallel,
            "output_layer_parallelism": "column",
            "make_vocab_size_divisible_by": 32,
            "tokenizer_type": "HFTokenizer",
            "vocab_file": str(tokenizer),
            "train_micro_batch_size_per_gpu": 1,
            "hidden_dropout": 0,
            "attention_dropout": 0,
            "train_iters": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        }
        if self.llama:
            keys |= {
                "norm": "rmsnorm",
                "rms_norm_epsilon": 1e-5,
                "activation": "swiglu",
                "mlp_width": self.width,
                "num_kv_heads": self.kv_heads,
                "use_bias_in_attn_linear": False,
                "use_bias_in_mlp": False,
            }
        return keys | changes


def random_files(network: Network, ranks: int = 1, *, drift: float = 0.0, seed: int = 0) -> list[Layers]:
    """Return seeded weights on tensor ranks, with the names of GPT-NeoX-20B's files and today's order of rows.

    Args:
        network: The network.
        ranks: Number of tensor ranks.
        drift: Largest difference between ranks' copies of replicated parameters.
        seed: Seed.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    def copies(value: Tensor, name: str) -> list[Tensor]:
        is_own = network.parallel and name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
        found = []
        for rank in range(ranks):
            shift = drift * (rank / max(1, ranks - 1) - 0.5)
            found.append(draw(*value.shape) if is_own else value + shift)
        return found

    full = _full_weights(network, draw)
    files: list[Layers] = [{index: {} for index in full} for _ in range(ranks)]
    for index, tensors in full.items():
        for name, value in tensors.items():
            parts = _divided(network, name, value, ranks) or copies(value, name)
            for rank in range(ranks):
                files[rank][index][name] = parts[rank].clone()
    return files


def _full_weights(network: Network, draw: Any) -> Layers:
    norm = "scale" if network.llama else "weight"
    rows = (network.heads + 2 * network.kv_heads) * network.head_dim
    first = 2 * network.width if network.llama else network.width
    weights: Layers = {0: {"word_embeddings.weight": draw(network.vocab, network.hidden)}}
    for block in range(network.blocks):
        tensors = {}
        for module in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{module}.{norm}"] = 1 + draw(network.hidden)
            if not network.llama:
                tensors[f"{module}.bias"] = draw(network.hidden)
        shapes = {
            "attention.query_key_value": (rows, network.hidden),
            "attention.dense": (network.hidden, network.hidden),
            "mlp.dense_h_to_4h": (first, network.hidden),
            "mlp.dense_4h_to_h": (network.hidden, network.width),
        }
        for module, shape in shapes.items():
            tensors[f"{module}.weight"] = draw(*shape)
            if not network.llama:
                tensors[f"{module}.bias"] = draw(shape[0])
        weights[2 + block] = tensors
    final = {f"norm.{norm}": 1 + draw(network.hidden)}
    if not network.llama:
        final["norm.bias"] = draw(network.hidden)
    weights[3 + network.blocks] = final
    weights[4 + network.blocks] = {"final_linear.weight": draw(network.vocab, network.hidden)}
    return weights


def _divided(network: Network, name: str, value: Tensor, ranks: int) -> list[Tensor] | None:
    """Return the ranks' parts of a split parameter; None for a replicated one."""
    if name in ("attention.dense.weight", "mlp.dense_4h_to_h.weight"):
        return list(value.chunk(ranks, dim=1))
    sections = [value.shape[0]]
    if name.startswith("attention.query_key_value") and network.kv_heads != network.heads:
        sections = [network.heads * network.head_dim, *2 * [network.kv_heads * network.head_dim]]
    elif name.startswith("mlp.dense_h_to_4h") and network.llama:
        sections = 2 * [network.width]
    elif not name.startswith(("word_emb", "final_linear", "attention.query_key_value", "mlp.dense_h_to_4h")):
        return None
    chunks = [section.chunk(ranks) for section in value.split(sections)]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def mean_files(network: Network, files: Sequence[Layers]) -> list[Layers]:
    """Return the network on one tensor rank: parts joined, biases of a parallel residual added up, copies averaged."""
    joined: Layers = {}
    for index, tensors in files[0].items():
        joined[index] = {}
        for name in tensors:
            parts = [rank[index][name] for rank in files]
            joined[index][name] = _joined(network, name, parts)
    return [joined]


def _joined(network: Network, name: str, parts: Sequence[Tensor]) -> Tensor:
    if name in ("attention.dense.weight", "mlp.dense_4h_to_h.weight"):
        return torch.cat(list(parts), dim=1)
    whole = torch.cat(list(parts))
    divided = _divided(network, name, whole, len(parts))
    if divided is None:
        is_sum = network.parallel and name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
        stacked = torch.stack(list(parts))
        return stacked.sum(0) if is_sum else stacked.mean(0)
    order = torch.cat(_divided(network, name, torch.arange(whole.shape[0]), len(parts)))
    return whole[order.argsort()]


def logits(network: Network, files: Sequence[Layers], ids: Tensor) -> Tensor:
    """Return what gpt-neox's tensor ranks compute together, in fp64: ids [B, S] -> logits [B, S, V]."""
    ranks = range(len(files))
    table = torch.cat([rank[0]["word_embeddings.weight"] for rank in files]).double()
    hidden = [F.embedding(ids, table) for _ in ranks]  # each rank's residual stream
    for block in range(network.blocks):
        tensors = [{name: value.double() for name, value in rank[2 + block].items()} for rank in files]
        first = [_norm(network, tensors[r], "input_layernorm", hidden[r]) for r in ranks]
        attended = sum(_attention(network, tensors[r], first[r]) for r in ranks)
        bias = [tensors[r].get("attention.dense.bias", torch.zeros(())) for r in ranks]
        out_bias = [tensors[r].get("mlp.dense_4h_to_h.bias", torch.zeros(())) for r in ranks]
        if network.parallel:
            second = [_norm(network, tensors[r], "post_attention_layernorm", hidden[r]) for r in ranks]
            added = attended + sum(_mlp(network, tensors[r], second[r]) for r in ranks) + sum(bias) + sum(out_bias)
            hidden = [hidden[r] + added for r in ranks]
            continue
        hidden = [hidden[r] + attended + bias[r] for r in ranks]
        second = [_norm(network, tensors[r], "post_attention_layernorm", hidden[r]) for r in ranks]
        added = sum(_mlp(network, tensors[r], second[r]) for r in ranks)
        hidden = [hidden[r] + added + out_bias[r] for r in ranks]
    parts = []
    for r in ranks:
        final = {name: value.double() for name, value in files[r][3 + network.blocks].items()}
        head = files[r][4 + network.blocks]["final_linear.weight"].double()
        parts.append(F.linear(_norm(network, final, "norm", hidden[r]), head))
    return torch.cat(parts, dim=-1)


def _norm(network: Network, tensors: Mapping[str, Tensor], module: str, x: Tensor) -> Tensor:
    if network.llama and network.outer_epsilon:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5) * tensors[f"{module}.scale"]
    if network.llama:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * tensors[f"{module}.scale"]
    return F.layer_norm(x, (network.hidden,), tensors[f"{module}.weight"], tensors[f"{module}.bias"], 1e-5)


def _attention(network: Network, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return one rank's part of the attention's output, without the bias of the output."""
    fused = F.linear(x, tensors["attention.query_key_value.weight"], tensors.get("attention.query_key_value.bias"))
    batch, length, rows = fused.shape
    share = network.heads * network.head_dim + 2 * network.kv_heads * network.head_dim
    ranks = share // rows
    heads = network.heads // ranks
    kv_heads = network.kv_heads // ranks
    if heads == kv_heads:
        q, k, v = fused.view(batch, length, heads, 3, network.head_dim).unbind(3)
    else:
        sizes = [heads * network.head_dim, *2 * [kv_heads * network.head_dim]]
        q, k, v = (part.view(batch, length, -1, network.head_dim) for part in fused.split(sizes, dim=-1))
    q = _rotated(network, q)
    k = _rotated(network, k).repeat_interleave(heads // kv_heads, dim=2)
    v = v.repeat_interleave(heads // kv_heads, dim=2)
    out = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
    return F.linear(out.transpose(1, 2).reshape(batch, length, -1), tensors["attention.dense.weight"])


def _rotated(network: Network, x: Tensor) -> Tensor:
    """Rotate halves of the first dimensions: [B, S, heads, D]."""
    count = network.rotated
    frequencies = 1.0 / (10000 ** (torch.arange(0, count, 2).double() / count))
    angles = torch.outer(torch.arange(x.shape[1]).double(), frequencies).repeat(1, 2)[:, None]
    turned, rest = x[..., :count], x[..., count:]
    half = torch.cat([-turned[..., count // 2 :], turned[..., : count // 2]], dim=-1)
    return torch.cat([turned * angles.cos() + half * angles.sin(), rest], dim=-1)


def _mlp(network: Network, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return one rank's part of the MLP's output, without the bias of the output."""
    inner = F.linear(x, tensors["mlp.dense_h_to_4h.weight"], tensors.get("mlp.dense_h_to_4h.bias"))
    if network.llama:
        value, gate = inner.chunk(2, dim=-1)
        inner = value * F.silu(gate)
    else:
        inner = F.gelu(inner)
    return F.linear(inner, tensors["mlp.dense_4h_to_h.weight"])


def rows_by_head(network: Network, fused: Tensor, ranks: int) -> Tensor:
    """Return one rank's grouped rows as gpt-neox ordered them before pull request 1315.

    Each query head is followed by its share of the key rows and of the value rows.
    """
    heads = network.heads // ranks
    q_rows = network.head_dim
    kv_rows = network.kv_heads * network.head_dim // network.heads
    q, k, v = fused.split([heads * q_rows, heads * kv_rows, heads * kv_rows])
    rest = fused.shape[1:]
    by_head = [q.reshape(heads, q_rows, *rest), k.reshape(heads, kv_rows, *rest), v.reshape(heads, kv_rows, *rest)]
    return torch.cat(by_head, dim=1).reshape(fused.shape)


def write(
    network: Network,
    files: Sequence[Layers],
    root: Path,
    *,
    step: int = 10,
    rename: Mapping[str, str] | None = None,
    client: Mapping[str, Any] | None = None,
) -> Path:
    """Write layer files and client states as gpt-neox does, and `latest`. Return the checkpoint's directory.

    Args:
        network: The network.
        files: Tensors of each tensor rank.
        root: Directory of checkpoints.
        step: Number of the checkpoint.
        rename: Beginnings of names of blocks' tensors, and those that replace them.
        client: Further entries of the client states.
    """
    directory = root / f"global_step{step}"
    directory.mkdir(parents=True)
    (root / "latest").write_text(directory.name)
    for rank, layers in enumerate(files):
        for index, tensors in layers.items():
            renamed = {}
            for name, value in tensors.items():
                beginning = next(filter(name.startswith, rename or {}), "")
                renamed[(rename or {}).get(beginning, "") + name[len(beginning) :]] = value
            torch.save(renamed, directory / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
        state = {"iteration": step, "args": arguments(network, len(files)), "module": None, "optimizer": None}
        torch.save({**state, **(client or {})}, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return directory


def arguments(network: Network, ranks: int) -> dict[str, Any]:
    """Return the settings that gpt-neox stores."""
    return {
        "num_layers": network.blocks,
        "hidden_size": network.hidden,
        "num_attention_heads": network.heads,
        "max_position_embeddings": 32,
        "make_vocab_size_divisible_by": 32,
        "padded_vocab_size": network.vocab,
        "tokenizer_type": "HFTokenizer",
        "model_parallel_size": ranks,
    }


def write_tokenizer(path: Path, size: int = 100) -> Path:
    """Write a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0}
    for number in range(1, size):
        words[f"w{number}"] = number
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path
