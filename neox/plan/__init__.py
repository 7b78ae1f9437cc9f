"""Plan: what follows from a configuration, the number of ranks and the size of the vocabulary. Without torch.

`resolve` is the derivation, step by step, and `run_plan` its result. `layout` is what a search varies of a run, with
the words that the formulas of memory and time share. The steps are in folders:

`rules`     what is wrong with a configuration, by topic, and notes on what has no effect
`network`   the network and its parameters, from YAML keys and back
`batches`   sizes of batches, their schedule, and which datasets their samples are of
`ranks`     degrees of parallelism, stages and their layers, pipeline schedules
`devices`   memory of devices, precision, fp8, compiled layers
`memory`    bytes on a rank in training and generation, and of checkpoints on disk
`time`      seconds of a step
`schedule`  learning-rate schedules as numbers
`search`    `--suggest`, ways out of "does not fit", the longest sequence
`report`    the plan as text and as JSON, with where each value comes from
"""

from neox.architecture import AttentionImpl
from neox.plan.batches.batch import BatchPlan
from neox.plan.check import check_config, check_run, config_from_files, decides_run
from neox.plan.deepspeed_json import deepspeed_json
from neox.plan.devices.device import Device, gpu_device, host_device
from neox.plan.devices.precision import Capabilities, Precision
from neox.plan.memory import MemoryPlan
from neox.plan.network.architecture import (
    architecture_keys,
    architecture_of,
    architecture_settings,
    padded_vocabulary,
    saved_architecture,
    setting_differences,
    used_vocabulary,
    yaml_keys,
)
from neox.plan.network.expert_keys import EXPERT_FIELDS
from neox.plan.payload import decode_payload, encode_payload
from neox.plan.ranks.stages import LayerRange, StagePlan
from neox.plan.ranks.topology import Topology
from neox.plan.report.as_json import plan_as_dict
from neox.plan.report.text import format_plan
from neox.plan.resolve import resolve
from neox.plan.rules import missing_for_training, static_problems
from neox.plan.run_plan import DataAmounts, RunPlan
from neox.plan.search.fit import memory_problem
from neox.plan.trained_model import model_directory, saved_precision, with_trained_model

__all__ = [
    "EXPERT_FIELDS",
    "AttentionImpl",
    "BatchPlan",
    "Capabilities",
    "DataAmounts",
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
