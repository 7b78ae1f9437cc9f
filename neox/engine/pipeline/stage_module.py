"""Pipeline stages: the network as a DeepSpeed `PipelineModule`, split where the run plan says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from neox.architecture import WORD_EMBEDDINGS
from neox.engine.deepspeed_patches import hidden_stdout
from neox.engine.pipeline.instructions import PassOrder
from neox.model import (
    Aux,
    Context,
    Embedding,
    Handoff,
    NetworkOutput,
    Stage,
    add_aux,
    attach_losses,
    build_layer,
    forward_over_stages,
    share_parameters,
)
from neox.objectives import Objective, ScoreTable, evaluated_objective
from neox.parallel import ParallelGrid
from neox.plan import RunPlan

TIE = "embedding"
EMBEDDING_INDEX = 0
BuildLayer = Callable[[int], nn.Module]
"""Index of a layer in the layer plan -> its module."""


class _PlannedLayer(LayerSpec):  # type: ignore[misc]
    """Specification of a layer, which is built only on the stage that holds it."""

    def __init__(self, build: BuildLayer, index: int) -> None:
        super().__init__(nn.Module)  # DeepSpeed wants a class here; `build` below replaces what it would do with it
        self._build_layer = build
        self._index = index

    def build(self, log: bool = False) -> nn.Module:
        return self._build_layer(self._index)


class _TiedLayer(TiedLayerSpec):  # type: ignore[misc]
    """Specification of the embedding, or of a layer that uses it: a tied head, or multi-token prediction.

    A stage that holds only the latter builds an embedding too, and drops all but the words' table.

    Args:
        build: Builds a layer.
        is_head: Whether this is a layer that uses the embedding.
    """

    def __init__(self, build: BuildLayer, *, is_head: bool) -> None:
        forward = Embedding.logits if is_head else None
        super().__init__(TIE, nn.Module, forward_fn=forward, tied_weight_attr=WORD_EMBEDDINGS)
        self._build_layer = build
        self._is_head = is_head

    def build(self, log: bool = False) -> nn.Module:
        layer = self._build_layer(EMBEDDING_INDEX)
        if self._is_head and isinstance(layer, Embedding):
            layer.keep_words()
        return layer


class PipelineGPT(PipelineModule):  # type: ignore[misc]
    """The stage of the network on this rank, as DeepSpeed's pipeline engine runs it.

    Initial weights equal those of the plain model.

    Args:
        plan: The run.
        grid: This rank's grid.
        objective: What the last stage computes.
        device: Device of the parameters.
        dtype: Type of the parameters.
        loaded: Layers whose weights are read from a checkpoint next, as of `build_layer`.

    Attributes:
        stage: The layers of this rank.
        active_range: Number of the range of layers that `forward` runs.
        loss_stage: Stage that holds the last layer, and computes the loss.
        pp_ranks: Rank of each stage, with this rank's data and tensor coordinates.
        sharers: Group of the tensor ranks if hidden states are replicated in it; otherwise None.
        overlaps_reduction: Whether a range's gradients are reduced while other ranges run.
        grid: This rank's grid.
        targets: What the objective compares the network's output of the next micro batch with; on the loss stage.
        loss_factor: DeepSpeed multiplies the objective's loss by this before its backward pass.
    """

    active_range = 0
    targets: tuple[Tensor, ...] | None = None
    loss_factor = 1.0

    def __init__(
        self,
        plan: RunPlan,
        grid: ParallelGrid,
        objective: Objective,
        *,
        device: torch.device,
        dtype: torch.dtype,
        loaded: Collection[int] = (),
    ) -> None:
        self._stages = plan.stages
        self._schedule = plan.config.parallelism.pipeline_schedule
        self._orders: dict[tuple[int, bool], PassOrder] = {}
        self._objective = objective
        build = partial(build_layer, plan, grid=grid, device=device, dtype=dtype, loaded=loaded)
        # This constructor calls `_partition_layers` below and builds this stage's layers.
        # DeepSpeed prints its topology here, and broadcasts tied weights with gradients enabled.
        with hidden_stdout(), torch.no_grad():
            super().__init__(
                layers=_specs(plan, build),
                # There is a model axis even for one tensor rank, so that DeepSpeed names files as NeoX does.
                topology=PipeModelDataParallelTopology(num_pp=grid.pp_size, num_mp=grid.tp_size, num_dp=grid.dp_size),
                partition_method="uniform",  # unused: see _partition_layers
            )
        self.grid = grid
        self.loss_stage = self.stage_owner(len(plan.layers) - 1)
        self.pp_ranks = [grid.topology.rank_of(stage, grid.dp_rank, grid.tp_rank) for stage in range(grid.pp_size)]
        self.sharers = None if grid.tp_size == 1 or grid.topology.sequence_parallel else grid.tp_group
        overlap_comm = plan.config.deepspeed.zero_optimization.overlap_comm  # None: on, as by default
        self.overlaps_reduction = overlap_comm is not False and len(self._held.ranges) > 1 and grid.dp_size > 1
        self._dtype = dtype
        self._divides_samples = grid.cp_size > 1
        self._handoff = Handoff.of(plan.architecture, lengths=plan.marks_padding, documents=plan.keeps_documents_apart)
        for index in self._held.layers:
            entry = plan.layers[index]
            if entry.tied_to is not None and entry.parameters:
                # It has parameters of its own next to the tied weight, which is all that DeepSpeed's list holds.
                self.add_module(str(index), build(index))
        self._shared = self._share_over_stages(plan, grid)
        self.stage = Stage(plan, grid, self._layers(), self._held.ranges)

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Run the active range of layers of this stage.

        Args:
            given: What the range takes: an objective's inputs if it is the first one, else a packed `Handoff`.

        Returns:
            A packed `Handoff`; after the last range the objective's packed scores. DeepSpeed clears gradients when the
            gradient of this module's output arrives. If the loss were computed outside, the head's gradients would
            exist by then and be lost.
        """
        previous_aux: Aux = {}
        layers = self.stage.ranges[self.active_range]
        if layers.is_first:
            x, context = self._handoff.unpack_batch(given)
        else:
            x, context, previous_aux = self._handoff.unpack(given)
        context = replace(context, divided=self._divides_samples)
        x, aux = self.stage.forward(x, context, self.active_range)
        if not layers.is_last:
            x = attach_losses(x, aux, self.loss_factor)
            return self._handoff.pack(x, context, add_aux(previous_aux, aux))
        assert self.targets is not None
        return self.objective.scores(self.stage.output(x, context, add_aux(previous_aux, aux)), self.targets)

    @property
    def objective(self) -> Objective:
        """The objective of this training step or evaluation."""
        if self.training:
            return self._objective
        return evaluated_objective(self._objective)

    @property
    def score_table(self) -> ScoreTable:
        """Arithmetic on the rows of the objective's scores."""
        return ScoreTable(self.objective)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits [B, S, V/tp] of tokens [B, S] on the loss stage, None on others; all stages together."""
        return self.apply_to_output(tokens, Context(), lambda output: output.head.logits(output.hidden))

    def apply_to_output(
        self, tokens: Tensor, context: Context, function: Callable[[NetworkOutput], Tensor]
    ) -> Tensor | None:
        """Return a function of the network's output on the loss stage, None on others; all stages together.

        Args:
            tokens: Token ids [B, S].
            context: What is known of the tokens.
            function: The function.
        """
        hidden = forward_over_stages(self.stage, tokens, context, self._dtype)
        if hidden is None:
            return None
        return function(self.stage.output(hidden, context, {}))

    def order(self, micro_batches: int, *, is_training: bool) -> PassOrder:
        """Return the passes of all stages in a step or an evaluation."""
        key = (micro_batches, is_training)
        if key not in self._orders:
            ranges = len(self._stages[0].ranges)
            self._orders[key] = PassOrder(self._schedule, len(self._stages), ranges, micro_batches, is_training)
        return self._orders[key]

    def _layers(self) -> dict[int, nn.Module]:
        """Return this stage's modules by their index in the layer plan, with the embedding of a tied head."""
        layers = {}
        if TIE in self.tied_modules:
            layers[EMBEDDING_INDEX] = self.tied_modules[TIE]
        for index in self._held.layers:
            module = getattr(self, str(index), None)
            if isinstance(module, nn.Module):
                layers[index] = module
        return layers

    def _share_over_stages(self, plan: RunPlan, grid: ParallelGrid) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Tie parameters that blocks share on this stage, and make the groups that sum their gradients over stages.

        Returns:
            The shared parameters, each with the group over which its gradients are summed. They start equal, and equal
            updates keep them so.
        """
        shared = share_parameters(self.weight_layers(), plan.layers)
        holders = _stages_with_shared_parameters(plan)
        if not holders:
            return []
        own_group = None
        # Every rank must take part in the creation of every group, including those that it is not in.
        for dp_rank in range(grid.dp_size):
            for tp_rank in range(grid.tp_size):
                ranks = [grid.topology.rank_of(stage, dp_rank, tp_rank) for stage in holders]
                group = dist.new_group(ranks)
                if grid.rank in ranks:
                    own_group = group
        if grid.pp_rank != holders[0]:
            for parameter in shared:
                # DeepSpeed's mark of a copy, which norms and counts leave out.
                parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
        if own_group is None:
            return []
        return [(parameter, own_group) for parameter in shared]

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the trained weights whose gradients DeepSpeed sums over stages: a tied embedding, and shared ones."""
        held = (*super().get_tied_weights_and_groups(), *self._shared)
        return [(weight, group) for weight, group in held if weight.requires_grad]

    def parameters_of_ranges(self) -> list[list[nn.Parameter]]:
        """Return the trained parameters of each range, without those that other stages or ranges use, too."""
        common = {id(weight) for weight, _ in self.get_tied_weights_and_groups()}
        layers = self._layers()
        found = []
        for layer_range in self._held.ranges:
            trained: dict[int, nn.Parameter] = {}
            for index in layer_range:
                if index not in layers:
                    continue
                for parameter in layers[index].parameters():
                    if parameter.requires_grad and id(parameter) not in common:
                        trained[id(parameter)] = parameter
            found.append(list(trained.values()))
        return found

    def _partition_layers(self, method: str = "uniform") -> None:
        """Split where the plan says. DeepSpeed would split by counts of layers or parameters."""
        held = [layer for stage in self._stages for layer in stage.layers]
        assert sorted(held) == list(range(self._num_layers)), "each layer belongs to one stage"
        self._held = self._stages[self._topo.get_coord(self.global_rank).pipe]
        self._set_bounds(start=self._held.layers[0], stop=self._held.layers[-1] + 1)  # for DeepSpeed's log

    def _build(self) -> None:
        """Build the layers of each range; DeepSpeed builds one range."""
        start = self._local_start
        stop = self._local_stop
        for layer_range in self._held.ranges:
            self._set_bounds(start=layer_range.start, stop=layer_range.stop)
            super()._build()
        self._set_bounds(start=start, stop=stop)

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that holds a layer."""
        return next(stage.index for stage in self._stages if stage.holds(layer_idx))

    def weight_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (index in the layer plan, module) of this stage's layers with weights; a tied copy has index 0."""
        for index, module in self._layers().items():
            if next(module.parameters(), None) is not None:
                yield index, module


def _specs(plan: RunPlan, build: BuildLayer) -> list[Any]:
    """Return one specification per layer; identity layers are functions, so that no file is written for them."""
    specs: list[Any] = []
    for entry in plan.layers:
        if entry.kind == "identity":
            specs.append(_identity)
        elif entry.tied_to is not None:
            specs.append(_TiedLayer(build, is_head=True))
        elif entry.kind == "embedding" and any(other.tied_to is not None for other in plan.layers):
            specs.append(_TiedLayer(build, is_head=False))
        else:
            specs.append(_PlannedLayer(build, entry.index))
    return specs


def _stages_with_shared_parameters(plan: RunPlan) -> list[int]:
    """Return the stages that hold a parameter which several layers use as one."""
    names: set[str] = set()
    for layer in plan.layers:
        names.update(spec.name for spec in layer.parameters if spec.shared_with is not None)
    holders = []
    for stage in plan.stages:
        held = {spec.name for layer in stage.entries(plan.layers) for spec in layer.parameters}
        if held & names:
            holders.append(stage.index)
    return holders


def _identity(x: Tensor) -> Tensor:
    return x
