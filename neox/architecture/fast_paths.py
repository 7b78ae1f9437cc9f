"""Kernels that only some kinds of accelerators have, and what runs in their place elsewhere.

The plan says from this table which paths a run will take. `neox.ops.fast_paths` asks the device itself, on the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

DeviceFamily = Literal["cpu", "cuda", "rocm", "npu", "xpu", "hpu"]
"""Kind of device: torch's names, but `rocm` for AMD's GPUs, which torch calls `cuda` too."""

FastPathName = Literal[
    "triton",
    "flex_attention",
    "grouped_product",
    "scaled_product",
    "scaled_grouped_product",
    "product_added_to_fp32",
    "attention_kernels",
    "recorded_steps",
    "compiled_layers",
    "fused_update",
    "convolution_kernel",
    "mamba_kernels",
    "linear_attention_kernels",
]


@dataclass(frozen=True)
class FastPath:
    """One fast path.

    Attributes:
        does: What it computes, and how.
        families: Kinds of devices that have it.
        elsewhere: What computes the same on other devices; None if other devices refuse the run.
        package: Python package that it comes from, if that is none of the requirements.
        module: Module of that package, which is there if it is installed.
    """

    does: str
    families: tuple[DeviceFamily, ...]
    elsewhere: str | None
    package: str = ""
    module: str = ""


_GPUS: Final[tuple[DeviceFamily, ...]] = ("cuda", "rocm")

FAST_PATHS: Final[Mapping[FastPathName, FastPath]] = MappingProxyType(
    {
        "triton": FastPath(
            "cross entropy and masked softmax by Triton kernels",
            _GPUS,
            "operations of torch, with fp32 copies",
        ),
        "flex_attention": FastPath(
            "attention of windows and documents by FlexAttention, which computes only blocks with visible pairs",
            _GPUS,
            "scaled_dot_product_attention with a dense mask",
        ),
        # On ROCm the kernel came later, and leaves out groups without rows (pytorch#174314).
        "grouped_product": FastPath("all experts of a layer in one product", ("cuda",), "a product for each expert"),
        # AMD's MI300 has another e4m3 (float8_e4m3fnuz).
        "scaled_product": FastPath("products in fp8 by tensor cores", ("cuda",), None),
        # Of NVIDIA's GPUs only Hopper has it in torch 2.13 (`device_facts.FP8_EXPERTS`).
        "scaled_grouped_product": FastPath("products of all experts in fp8 by one kernel", ("cuda",), None),
        "product_added_to_fp32": FastPath(
            "weight gradients of the head added in fp32 inside the product",
            _GPUS,
            "a product, then its addition in fp32",
        ),
        "attention_kernels": FastPath(
            "torch's flash and memory-efficient attention, in an order that suits generation",
            _GPUS,
            "the device's own choice for scaled_dot_product_attention",
        ),
        "recorded_steps": FastPath("generation by recorded CUDA graphs", _GPUS, "a launch for each kernel"),
        "compiled_layers": FastPath("transformer layers compiled by torch.compile", _GPUS, "eager layers"),
        # torch_npu and Gaudi's plugin have fused optimizers of their own, with other arguments.
        "fused_update": FastPath(
            "AdamW's update in one kernel, which also clips",
            ("cpu", "cuda", "rocm", "xpu"),
            "AdamW of torch, a kernel for each operation on all weights",
        ),
        "convolution_kernel": FastPath(
            "convolutions of recurrent blocks by one kernel",
            _GPUS,
            "operations of torch, one for each tap",
            "causal-conv1d",
            "causal_conv1d",
        ),
        "mamba_kernels": FastPath(
            "recurrences of Mamba and Mamba-2 by fused kernels",
            _GPUS,
            "scans by chunks in operations of torch",
            "mamba-ssm",
            "mamba_ssm",
        ),
        "linear_attention_kernels": FastPath(
            "the gated delta rule and RWKV's time mixing by Triton kernels",
            _GPUS,
            "scans by chunks in operations of torch",
            "flash-linear-attention",
            "fla",
        ),
    }
)
"""Fast paths by name."""
