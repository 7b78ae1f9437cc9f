"""Payload: what `resolve` has decided, as one argument of each rank's command, and a digest of what follows from it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from dataclasses import asdict, replace

from neox.architecture import Architecture
from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError, LaunchError
from neox.plan.batches.batch import BatchPlan
from neox.plan.ranks.topology import Topology
from neox.plan.resolve import derive_plan
from neox.plan.run_plan import RunPlan
from neox.problems import Source


def encode_payload(plan: RunPlan) -> str:
    """Encode a plan as base64, a few kilobytes whatever its size."""
    data = {
        "config": plan.config.to_flat(),
        "sources": {key: source.to_json() for key, source in plan.config.sources().items()},
        "architecture": plan.architecture.to_dict(),
        "grid": asdict(plan.grid),
        "batch": asdict(plan.batch),
        "precision": plan.precision,
        "vocab_size": plan.vocab_size,
        "device_family": plan.device_family,
        "epoch_samples": plan.epoch_samples,
        "digest": plan_digest(plan),
    }
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(data).encode())).decode()


def decode_payload(text: str) -> RunPlan:
    """Return the plan that `encode_payload` encoded.

    Raises:
        ConfigError: The text is no payload.
        LaunchError: Another plan follows from it here than for the launcher.
    """
    try:
        data = json.loads(zlib.decompress(base64.urlsafe_b64decode(text.encode())))
        sources = {key: Source.from_json(source) for key, source in data["sources"].items()}
        plan = derive_plan(
            NeoXConfig.from_flat(data["config"], sources),
            Architecture.from_dict(data["architecture"]),
            Topology(**data["grid"]),
            BatchPlan(**data["batch"]),
            data["precision"],
            data["vocab_size"],
        )
        plan = replace(plan, device_family=data["device_family"], epoch_samples=data["epoch_samples"])
        digest = data["digest"]
    except (binascii.Error, zlib.error, UnicodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the payload of the launcher cannot be read: {error}") from None
    if plan_digest(plan) != digest:
        raise LaunchError(
            "the plan that follows from the payload on this host is not the launcher's: the code here is another "
            "version; `deepy.py doctor` compares the hosts"
        )
    return plan


def plan_digest(plan: RunPlan) -> str:
    """Hash what ranks must agree on: layers, stages, batch, precision, attention kernels and DeepSpeed's JSON."""
    agreed = (plan.layers, plan.stages, plan.grid, plan.batch, plan.precision, plan.attention, plan.deepspeed)
    return hashlib.sha256(json.dumps(agreed, sort_keys=True, default=vars).encode()).hexdigest()
