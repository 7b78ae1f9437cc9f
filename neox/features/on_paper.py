"""The halves of all features that need no torch. Only `plan` and `preflight` read this table."""

from __future__ import annotations

from neox.features.ema import paper as ema
from neox.features.eval_tasks import paper as eval_tasks
from neox.features.loss_spikes import paper as loss_spikes
from neox.features.noise_scale import paper as noise_scale
from neox.features.profiler import paper as profiler
from neox.features.reference import paper as reference
from neox.features.replica_check import paper as replica_check
from neox.features.stability import paper as stability
from neox.features.stragglers import paper as stragglers
from neox.features.trackers import paper as trackers

PAPERS = (
    reference.PAPER,
    ema.PAPER,
    loss_spikes.PAPER,
    replica_check.PAPER,
    noise_scale.PAPER,
    stability.PAPER,
    stragglers.PAPER,
    eval_tasks.PAPER,
    trackers.PAPER,
    profiler.PAPER,
)
