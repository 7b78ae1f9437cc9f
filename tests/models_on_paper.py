"""Models whose paper half is compared with their modules: a row of each table of `neox.architecture` occurs in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from neox.architecture import ACTIVATIONS, NORMS
from neox.config import NeoXConfig
from neox.model import GPT, Context
from neox.objectives import build_objective, with_tokens_ahead
from neox.parallel import ParallelGrid
from neox.plan import RunPlan, resolve
from tests.masked_batches import masked_samples
from tests.plans import ENCODERS, NETWORKS, SMALL, problems_of

_DEFAULTS = {"activation": "gelu", "norm": "layernorm"}
_USED = {keys.get(key, default) for key, default in _DEFAULTS.items() for keys in NETWORKS.values()}
_EXPERTS: dict[str, Any] = {"moe_num_experts": 4, "moe_top_k": 2, "moe_ffn_hidden_size": 20}
_PROJECTIONS = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
MODELS: dict[str, dict[str, Any]] = {
    **NETWORKS,
    **ENCODERS,
    **{name: {"activation": name} for name in ACTIVATIONS if name not in _USED},
    **{name: {"norm": name} for name in NORMS if name not in _USED},
    "sinkhorn experts": {**_EXPERTS, "moe_router_type": "sinkhorn"},
    "next tokens": {"mtp_num_layers": 2},
    "adapters": {"lora": {"r": 4, "alpha": 4, "target": _PROJECTIONS}},
}
"""Model -> its keys beside `SMALL`. An activation or a norm without a network has one of its own here."""

RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"model_parallel_size": 2}),
    "tensor, divided tokens": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "gathered context": (2, {"context_parallel_size": 2, "context_parallel_kind": "all_gather"}),
    "exchanged context": (2, {"context_parallel_size": 2, "context_parallel_kind": "ulysses"}),
    "expert": (2, {"expert_model_parallel_size": 2}),
}
"""Ranks -> their number and keys."""
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "blocks": {"checkpoint_activations": True},
    "two blocks": {"checkpoint_activations": True, "checkpoint_num_layers": 2},
    "attention": {"checkpoint_activations": True, "recompute_granularity": "full_attn"},
    "scores": {"checkpoint_activations": True, "recompute_granularity": "core_attn"},
}
"""What the backward pass computes again -> its keys."""


def plan_of(model: str, ranks: str = "one", recomputed: str = "nothing", **keys: Any) -> RunPlan | None:
    """Return the plan of a model; None if these ranks cannot divide it, or it has none of what is computed again."""
    world, of_ranks = RANKS[ranks]
    flat = {**SMALL, **MODELS[model], **of_ranks, **RECOMPUTED[recomputed], **keys}
    if (ranks, recomputed) != ("one", "nothing") and problems_of(world, **flat):
        return None
    return resolved(flat, world)


def resolved(keys: dict[str, Any], world_size: int = 1) -> RunPlan:
    """Return the plan of flat keys beside `SMALL`."""
    return resolve(NeoXConfig.from_flat({**SMALL, **keys}), world_size, 100)


@contextmanager
def one_of(plan: RunPlan) -> Iterator[ParallelGrid]:
    """Be the first of a plan's ranks, whose collectives move nothing: results have their shapes, not their numbers."""
    if plan.grid.world_size == 1:
        yield ParallelGrid.single()
        return
    dist.init_process_group("fake", rank=0, world_size=plan.grid.world_size, store=FakeStore())
    try:
        yield ParallelGrid.build(plan.grid)
    finally:
        dist.destroy_process_group()


def built(plan: RunPlan, grid: ParallelGrid) -> GPT:
    """Return a model with drawn weights that trains what the plan trains."""
    model = GPT(plan, grid)
    for layer in plan.layers:
        parameters = dict(model.sequential[layer.index].named_parameters())
        for spec in layer.parameters:
            if spec.name in parameters:
                parameters[spec.name].requires_grad_(spec.trained)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def batch_of(plan: RunPlan) -> dict[str, Tensor]:
    """Return one micro batch of a rank, of random tokens."""
    if plan.architecture.bidirectional:
        return masked_samples(plan, 0)
    length = plan.config.model.seq_length
    assert length is not None
    tokens = torch.randint(0, plan.vocab_size, (plan.batch.train_micro_batch_size_per_gpu, length // plan.grid.cp_size))
    batch = {"tokens": tokens, "labels": tokens.clone(), "loss_mask": torch.ones(tokens.shape)}
    depths = plan.architecture.mtp_num_layers
    return with_tokens_ahead(batch, depths, "loss_mask") if depths else batch


def trained_loss(plan: RunPlan, model: GPT, batch: dict[str, Tensor]) -> Tensor:
    """Run the forward pass of a training step up to the loss."""
    objective = build_objective(plan)
    inputs = objective.inputs(batch)
    loss = partial(objective.scores, targets=objective.targets(batch))
    scores: Tensor = model(inputs.pop("tokens"), Context(divided=plan.grid.cp_size > 1, **inputs), loss)
    return scores[0]
