"""DeepSpeed still does what `neox.engine.deepspeed_patches` corrects: each correction rests on some code of DeepSpeed.

A test that fails shows that DeepSpeed has changed there. The correction can go then, or must follow.
`tests/distributed/test_deepspeed_patches.py` shows the wrong numbers of those that change numbers.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
from deepspeed.accelerator import cpu_accelerator, real_accelerator
from deepspeed.comm.torch import build_shm_op
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from neox.engine import deepspeed_patches

BF16 = bf16_optimizer.BF16_Optimizer
STAGE2 = stage_1_and_2.DeepSpeedZeroOptimizer
STAGE3 = stage3.DeepSpeedZeroOptimizer_Stage3

# What is corrected -> the function, and code in it that the correction replaces or relies on.
CODE = {
    "weights in DeepSpeed's files": (DeepSpeedEngine._save_checkpoint, "module = self.module_state_dict("),
    "zero_to_fp32.py in checkpoints": (DeepSpeedEngine._save_zero_checkpoint, "self._copy_recovery_script(save_path)"),
    "fp16 loss without its scale": (
        DeepSpeedEngine,
        f"if isinstance(self.optimizer, ZeROOptimizer):\n{' ' * 16}loss = ",
    ),
    "three looks at fp16 gradients": (FP16_UnfusedOptimizer.step, "self.overflow = self.overflow_checker.check()"),
    "class for fp16": (DeepSpeedEngine._configure_fp16_optimizer, "optimizer = FP16_UnfusedOptimizer("),
    "a wait at each offloaded gradient": (
        STAGE2.update_offload_overflow_tracker,
        f"if grad is not None and self._has_inf_or_nan(grad.data):\n{' ' * 12}self.local_overflow = True",
    ),
    "a wait at each offloaded norm": (STAGE2.complete_grad_norm_calculation_for_cpu_offload, "param_norm.item()**2"),
    "overflow of offloaded gradients": (STAGE2.has_overflow, "self.local_overflow if self.cpu_offload"),
    "a norm of each parameter group": (
        STAGE2.scaled_global_norm,
        f"for i, group in enumerate(self.bit16_groups):\n{' ' * 12}if self.cpu_offload:\n{' ' * 16}norm = ",
    ),
    "places of dealt parameters": (
        STAGE2._link_all_hp_params,
        f"param_offsets = None\n{' ' * 12}if any(self.round_robin_bit16_padding[i]):",
    ),
    "experts without contiguous gradients": (  # refused: `neox.plan.rules.experts`
        STAGE2.reduce_ipg_grads,
        "self.buffered_reduce_fallback(None, bucket.grads, comm_dtype, elements_per_buffer=bucket.elements)",
    ),
    "class of ZeRO 1 and 2": (DeepSpeedEngine._configure_zero_optimizer, "DeepSpeedZeroOptimizer if not self.zenflow"),
    "gradients copied on one rank": (DeepSpeedEngine.allreduce_bucket, "tensor = self.flatten(bucket)"),
    "a walk over modules": (DeepSpeedEngine.zero_grad, "self.module.named_parameters()"),
    "types compared": (PipelineEngine.__init__, "type(self.optimizer) == BF16_Optimizer"),
    "a loss after the module": (PipelineEngine._exec_forward_pass, "self.loss = self.module.loss_fn(outputs, labels)"),
    "scores of an evaluation": (PipelineEngine._exec_forward_pass, "self.total_loss = add_to_total_loss("),
    "tied gradients": (PipelineEngine._exec_reduce_tied_grads, "if self.using_bf16_optimizer else weight.grad"),
    "one range of a stage": (PipelineModule._build, "specs[self._local_start:self._local_stop]"),
    "instructions by type": (PipelineEngine._exec_schedule, "self._INSTRUCTION_MAP[type(cmd)]"),
    "a send that waits": (p2p.send, "return dist.send(tensor, dest_rank)"),
    "the last stage computes the loss": (PipelineEngine._exec_backward_pass, "if self.is_last_stage():"),
    "gradients of an output": (PipelineEngine._exec_backward_pass, "grad_tensors = self.grad_layer"),
    "a module for DualPipeV": (DualPipeVModule._partition_layers, "self.num_stages *= 2"),
    "one score": (PipelineEngine._bcast_pipe_scalar, "torch.Tensor([0.])"),
    "a cast of bf16 gradients": (BF16._update_hp_grad, "lp.grad.data.to(hp_grad.dtype)"),
    "clipping of all ranks' parts": (BF16.step, "self.get_grads_for_norm(for_clipping=True)"),
    "a step to allocate states": (FP16_UnfusedOptimizer.initialize_optimizer_states, "self.optimizer.step()"),
    "norm of fp32": (utils.clip_grad_norm_, "mpu.get_model_parallel_rank() == 0"),
    "class of ZeRO 3": (DeepSpeedEngine._configure_zero_optimizer, "stage3 import DeepSpeedZeroOptimizer_Stage3"),
    "files locked in memory": (STAGE3._configure_tensor_swapping, "OptimizerSwapper"),
    "shm_comm": (build_shm_op, "deepspeed.ops.__compatible_ops__.get("),
    "fp16 on CPUs": (cpu_accelerator.CPU_Accelerator.is_fp16_supported, "_is_mkldnn_fp16_supported"),
    "Muon is compiled": (original_muon, "@compiler.compile()"),
    "lines nobody can act on": (real_accelerator, "Setting accelerator to CPU"),
}


@pytest.mark.parametrize("corrected", CODE)
def test_deepspeed_still_has_the_code(corrected):
    function, code = CODE[corrected]
    assert code in inspect.getsource(function)


def test_the_fp16_wrapper_is_not_one_of_those_whose_loss_is_scaled():
    assert not issubclass(FP16_UnfusedOptimizer, ZeROOptimizer)


def test_scores_are_asked_for_after_the_update():
    source = inspect.getsource(PipelineEngine.train_batch)
    assert source.index("self._exec_schedule(sched)") < source.index("self._aggregate_total_loss()")


def test_an_evaluation_starts_with_the_losses_of_training():
    assert "self.total_loss = None" in inspect.getsource(PipelineEngine.train_batch)
    assert "total_loss" not in inspect.getsource(PipelineEngine.eval_batch)


def arguments_of(function, called):
    """Names of the keyword arguments with which a function's body calls another."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == called]
    assert len(calls) == 1
    return {keyword.arg for keyword in calls[0].keywords}


def test_our_bf16_optimizer_gets_deepspeeds_arguments():
    ours = arguments_of(deepspeed_patches.PlainEngine._configure_bf16_optimizer, "BF16Optimizer")
    theirs = arguments_of(DeepSpeedEngine._configure_bf16_optimizer, "BF16_Optimizer")
    assert ours - {"experts"} == theirs - {"timers"}
    assert "timers." not in inspect.getsource(BF16), "they are not used"


def test_defaults():
    assert DeepSpeedThroughputTimerConfig().enabled, "timers wait for the device unless they are switched off"
    assert DeepSpeedBF16Config().check_grad_overflow, "no setting is needed to skip steps with NaN gradients"
