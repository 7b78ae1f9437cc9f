"""Which tensors of recomputed blocks pass through `KeptInputs`, and that gradients stay what they are."""

from dataclasses import dataclass, field, replace

import torch

from neox.parallel import KeptInputs, ParallelGrid, Topology
from tests.losses import causal_lm_loss
from tests.plans import small_plan


@dataclass(frozen=True)
class Elsewhere(KeptInputs):
    """Keeps copies, as on another device, and notes their shapes."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def pack(self, x):
        self.shapes.append(tuple(x.shape))
        return x.device, x.detach().clone()


def gradients(kept=None):
    from neox.model import GPT

    plan = small_plan(num_layers=4, checkpoint_activations=True, checkpoint_num_layers=2, hidden_dropout=0.1)
    grid = ParallelGrid.single()
    model = GPT(plan, grid)
    if kept is not None:
        (part,) = model.stage.ranges
        part.recomputation = replace(part.recomputation, kept_inputs=kept)
    torch.manual_seed(3)
    tokens = torch.arange(32).reshape(2, 16)
    causal_lm_loss(model, tokens, tokens, torch.ones(2, 16)).backward()
    return [p.grad for p in model.parameters()]


def test_only_the_inputs_of_chunks_pass_through():
    kept = Elsewhere(ParallelGrid.single(), on_cpu=True)
    for expected, found in zip(gradients(), gradients(kept), strict=True):
        assert torch.equal(expected, found)
    assert [shape for shape in kept.shapes if shape != (0,)] == [(2, 16, 32)] * 2  # torch 2.11 keeps an empty one too


def test_an_empty_tensor_is_not_divided_over_ranks():
    """torch 2.11 keeps one beside the inputs, on the CPU, where no group of GPUs gathers."""
    kept = KeptInputs(ParallelGrid(Topology(tp_size=2), rank=0), divided=True)
    empty = torch.empty(0)
    assert kept.pack(empty)[1] is empty
    assert kept.unpack(kept.pack(empty)) is empty
