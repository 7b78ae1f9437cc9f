"""gpt-neox's checkpoints of Mamba and RWKV: its names and shapes, written by hand, and what it computes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neox.checkpoint import CheckpointReader
from neox.checkpoint.gpt_neox.optimizer_state import stage_order
from neox.config import NeoXConfig
from neox.errors import CheckpointError
from neox.generation.load import load_model
from neox.parallel import ParallelGrid
from neox.plan import RunPlan, resolve
from tests.errors import raises_naming
from tests.field.gpt_neox_files import Layers, Network, write, write_tokenizer

HIDDEN, VOCAB, STATES, STEPS, INNER = 32, 128, 16, 2, 48
IDS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(5))
NETWORK = Network(hidden=HIDDEN, vocab=VOCAB)

MAMBA: dict[str, tuple[int, ...]] = {
    "norm.scale": (HIDDEN,),
    "mixer.A_log": (INNER, STATES),
    "mixer.D": (INNER,),
    "mixer.in_proj.weight": (2 * INNER, HIDDEN),
    "mixer.conv1d.weight": (INNER, 1, 4),
    "mixer.conv1d.bias": (INNER,),
    "mixer.x_proj.weight": (STEPS + 2 * STATES, INNER),
    "mixer.dt_proj.weight": (INNER, STEPS),
    "mixer.dt_proj.bias": (INNER,),
    "mixer.out_proj.weight": (HIDDEN, INNER),
}
"""Names and shapes of a block of gpt-neox's Mamba, in the order of its modules."""
RWKV: dict[str, tuple[int, ...]] = {
    **{f"{norm}.{name}": (HIDDEN,) for norm in ("ln1", "ln2") for name in ("weight", "bias")},
    **{f"att.time_maa_{name}": (1, 1, HIDDEN) for name in "xwkvrg"},
    "att.time_maa_w1": (HIDDEN, 160),
    "att.time_maa_w2": (5, 32, HIDDEN),
    "att.time_decay": (1, 1, HIDDEN),
    "att.time_decay_w1": (HIDDEN, 64),
    "att.time_decay_w2": (64, HIDDEN),
    "att.time_faaaa": (4, 8),
    **{f"att.{name}.weight": (HIDDEN, HIDDEN) for name in ("receptance", "key", "value", "output", "gate")},
    "att.ln_x.weight": (HIDDEN,),
    "att.ln_x.bias": (HIDDEN,),
    "ffn.time_maa_k": (1, 1, HIDDEN),
    "ffn.time_maa_r": (1, 1, HIDDEN),
    "ffn.key.weight": (96, HIDDEN),
    "ffn.receptance.weight": (HIDDEN, HIDDEN),
    "ffn.value.weight": (HIDDEN, 96),
}
"""The same of its RWKV. 96 is 3.5 x 32, rounded down to a multiple of 32."""
BLOCKS = {"mamba": MAMBA, "rwkv": RWKV}
UNDECAYED = {
    "mamba": {"norm.scale", "mixer.A_log", "mixer.D", "mixer.conv1d.bias", "mixer.dt_proj.bias"},
    "rwkv": {"ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias", "att.ln_x.bias"},
}
"""What gpt-neox's second optimizer group holds: biases, LayerNorm and RMSNorm, and what is marked so."""


def drawn(kind: str) -> Layers:
    """Return random files of two blocks."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    files: Layers = {0: {"word_embeddings.weight": draw(VOCAB, HIDDEN)}}
    for index in (2, 3):
        files[index] = {name: draw(*shape) for name, shape in BLOCKS[kind].items()}
    files[5] = {"norm.scale": 1 + draw(HIDDEN)}
    files[6] = {"final_linear.weight": draw(VOCAB, HIDDEN)}
    return files


def plan_of(kind: str, directory: Path) -> RunPlan:
    """The plan of gpt-neox's keys."""
    changes: dict[str, Any] = {
        "attention_config": [[[kind], "all"]],
        "pos_emb": "none",
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-5,
        "gpt_j_residual": False,
    }
    if kind == "mamba":
        changes["expansion_factor"] = INNER / HIDDEN
    config = NETWORK.config(write_tokenizer(directory / "tokenizer.json"), **changes)
    return resolve(NeoXConfig.from_flat(config), 1, 100)


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def mamba_logits(files: Layers) -> Tensor:
    """Compute what gpt-neox's Mamba does for each text, token by token in float64."""
    files = {index: {name: tensor.double() for name, tensor in tensors.items()} for index, tensors in files.items()}
    x = files[0]["word_embeddings.weight"][IDS]
    for index in (2, 3):
        p = {name.removeprefix("mixer."): tensor for name, tensor in files[index].items()}
        inner, gate = (rms(x, p["norm.scale"]) @ p["in_proj.weight"].T).chunk(2, dim=-1)
        padded = F.pad(inner, (0, 0, 3, 0))
        taps = p["conv1d.weight"].squeeze(1)
        length = x.shape[1]
        inner = F.silu(sum(padded[:, tap : tap + length] * taps[:, tap] for tap in range(4)) + p["conv1d.bias"])
        steps, b, c = (inner @ p["x_proj.weight"].T).split((STEPS, STATES, STATES), dim=-1)
        dt = F.softplus(steps @ p["dt_proj.weight"].T + p["dt_proj.bias"])
        state = torch.zeros(len(IDS), INNER, STATES, dtype=torch.float64)
        outputs = []
        for token in range(length):
            kept = torch.exp(-dt[:, token, :, None] * p["A_log"].exp())
            state = kept * state + (dt[:, token] * inner[:, token])[..., None] * b[:, token, None]
            outputs.append((state * c[:, token, None]).sum(-1) + p["D"] * inner[:, token])
        x = x + (torch.stack(outputs, dim=1) * F.silu(gate)) @ p["out_proj.weight"].T
    return rms(x, files[5]["norm.scale"]) @ files[6]["final_linear.weight"].T


@pytest.mark.parametrize("kind", BLOCKS)
def test_its_checkpoints_load_by_their_names(tmp_path: Path, kind: str) -> None:
    files = drawn(kind)
    path = write(NETWORK, [files], tmp_path)
    plan = plan_of(kind, tmp_path)
    reader = CheckpointReader(path, plan.layers)
    for index in (2, 3):
        loaded = reader.layer_shard(index, 0, 1)
        assert set(loaded) == set(BLOCKS[kind])
        for name, tensor in loaded.items():
            assert torch.equal(tensor, files[index][name]), name
    model = load_model(plan, path, ParallelGrid.single(), torch.device("cpu"))
    with torch.inference_mode():
        found = model.network.head.logits(model.hidden(IDS))
    if kind == "mamba":
        torch.testing.assert_close(found.double(), mamba_logits(files), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", BLOCKS)
def test_its_optimizer_groups_are_found_again(tmp_path: Path, kind: str) -> None:
    """gpt-neox's optimizers keep no names: which state belongs to what follows from the groups that it makes."""
    path = write(NETWORK, [drawn(kind)], tmp_path)
    decayed = [(0, "word_embeddings.weight")]
    others = []
    for index in (2, 3):
        decayed += [(index, name) for name in BLOCKS[kind] if name not in UNDECAYED[kind]]
        others += [(index, name) for name in BLOCKS[kind] if name in UNDECAYED[kind]]
    decayed.append((6, "final_linear.weight"))
    others.append((5, "norm.scale"))
    reader = CheckpointReader(path, plan_of(kind, tmp_path).layers)
    found = stage_order(path, 0, [[len(decayed), len(others)]], reader)
    assert [tuple(key) for key in found] == decayed + others


def test_several_of_its_tensor_ranks_of_mamba_are_refused(tmp_path: Path) -> None:
    """Each selects by its own channels: `x_proj` has `parallel_output=True` in its code, so nothing sums its result."""
    files = drawn("mamba")
    halves: list[Layers] = []
    for rank in range(2):
        halves.append({index: dict(tensors) for index, tensors in files.items()})
        for index in (2, 3):
            for name, tensor in files[index].items():
                dim = {"norm.scale": None, "mixer.x_proj.weight": 1, "mixer.out_proj.weight": 1}.get(name, 0)
                if dim is not None:
                    halves[rank][index][name] = tensor.chunk(2, dim)[rank].clone()
        for index, name in ((0, "word_embeddings.weight"), (6, "final_linear.weight")):
            halves[rank][index][name] = files[index][name].chunk(2)[rank].clone()
    path = write(NETWORK, halves, tmp_path)
    reader = CheckpointReader(path, plan_of("mamba", tmp_path).layers)
    with raises_naming(CheckpointError, path, "mixer.x_proj.weight", "model_parallel_size"):
        reader.layer_shard(2, 0, 1)
