"""Corrections of DeepSpeed 0.19.8. Nothing outside of this package overrides or replaces DeepSpeed's code.

`engines`         gradients of the plain engine, and of experts that data ranks divide
`pipeline_engine` any order of passes, several ranges of layers on a stage, gradients of tied weights, scores
`range_reduction` gradients of a range of layers, reduced while other ranges run
`bf16_optimizer`  the optimizer of bf16 weights with fp32 copies: fewer passes over memory, one wait for the device
`file_states`     states that are offloaded to files (`device: nvme`)
`weight_copies`   second copies of the weights in groups of neighbouring data ranks (hpZ)
`settings`        what DeepSpeed is not asked to do, because this library does it right
`startup`         versions that are refused, and what importing or starting DeepSpeed would compile
`log`             lines that no user can act on

Each correction says what DeepSpeed does and what is done here. `tests/unit/engine/test_deepspeed_patches.py` and
`tests/distributed/test_deepspeed_patches.py` have a test of each that fails when DeepSpeed changes: the correction can
go then, or must follow.
"""

from neox.engine.deepspeed_patches import log  # isort: skip  (its filters must exist before DeepSpeed is imported)
from neox.engine.deepspeed_patches.engines import PlainEngine
from neox.engine.deepspeed_patches.file_states import SwappedStage3, move_weights_to_files
from neox.engine.deepspeed_patches.log import hidden_stdout
from neox.engine.deepspeed_patches.pipeline_engine import PipelineEngine
from neox.engine.deepspeed_patches.settings import clips_itself, counts_in_norm, runtime_json
from neox.engine.deepspeed_patches.weight_copies import copy_group

__all__ = [
    "PipelineEngine",
    "PlainEngine",
    "SwappedStage3",
    "clips_itself",
    "copy_group",
    "counts_in_norm",
    "hidden_stdout",
    "log",
    "move_weights_to_files",
    "runtime_json",
]
