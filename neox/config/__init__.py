"""Configuration: YAML to a checked `NeoXConfig`, and on to the `RunPlan` that follows from it. Without torch."""

from neox.config.architecture import (
    architecture_keys,
    architecture_of,
    architecture_settings,
    saved_architecture,
    setting_differences,
    yaml_keys,
)
from neox.config.batch_schedule import BatchPlan
from neox.config.deepspeed_json import deepspeed_json
from neox.config.fit import Device, gpu_device, host_device, memory_problem
from neox.config.loader import Draft, draft_config, load_config
from neox.config.neox_config import NeoXConfig, for_inference
from neox.config.plan import AttentionImpl, MemoryPlan, Precision, RunPlan, StagePlan, Topology
from neox.config.precision import Capabilities, saved_precision
from neox.config.report import format_plan, plan_as_dict
from neox.config.resolve import decode_payload, encode_payload, further_problems, resolve
from neox.config.validation import missing_for_training, static_problems

__all__ = [
    "AttentionImpl",
    "BatchPlan",
    "Capabilities",
    "Device",
    "Draft",
    "Topology",
    "MemoryPlan",
    "NeoXConfig",
    "Precision",
    "RunPlan",
    "StagePlan",
    "architecture_keys",
    "architecture_of",
    "architecture_settings",
    "decode_payload",
    "deepspeed_json",
    "draft_config",
    "encode_payload",
    "for_inference",
    "format_plan",
    "further_problems",
    "gpu_device",
    "host_device",
    "load_config",
    "memory_problem",
    "missing_for_training",
    "plan_as_dict",
    "resolve",
    "saved_architecture",
    "setting_differences",
    "saved_precision",
    "static_problems",
    "yaml_keys",
]
