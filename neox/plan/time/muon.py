"""Operations of Muon's update: Newton-Schulz iterations that turn the momentum of matrices into their steps."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from neox.architecture import LayerPlan
from neox.config.sections.optimizer_table import MuonParams


class NewtonSchulzWork(NamedTuple):
    """Work of one update.

    Attributes:
        flops: Operations for all matrices of blocks.
        largest: Operations for the matrix that takes the most.
        elements: Elements of these matrices.
    """

    flops: float
    largest: float
    elements: float


def newton_schulz_work(layers: LayerPlan, params: MuonParams) -> NewtonSchulzWork:
    """Return the work for the whole network.

    An iteration of a matrix with sides s <= l has three matmuls: s l s, s s s and s s l.
    """
    flops = 0.0
    largest = 0.0
    elements = 0.0
    for layer, blocks in layers.block_types:
        for spec in layer.parameters:
            if not layer.is_hidden(spec):
                continue
            elements += blocks * spec.numel
            one_expert = replace(spec, shape=spec.shape[-2:], experts=0)
            for matrix in one_expert.matrices(split=params.split_fused):
                count = 3 if matrix.turns else 1
                short, long = sorted((matrix.rows // count, matrix.columns))
                once = params.ns_steps * (4 * short**2 * long + 2 * short**3)
                flops += blocks * max(1, spec.experts) * count * once
                largest = max(largest, once)
    return NewtonSchulzWork(flops, largest, elements)
