"""Sparse upcycling: mixture-of-experts checkpoints whose experts are copies of a dense MLP (arXiv:2212.05055)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from neox.architecture import Architecture, ParameterSpec, build_layer_plan
from neox.checkpoint.derived.rewriting import Identity, check_degree, identity_of, rewrite
from neox.checkpoint.identity import ARGS, MODEL
from neox.checkpoint.weights.reader import CheckpointReader
from neox.config import NeoXConfig
from neox.errors import CheckpointError
from neox.plan import EXPERT_FIELDS, architecture_of, architecture_settings

NewRouter = Callable[[int, ParameterSpec], Tensor]
"""(layer index, parameter of its router) -> initial values of the parameter."""

_EXPERTS = "mlp.experts."
_ROUTER = "mlp.router."


def upcycle(
    reader: CheckpointReader,
    save: Path,
    config: NeoXConfig,
    router: NewRouter,
    *,
    changes_outputs: bool = False,
) -> Path:
    """Convert a dense checkpoint to a mixture-of-experts checkpoint, `save/global_stepN`, and commit it.

    Each expert is a copy of its block's MLP. All other weights are copied bit for bit. If the weights of a token's
    experts add up to 1, the network's outputs do not change. The result has the parallel degrees of the original, no
    optimizer states and no random states.

    Args:
        reader: The dense checkpoint, opened with its layers.
        save: Directory of checkpoints to write into.
        config: Configuration of the mixture of experts.
        router: Initial values of routers.
        changes_outputs: Whether the outputs may differ from those of the dense network.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: If the configurations do not match, the outputs would differ without `changes_outputs`, the
            original is damaged, or the result cannot be written.
    """
    dense = reader.layers
    assert dense is not None
    mixture = architecture_of(config)
    problems = list(_differences(dense.architecture, mixture))
    if not changes_outputs:
        problems += _changed_outputs(mixture)
    if problems:
        raise CheckpointError(f"{reader.path} cannot be upcycled to this network:\n  " + "\n  ".join(problems))
    layers = build_layer_plan(mixture, dense.padded_vocab_size, head_parallelism=config.model.output_layer_parallelism)
    check_degree(layers, reader.tp_size)

    def value(index: int, spec: ParameterSpec) -> Tensor:
        if spec.name.startswith(_EXPERTS):
            dense_weight = reader.full(index, f"mlp.{spec.name.removeprefix(_EXPERTS)}")
            return dense_weight.expand(spec.shape)
        if not spec.name.startswith(_ROUTER):
            return reader.full(index, spec.name)
        if not spec.trained:  # the router's load balancing bias, which is fp32 in every precision
            return torch.zeros(spec.shape)
        return router(index, spec).to(reader.full(index, "mlp.dense_h_to_4h.weight").dtype)

    tp_size = reader.tp_size
    pp_size = reader.pp_size or 1
    identity = _with_settings(identity_of(reader, tp_size, pp_size), config)
    flat = config.to_flat()
    return rewrite(reader, save, layers, value, identity=identity, tp_size=tp_size, pp_size=pp_size, config=flat)


def _differences(dense: Architecture, mixture: Architecture) -> Iterator[str]:
    """Yield the reasons why a dense network cannot be upcycled to a mixture."""
    if dense.num_experts:
        yield f"it is a mixture of {dense.num_experts} experts; give a dense checkpoint"
        return
    if not mixture.num_experts:
        yield "the configuration has no experts; set moe_num_experts"
        return
    saved = {name: value for name, value in asdict(dense).items() if name not in EXPERT_FIELDS}
    for difference in mixture.differences(saved):
        yield f"{difference.field} is {difference.saved} in the checkpoint and {difference.wanted} in the configuration"
    if mixture.expert_width != dense.mlp_width:
        yield f"its MLPs are {dense.mlp_width} wide: set moe_ffn_hidden_size: {dense.mlp_width}"
    if dense.mlp_bias:
        yield "its MLPs have biases (use_bias_in_mlp), but experts have none"
    if mixture.shared_expert_width:
        yield "there is no MLP that a shared expert could start from; remove moe_shared_expert_intermediate_size"


def _changed_outputs(mixture: Architecture) -> list[str]:
    """Return the reasons why a mixture of equal experts does not compute the same as one of them."""
    problems = []
    uses_all = mixture.router == "topk" and mixture.experts_per_token == mixture.num_experts
    if not mixture.router_normalizes and not uses_all:
        problems.append(
            "the weights of a token's experts do not add up to 1, so outputs would change: set moe_norm_topk_prob: "
            "true with moe_router_type topk or sigmoid"
        )
    if mixture.router_scale != 1.0:
        problems.append(
            f"moe_router_topk_scaling_factor: {mixture.router_scale:g} would scale the outputs of the MLPs; remove it"
        )
    if mixture.expert_capacity:
        problems.append("moe_expert_capacity_factor would drop tokens; remove it")
    return problems


def _with_settings(identity: Identity, config: NeoXConfig) -> Identity:
    """Return an identity with the settings of another network."""
    args = dict(identity[ARGS])
    model = dict(identity.get(MODEL, {}))
    for key, setting in architecture_settings(config).items():
        if key in args:
            args[key] = setting
        else:
            model[key] = setting
    return {**identity, ARGS: args, MODEL: model}
