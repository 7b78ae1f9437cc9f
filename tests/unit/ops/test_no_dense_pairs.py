"""No tensor has all pairs of 4,096 tokens: in a network on a CPU, and in the graphs that GPUs compile."""

from __future__ import annotations

import math
import re
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as torchs_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neox.model import GPT, Context
from neox.objectives import CausalLM
from neox.ops import VisiblePairs, block_mask_of, core_attention, window_rule
from neox.ops.flex import block_mask_by, compiled_block_mask
from neox.parallel import ParallelGrid
from tests.plans import small_plan

LENGTH = 4096
WIDTH = 512
CPU = torch.device("cpu")
STARTS = torch.arange(LENGTH).unsqueeze(0) // WIDTH * WIDTH
PAIRS = {
    "window": VisiblePairs(LENGTH, CPU, rule=window_rule(WIDTH), reach=WIDTH),
    "documents": VisiblePairs(LENGTH, CPU, STARTS),
    "window in documents": VisiblePairs(LENGTH, CPU, STARTS, window_rule(40), 40),
}


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def elements_of_a_step(**keys: Any) -> int:
    """Return the most elements of a tensor in a forward and backward pass of one sample."""
    length = {"seq_length": LENGTH, "max_position_embeddings": LENGTH}
    plan = small_plan(1, **length, num_attention_heads=1, num_layers=1, **keys)
    model = GPT(plan, ParallelGrid.single())
    tokens = torch.arange(LENGTH).unsqueeze(0) % 8
    context = Context(document_starts=STARTS if plan.config.data.reset_attention_mask else None)
    loss = partial(CausalLM().scores, targets=(tokens, torch.full(tokens.shape, 1 / LENGTH)))
    with Largest() as largest:
        model(tokens, context, loss)[0].backward()
    return largest.elements


@pytest.mark.parametrize(
    "keys",
    [
        {"attention_config": ["flash"], "sliding_window_width": WIDTH},
        {"attention_config": ["flash"], "reset_attention_mask": True},
        {"attention_config": ["flash"], "sliding_window_width": WIDTH, "reset_attention_mask": True},
    ],
)
def test_no_tensor_of_a_step_has_all_pairs(keys: dict[str, Any]) -> None:
    assert elements_of_a_step(**keys) < LENGTH * LENGTH


def test_a_kernel_with_a_mask_of_all_pairs_is_noticed() -> None:
    assert elements_of_a_step(attention_config=["global"], reset_attention_mask=True) >= LENGTH * LENGTH


@pytest.mark.parametrize(
    "name",
    [
        "window in documents",
        pytest.param("window", marks=pytest.mark.slow),
        pytest.param("documents", marks=pytest.mark.slow),
    ],
)
def test_no_tensor_of_the_graph_for_gpus_has_all_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of both passes that torch.compile gets. Only torch's check of the device is left out."""
    monkeypatch.setattr(torchs_module, "_validate_device", lambda *tensors: None)
    mask = block_mask_of(PAIRS[name])
    leaves = [torch.empty(1, LENGTH, heads, 16, requires_grad=True) for heads in (4, 2, 2)]

    def both_passes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = core_attention(q, k, v, impl="flash", pairs=PAIRS[name], block_mask=mask)
        return torch.autograd.grad(out.sum(), (q, k, v))

    graph = make_fx(both_passes, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves).graph
    assert {"flex_attention", "flex_attention_backward"} <= {str(node.target) for node in graph.nodes}
    made = [
        tensor for node in graph.nodes for tensor in tree_leaves(node.meta.get("val")) if isinstance(tensor, Tensor)
    ]
    assert max(tensor.numel() for tensor in made) < LENGTH * LENGTH


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", PAIRS)
def test_compiled_masks_by_block_fill_no_buffer_of_all_pairs(name: str) -> None:
    mask, code = run_and_get_code(block_mask_by, compiled_block_mask(), PAIRS[name])
    assert mask.shape[-2:] == (LENGTH, LENGTH)
    buffers = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", "\n".join(code))
    assert buffers
    assert max(math.prod(int(size) for size in sizes.split(",") if size.strip()) for sizes in buffers) < LENGTH * LENGTH
