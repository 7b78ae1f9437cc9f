"""Pipeline stages: the network as a DeepSpeed `PipelineModule`, split where the run plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from neox.architecture import WORD_EMBEDDINGS
from neox.engine.deepspeed_patches import hidden_stdout
from neox.engine.shared import share_parameters
from neox.model import Block, Embedding, Head, LMHead, MaskedLMHead, build_layer, encoder_head, run_blocks
from neox.objectives import Objective
from neox.parallel import ParallelGrid
from neox.plan import RunPlan

TIE = "embedding"
BuildLayer = Callable[[int], nn.Module]


class _PlannedLayer(LayerSpec):  # type: ignore[misc]
    """Specification of a layer, which is built only on the stage that holds it."""

    def __init__(self, build: BuildLayer, index: int) -> None:
        super().__init__(nn.Module)
        self._build_layer, self._index = build, index

    def build(self, log: bool = False) -> nn.Module:
        return self._build_layer(self._index)


class _TiedLayer(TiedLayerSpec):  # type: ignore[misc]
    """Specification of a layer that uses the embedding: the embedding itself, or a head with a copy of its weight."""

    def __init__(self, build: BuildLayer, index: int, forward_fn: Callable[..., Tensor] | None = None) -> None:
        super().__init__(TIE, nn.Module, forward_fn=forward_fn, tied_weight_attr=WORD_EMBEDDINGS)
        self._build_layer, self._index = build, index

    def build(self, log: bool = False) -> nn.Module:
        layer = self._build_layer(self._index)
        if self.forward_fn is not None and isinstance(layer, Embedding):
            layer.keep_words()
        return layer


class PipelineGPT(PipelineModule):  # type: ignore[misc]
    """The stage of the network on this rank. Hidden states [B, S, H] are passed between stages.

    Samples of a bidirectional network are padded, so their lengths are passed, too.

    Initial weights equal those of the plain model.

    Args:
        plan: The run.
        grid: This rank's grid.
        objective: What the last stage computes.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Attributes:
        score_count: Number of the objective's scores.
        targets: What these need beside the hidden states, while they are to be computed.
    """

    targets: tuple[Tensor, ...] | None = None

    def __init__(
        self, plan: RunPlan, grid: ParallelGrid, objective: Objective, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._stages = plan.stages
        self._objective = objective
        build = partial(build_layer, plan, grid=grid, device=device, dtype=dtype)
        # DeepSpeed prints its topology here, and broadcasts tied weights with gradients enabled.
        with hidden_stdout(), torch.no_grad():
            super().__init__(
                layers=_specs(plan, build),
                # With a model axis even for one tensor rank: DeepSpeed then names files as NeoX does.
                topology=PipeModelDataParallelTopology(num_pp=grid.pp_size, num_mp=grid.tp_size, num_dp=grid.dp_size),
                partition_method="uniform",  # unused: see _partition_layers
            )
        self._head_index, self.score_count = plan.layers.head.index, len(objective.names)
        self._is_last = self._local_stop == self._num_layers
        if self._is_last and plan.architecture.bidirectional:  # beside the tied weight, which the list of layers holds
            self.add_module(str(self._head_index), build(self._head_index))
        self._shared = self._share_over_stages(plan, grid)
        training = plan.config.training
        self._recompute_chunk = training.checkpoint_num_layers if training.checkpoint_activations else 0

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Run this stage: tokens [B, S] or hidden states [B, S, H] -> hidden states, logits [B, S, V/tp] or scores.

        The last stage returns the objective's scores if `targets` are set. They are computed here, because DeepSpeed
        prepares for a backward pass when the gradient of this module's output arrives, and would clear gradients of the
        head that came before.

        Recomputes `checkpoint_num_layers` neighbouring blocks at a time, wherever they begin on the stage; DeepSpeed's
        own recomputation counts every layer and leaves out a chunk that holds an embedding or a norm.

        Args:
            given: What enters the stage. Of a bidirectional network a tuple: tokens and token types, or hidden states;
                and lengths.
        """
        inputs, lengths = (given[:-1], given[-1]) if isinstance(given, tuple) else ((given,), None)
        x = inputs[0]
        recompute = self._recompute_chunk if self.training and torch.is_grad_enabled() else 0
        layers = self.forward_funcs[: self._head_index - self._local_start]
        for is_blocks, neighbours in groupby(layers, lambda layer: isinstance(layer, Block)):
            if is_blocks:
                x = run_blocks(list(neighbours), x, recompute=recompute, lengths=lengths)
                continue
            for layer in neighbours:
                x = layer(x, None, *inputs[1:]) if isinstance(layer, Embedding) else layer(x)
        if not self._is_last:
            return x if lengths is None else (x, lengths)
        if self.targets is None:
            return self._head.logits(x)
        return self._objective.scores(x, self._head, self.targets)

    @property
    def _head(self) -> LMHead:
        if isinstance(head := getattr(self, str(self._head_index), None), MaskedLMHead):
            return encoder_head(self.tied_modules[TIE], head, getattr(self, str(self._head_index + 1), None))
        holder: Embedding | Head = self.tied_modules[TIE] if TIE in self.tied_modules else self.forward_funcs[-1]
        return holder.head

    def _share_over_stages(self, plan: RunPlan, grid: ParallelGrid) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Make copies of parameters that blocks share one on this stage, and one over all stages that hold blocks.

        Returns:
            Each with the group over which its gradients are summed. Initial values are equal, and stay so.
        """
        shared = share_parameters(self.weight_layers(), plan.layers)
        names = {p.name for layer in plan.layers for p in layer.parameters if p.shared_with is not None}
        if not names:
            return []
        topology = grid.topology
        holders = [
            stage.index
            for stage in plan.stages
            if any(p.name in names for layer in stage.entries(plan.layers) for p in layer.parameters)
        ]
        result = []
        for dp_rank in range(grid.dp_size):
            for tp_rank in range(grid.tp_size):
                ranks = [topology.rank_of(stage, dp_rank, tp_rank) for stage in holders]
                group = dist.new_group(ranks)
                if grid.rank in ranks:
                    result = [(parameter, group) for parameter in shared]
        for parameter in shared if grid.pp_rank != holders[0] else ():
            parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]  # DeepSpeed's mark of a copy
        return result

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the trained weights whose gradients DeepSpeed sums over stages: a tied embedding, and shared ones."""
        held = (*super().get_tied_weights_and_groups(), *self._shared)
        return [(weight, group) for weight, group in held if weight.requires_grad]

    def _partition_layers(self, method: str = "uniform") -> None:
        """Split where the plan says; DeepSpeed would derive it from class names.

        DeepSpeed's module holds one range of layers, which is all that its schedule, 1F1B, asks for.
        """
        assert all(len(stage.ranges) == 1 for stage in self._stages), self._stages
        here = self._topo.get_coord(self.global_rank).pipe
        self.parts = [0, *(stage.ranges[0].stop for stage in self._stages)]
        assert self.parts[-1] == self._num_layers, (self.parts, self._num_layers)
        self._set_bounds(start=self.parts[here], stop=self.parts[here + 1])

    def weight_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (index in the layer plan, module) of this stage's layers with weights; a tied copy has index 0."""
        if TIE in self.tied_modules:
            yield 0, self.tied_modules[TIE]
        for index in range(self._local_start, self._local_stop):
            module = getattr(self, str(index), None)
            if isinstance(module, nn.Module) and next(module.parameters(), None) is not None:
                yield index, module


def _specs(plan: RunPlan, build: BuildLayer) -> list[Any]:
    """Return one specification per layer; identity layers are functions, so that no file is written for them."""

    def spec(index: int) -> Any:
        entry = plan.layers[index]
        if entry.kind == "identity":
            return _identity
        if not plan.architecture.tie_word_embeddings or entry.kind not in ("embedding", "head", "masked_lm_head"):
            return _PlannedLayer(build, index)
        return _TiedLayer(build, 0, None if entry.kind == "embedding" else Embedding.logits)

    return [spec(entry.index) for entry in plan.layers]


def _identity(x: Tensor) -> Tensor:
    return x
