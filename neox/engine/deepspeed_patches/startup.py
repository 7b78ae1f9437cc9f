"""What happens before DeepSpeed is used: versions are checked, nothing is compiled, and what it left is put back."""

from __future__ import annotations

import importlib
import re
from collections.abc import MutableMapping

import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

from neox.errors import LaunchError, install_command

OLDEST_DEEPSPEED = (0, 19, 8)
"""From 0.18.3 to 0.19.3 at least, ZeRO 2 gives wrong gradients in bf16 on several ranks if a module is used more than
once in a step (DeepSpeed#8224, mended by PR 8245, which was opened after 0.19.5). 0.19.8 is what is tested here. Older
pipeline stages accumulate wrong gradients: summed (0.16.9 to 0.18.2), or with a further factor 1/steps at each stage
boundary (0.18.3 to 0.19.2)."""


def check_deepspeed(version: str) -> None:
    """Raise LaunchError for versions of DeepSpeed that are known to train wrongly."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < OLDEST_DEEPSPEED:
        oldest = ".".join(map(str, OLDEST_DEEPSPEED))
        raise LaunchError(
            f"deepspeed {version} is installed; versions before {oldest} train with wrong gradients in pipelines, or "
            f"with ZeRO 2; install {oldest} or newer: {install_command('requirements.txt')}"
        )


def prepare_cpu() -> None:
    """Let DeepSpeed start on a CPU without a compiler, and accept fp16.

    At the first start DeepSpeed builds `deepspeed_shm_comm`, which serves inference only, if the extension is in its
    table. That takes minutes and a C++ compiler. The table has no other use, and DeepSpeed fills it by running
    compilers.

    DeepSpeed refuses fp16 without the CPU's instructions for it. torch computes fp16 without them, slowly, which is
    enough to try a run.
    """
    deepspeed.ops.__compatible_ops__ = {}
    get_accelerator().is_fp16_supported = lambda: True


def accept_architectures(environment: MutableMapping[str, str]) -> None:
    """Let DeepSpeed build its kernels where TORCH_CUDA_ARCH_LIST names an architecture with a letter (`9.0a`, `10.0f`).

    torch's own extensions take the letter, and images for H100 set it. DeepSpeed reads it as a number and fails. Its
    kernels use none of the instructions that the letter stands for.
    """
    listed = environment.get("TORCH_CUDA_ARCH_LIST")
    if listed is not None:
        environment["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d\.\d+)[af]", r"\1", listed)


def restore_linear() -> None:
    """Put back torch's `F.linear`, which ZeRO 3 of an earlier engine of this process has replaced.

    DeepSpeed leaves its own product in place, of which torch 2.11 computes wrong gradients in compiled layers.
    """
    replaced = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if replaced is not None:
        torch.nn.functional.linear = replaced


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which is not used, without compiling its kernels.

    DeepSpeed imports it during every reduction of gradients. To compile it takes 10 s of CPU, most of them for the
    import of torch._dynamo.
    """
    original = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = original
