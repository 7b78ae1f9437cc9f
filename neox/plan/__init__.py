"""Plan: what follows from a configuration, the number of ranks and the size of the vocabulary. Without torch."""

from neox.architecture import AttentionImpl
from neox.plan.architecture import (
    architecture_keys,
    architecture_of,
    architecture_settings,
    padded_vocabulary,
    saved_architecture,
    setting_differences,
    used_vocabulary,
    yaml_keys,
)
from neox.plan.batch import BatchPlan
from neox.plan.check import check_config, check_run, config_from_files, decides_run
from neox.plan.deepspeed_json import deepspeed_json
from neox.plan.device import Device, gpu_device, host_device
from neox.plan.expert_keys import EXPERT_FIELDS
from neox.plan.memory import MemoryPlan
from neox.plan.payload import decode_payload, encode_payload
from neox.plan.precision import Capabilities, Precision, saved_precision
from neox.plan.report.as_json import plan_as_dict
from neox.plan.report.text import format_plan
from neox.plan.resolve import resolve
from neox.plan.rules import missing_for_training, static_problems
from neox.plan.run_plan import RunPlan
from neox.plan.search.fit import memory_problem
from neox.plan.stages import LayerRange, StagePlan
from neox.plan.topology import Topology
from neox.plan.trained_model import model_directory, with_trained_model

__all__ = [
    "EXPERT_FIELDS",
    "AttentionImpl",
    "BatchPlan",
    "Capabilities",
    "Device",
    "LayerRange",
    "MemoryPlan",
    "Precision",
    "RunPlan",
    "StagePlan",
    "Topology",
    "architecture_keys",
    "architecture_of",
    "architecture_settings",
    "check_config",
    "check_run",
    "config_from_files",
    "decides_run",
    "decode_payload",
    "deepspeed_json",
    "encode_payload",
    "format_plan",
    "gpu_device",
    "host_device",
    "memory_problem",
    "missing_for_training",
    "model_directory",
    "padded_vocabulary",
    "used_vocabulary",
    "plan_as_dict",
    "resolve",
    "saved_architecture",
    "saved_precision",
    "setting_differences",
    "static_problems",
    "with_trained_model",
    "yaml_keys",
]
