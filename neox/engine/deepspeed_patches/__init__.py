"""Corrections of DeepSpeed 0.19.8. Nothing outside of this package overrides or replaces DeepSpeed's code.

`engines`         gradients of the plain engine, and of experts that data ranks divide
`pipeline_engine` any order of passes, several ranges of layers on a stage, gradients of tied weights, scores
`range_reduction` gradients of a range of layers, reduced while other ranges run
`bf16_optimizer`  the optimizer of bf16 weights with fp32 copies: fewer passes over memory, one wait for the device
`unfused_optimizer`    the optimizer of fp16 and bf16 weights with ZeRO 0: one look at gradients, one wait
`zero_optimizer`  ZeRO 1 and 2: one norm over all parameter groups, true places of parameters, one wait with offload
`expert_shards`        ZeRO 3 of experts that data ranks divide
`file_states`     states that are offloaded to files (`device: nvme`)
`weight_copies`   second copies of the weights in groups of neighbouring data ranks (hpZ)
`settings`        what DeepSpeed is not asked to do, because this library does it right
`startup`         versions that are refused, and what importing or starting DeepSpeed would compile
`log`             lines that no user can act on

Where DeepSpeed's code is left during a run, and for what; `neox.engine.engine` shows the same for one step:

    point                        DeepSpeed                                here
    ---------------------------  ---------------------------------------  ---------------------------------------------
    import, first start          logs thousands of lines, compiles        hidden (`log`); compiles nothing (`startup`)
    a kernel of its own          reads `9.0a` of TORCH_CUDA_ARCH_LIST     `9.0` (`startup`)
                                 as a number
    an engine after ZeRO 3       leaves ZeRO 3's `F.linear` in place      torch's is put back (`startup`)
    its configuration            clips with ZeRO 0 by a wrong norm        our optimizer clips (`runtime_json`)
    zero.Init                    groups global ranks for hpZ              `copy_group` groups data ranks
    zero.Init: experts           knows layers of its own only             `shard_over_same_experts`
    constructor: weights         gives the first rank's to all            not if data ranks divide experts
    constructor: wrapper         builds BF16_Optimizer, ZeRO 1 to 3,      `BF16Optimizer`, `ZeroOptimizer`,
                                 FP16_UnfusedOptimizer                    `ExpertStage3`, `UnfusedOptimizer`
    backward                     does not scale the loss, fp16 with       scales it: `PlainEngine.backward`
                                 ZeRO 0
    a pipeline stage's passes    one range of layers, 1F1B, waits for     any order, any number of ranges, no waiting:
                                 each message                             `PipelineEngine._exec_schedule`
    an evaluation, ZeRO 3        leaves weights on their way              waits for them: `PlainEngine.forward`
    reduction                    after the last pass                      of a range, during others (`RangeReduction`)
    reduction: bf16, ZeRO 1      after the last pass                      of layers, during that pass (`LayerReduction`)
    reduction: tied weights      sums `grad`, which ZeRO has moved        sums what ZeRO accumulates
    reduction: experts           knows layers of its own only             averages over ranks with the same experts
    reduction: one rank          copies all gradients and back            nothing
    update, ZeRO 1 and 2         a norm with collectives for each group   one norm of all groups (`ZeroOptimizer`)
    round_robin_gradients        notes places in the former order         in the real one (`ZeroOptimizer`)
    update, ZeRO 0               looks for overflow, two norms, waits     one norm, waits once (`UnfusedOptimizer`)
    offload of gradients         waits for each                           waits for all at once (`ZeroOptimizer`)
    update, bf16                 waits several times, clips everything    waits once, clips this rank's shard
    update, ZeRO 3 on nvme       libaio and a compiler                    mapped files (`file_states`)
    scores of a pipeline         one number, after the update             K numbers, before it
    saved files                  all weights, a script                    optimizer states only; weights are layer files

Each correction has a test that fails when DeepSpeed changes, in `tests/unit/engine/test_deepspeed_patches.py` or
`tests/distributed/test_deepspeed_patches.py`: the correction can go then, or must follow.
"""

from neox.engine.deepspeed_patches import log  # isort: skip  (its filters must exist before DeepSpeed is imported)
from neox.engine.deepspeed_patches.engines import PlainEngine
from neox.engine.deepspeed_patches.expert_shards import shard_over_same_experts
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
    "shard_over_same_experts",
]
