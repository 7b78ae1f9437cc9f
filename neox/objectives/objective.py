"""`Objective`: the interface between batches, the engine and the network's last layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neox.architecture import CHOICES, MULTI_TOKEN_LOSS, block_losses, block_statistics
from neox.config.sections.preferences import PreferenceConfig
from neox.model import NetworkOutput, add_aux
from neox.objectives.causal_lm import CausalLM
from neox.objectives.distillation import Distilled
from neox.objectives.dpo import DPO, Hinge
from neox.objectives.ipo import IPO
from neox.objectives.kto import KTO
from neox.objectives.masked_lm import MaskedLM
from neox.objectives.multi_token import LABELS, TOKENS, WEIGHTS
from neox.objectives.orpo import ORPO
from neox.objectives.reward import RewardModel
from neox.objectives.scores import LinearCombination, Reduction, add_rows, unpack_rows
from neox.objectives.simpo import SimPO
from neox.plan import RunPlan

TOTAL_LOSS = "total_loss"
"""Score: the sum of the objective's loss and of what the network adds to it."""
Batch = Mapping[str, Tensor]
"""One micro batch of a data rank by name; each objective says which names it reads."""


class Objective(Protocol):
    """What a network is trained to do.

    The first pipeline stage reads `inputs`, the last one computes `scores` from the network's output and `targets`;
    without stages one rank does both. Engines add up the rows of scores over micro batches and data ranks
    (`neox.objectives.scores`). Before a micro batch comes here, the mask of its labels has been replaced by weights, as
    `loss_normalization` says: those of a step sum to its number of micro batches on all data ranks. So the mean of the
    trained losses is the loss of the step, and the count of a loss is the sum of its weights.
    """

    @property
    def label_mask(self) -> str:
        """Name of the batch's mask of labels: 1 for each label that counts, else 0."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each score, as steps and evaluations report it; the trained loss comes first."""
        ...

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """Reductions of the scores that are not means over what is counted."""
        ...

    @property
    def per_token(self) -> tuple[str, ...]:
        """Names of the scores that are losses in nats per token; evaluations report their perplexities (`NAME_ppl`)."""
        ...

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return `tokens`, then fields of `neox.model.Context`: integers, because stages send gradients of floats."""
        ...

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return what the scores need next to the network's output."""
        ...

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the trained loss and the rows of scores of a micro batch, equal on all tensor ranks.

        Args:
            output: Hidden states, head, and losses of blocks.
            targets: Result of `targets`, on the device.

        Returns:
            Packed scores in fp32 [1 + 2 K] (`pack_scores`); the loss, which has a gradient, is the first number.
        """
        ...


@dataclass(frozen=True)
class _WithMoreScores:
    """An objective that adds scores to those of another one, with its batches.

    Attributes:
        objective: The other one.
    """

    objective: Objective

    @property
    def label_mask(self) -> str:
        """Return the objective's name of the mask of labels."""
        return self.objective.label_mask

    @property
    def per_token(self) -> tuple[str, ...]:
        """Return the names of the objective's losses per token."""
        return self.objective.per_token

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the objective's inputs."""
        return self.objective.inputs(batch)

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the objective's targets."""
        return self.objective.targets(batch)


@dataclass(frozen=True)
class WithBlockLosses(_WithMoreScores):
    """An objective of a network whose blocks add losses of their own, such as the balance of experts.

    Attributes:
        objective: The objective itself.
        losses: Names of the blocks' losses.
        statistics: Names of numbers that blocks report with them, and that are not trained.
    """

    losses: tuple[str, ...]
    statistics: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of the sum, which is trained, then the names of its parts; no sum without losses."""
        total = (TOTAL_LOSS,) if self.losses else ()
        return (*total, *self.objective.names, *self.losses, *self.statistics)

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """The objective's, and the sum of the losses: their divisors differ."""
        reductions = dict(self.objective.reductions)
        if self.losses:
            reductions[TOTAL_LOSS] = LinearCombination(dict.fromkeys((self.objective.names[0], *self.losses), 1.0))
        return reductions

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of all losses, the objective's rows, and those of what the blocks report.

        Losses of blocks are numbers of a micro batch: each counts once. Statistics are shares of the choices of
        experts.
        """
        packed = self.objective.scores(output, targets)
        losses = [output.aux[name] for name in self.losses]
        rows = [(loss, torch.ones_like(loss)) for loss in losses]
        rows += [(output.aux[name], output.aux[CHOICES]) for name in self.statistics]
        return add_rows(packed, torch.stack([packed[0], *losses]).sum(), rows)


@dataclass(frozen=True)
class WithTokensAhead(_WithMoreScores):
    """An objective of a network that also predicts tokens further ahead (`neox.objectives.multi_token`).

    Its batches hold the fields of `with_tokens_ahead` besides.

    Attributes:
        objective: The objective itself, with the blocks' losses.
        weight: Factor w of the loss.
    """

    weight: float

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of the sum, which is trained, then the objective's scores, then the mean over all depths."""
        others = [name for name in self.objective.names if name != TOTAL_LOSS]
        return (TOTAL_LOSS, *others, MULTI_TOKEN_LOSS)

    def targets(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the objective's targets, then the tokens further ahead, their labels and weights [B, S, D]."""
        return (*self.objective.targets(batch), batch[TOKENS], batch[LABELS], batch[WEIGHTS])

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """The objective's, and the sum of the losses."""
        parts = {self.objective.names[0]: 1.0}
        found = self.objective.reductions.get(TOTAL_LOSS)
        if isinstance(found, LinearCombination):
            parts = dict(found.factors)
        total = LinearCombination({**parts, MULTI_TOKEN_LOSS: self.weight})
        return {**self.objective.reductions, TOTAL_LOSS: total}

    def scores(self, output: NetworkOutput, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of all losses, the objective's rows, and that of multi-token prediction."""
        *own, tokens, labels, weights = targets
        assert output.look_ahead is not None
        ahead = output.look_ahead(tokens)
        output = output._replace(head=ahead.head, aux=add_aux(output.aux, ahead.aux))
        packed = self.objective.scores(output, tuple(own))
        losses = []
        for depth, hidden in enumerate(ahead.hidden):
            losses.append(output.head.cross_entropy(hidden, labels[..., depth], weights[..., depth]))
        loss = torch.stack(losses).mean()
        count = unpack_rows(packed)[0, 1]  # as of the main loss: see the head of `neox.objectives.multi_token`
        return add_rows(packed, packed[0] + self.weight * loss, [(loss, count)])


def evaluated_objective(objective: Objective) -> Objective:
    """Return the objective that evaluations report: the same one, without tokens further ahead."""
    if isinstance(objective, WithTokensAhead):
        return objective.objective
    return objective


def build_objective(plan: RunPlan) -> Objective:
    """Return the objective of a run: preferences, masked language modelling for a bidirectional network, or causal."""
    network = plan.architecture
    objective: Objective = CausalLM(plan.config.training.lm_z_loss)
    distillation = plan.config.distillation
    if distillation.teacher_logits is not None:
        objective = Distilled(
            direction=distillation.distillation_divergence,
            temperature=distillation.distillation_temperature,
            weight=distillation.distillation_weight,
        )
    elif plan.config.preferences.on_preferences:
        objective = _preference_objective(plan.config.preferences)
    elif network.bidirectional:
        objective = MaskedLM(network.sentence_head)
    losses = block_losses(network)
    statistics = block_statistics(network)
    if losses or statistics:
        objective = WithBlockLosses(objective, losses, statistics)
    if network.mtp_num_layers:
        objective = WithTokensAhead(objective, plan.config.training.mtp_loss_scaling_factor)
    return objective


def _preference_objective(keys: PreferenceConfig) -> Objective:
    """Return the objective of preferences that `train_impl` names."""
    if keys.train_impl == "kto":
        return KTO(keys.kto_beta, keys.kto_desirable_weight, keys.kto_undesirable_weight)
    if keys.train_impl == "rm":
        return RewardModel(keys.rm_center_coefficient, keys.z_loss)
    if keys.train_impl == "orpo":
        return ORPO(keys.orpo_beta)
    if keys.train_impl == "simpo":
        return SimPO(keys.simpo_beta, keys.simpo_gamma)
    if keys.dpo_loss == "ipo":
        return IPO(beta=keys.dpo_beta, with_reference=keys.needs_reference)
    if keys.dpo_loss == "hinge":
        return Hinge(beta=keys.dpo_beta, with_reference=keys.needs_reference)
    return DPO(beta=keys.dpo_beta, with_reference=keys.needs_reference, label_smoothing=keys.dpo_label_smoothing)
