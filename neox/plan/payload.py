"""Payload: a plan as one argument of each rank's command, with a digest of what ranks derive from it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from dataclasses import asdict
from typing import Any

import neox
from neox.architecture import Architecture
from neox.config.decision import Decision
from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError, LaunchError
from neox.plan.batches.batch import BatchPlan
from neox.plan.network.architecture import plan_layers
from neox.plan.ranks.stages import LayerRange, StagePlan
from neox.plan.ranks.topology import Topology
from neox.plan.run_plan import DataAmounts, RunPlan
from neox.plan.run_start import ChosenStart
from neox.problems import Source


def encode_payload(plan: RunPlan) -> str:
    """Encode a plan as base64, a few kilobytes whatever its size."""
    stages: list[list[Any]] = []
    for stage in plan.stages:
        stages.append([stage.parameters])
        for held in stage.ranges:
            stages[-1].append([held.start, held.stop])
    data = {
        "version": neox.__version__,
        "config": plan.config.to_flat(),
        "sources": {key: source.to_json() for key, source in plan.config.sources().items()},
        "decisions": [decision.to_json() for decision in plan.decisions],
        "architecture": plan.architecture.to_dict(),
        "grid": asdict(plan.grid),
        "batch": asdict(plan.batch),
        "precision": plan.precision,
        "vocab_size": plan.vocab_size,
        "padded_vocab_size": plan.padded_vocab_size,
        "stages": stages,
        "attention": plan.attention,
        "deepspeed": plan.deepspeed,
        "device_family": plan.device_family,
        "epoch_samples": plan.amounts.epoch_samples,
        "start": None if plan.start is None else plan.start.to_json(),
        "digest": plan_digest(plan),
    }
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(data).encode())).decode()


def decode_payload(text: str) -> RunPlan:
    """Return the plan that `encode_payload` encoded. Only the parameters of the layers are derived again.

    Raises:
        ConfigError: The text is no payload.
        LaunchError: It is of another version of this program.
    """
    try:
        data = json.loads(zlib.decompress(base64.urlsafe_b64decode(text.encode())))
        version = data.get("version", "of an older version")
        if "config" in data and version != neox.__version__:
            raise LaunchError(
                f"the launcher runs neox {version}, and this host {neox.__version__}: check out the same version; "
                "`deepy.py doctor` compares the hosts"
            )
        sources = {key: Source.from_json(source) for key, source in data["sources"].items()}
        config = NeoXConfig.from_flat(data["config"], sources)
        architecture = Architecture.from_dict(data["architecture"])
        stages = []
        for index, (parameters, *ranges) in enumerate(data["stages"]):
            stages.append(StagePlan(index, tuple(map(_layer_range, ranges)), parameters))
        plan = RunPlan(
            config=config,
            grid=Topology(**data["grid"]),
            batch=BatchPlan(**data["batch"]),
            precision=data["precision"],
            vocab_size=data["vocab_size"],
            padded_vocab_size=data["padded_vocab_size"],
            layers=plan_layers(config, architecture, data["padded_vocab_size"], data["vocab_size"]),
            stages=tuple(stages),
            deepspeed=data["deepspeed"],
            attention=tuple(data["attention"]),
            decisions=tuple(map(Decision.from_json, data["decisions"])),
            device_family=data["device_family"],
            amounts=DataAmounts(epoch_samples=data["epoch_samples"]),
            start=None if data["start"] is None else ChosenStart.from_json(data["start"]),
        )
        digest = data["digest"]
    except (binascii.Error, zlib.error, UnicodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the payload of the launcher cannot be read: {error}") from None
    if plan_digest(plan) != digest:
        raise LaunchError(
            "the layers that follow from the payload on this host are not the launcher's: the code here is another "
            "version; `deepy.py doctor` compares the hosts"
        )
    return plan


def _layer_range(bounds: list[int]) -> LayerRange:
    start, stop = bounds
    return LayerRange(start, stop)


def plan_digest(plan: RunPlan) -> str:
    """Hash what ranks derive again: the layers with all parameters."""
    return hashlib.sha256(json.dumps(plan.layers, sort_keys=True, default=vars).encode()).hexdigest()
