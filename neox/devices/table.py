"""The table of devices: what each kind has of number formats, backends and fast paths, and names of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

DeviceFamily = Literal["cpu", "cuda", "rocm", "npu", "xpu", "hpu"]
"""Kind of device: torch's names, but `rocm` for AMD's GPUs, which torch calls `cuda` too."""

AttentionBackend = Literal["auto", "flash", "cudnn", "flex", "memory_efficient", "math"]
"""Which of torch's kernels computes attention that is `flash` here."""

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
    """A kernel or a way to run that only some kinds of devices have.

    Attributes:
        does: What it computes, and how.
        elsewhere: What computes the same on other devices; None if other devices refuse the run.
        package: Python package that it comes from, if that is none of the requirements.
        module: Module of that package, which is there if it is installed.
    """

    does: str
    elsewhere: str | None
    package: str = ""
    module: str = ""


FAST_PATHS: Final[Mapping[FastPathName, FastPath]] = MappingProxyType(
    {
        "triton": FastPath(
            "cross entropy and masked softmax by Triton kernels",
            "operations of torch, with fp32 copies",
        ),
        "flex_attention": FastPath(
            "attention of windows and documents by FlexAttention, which computes only blocks with visible pairs",
            "scaled_dot_product_attention with a dense mask",
        ),
        "grouped_product": FastPath("all experts of a layer in one product", "a product for each expert"),
        "scaled_product": FastPath("products in fp8 by tensor cores", None),
        "scaled_grouped_product": FastPath("products of all experts in fp8 by one kernel", None),
        "product_added_to_fp32": FastPath(
            "weight gradients of the head added in fp32 inside the product",
            "a product, then its addition in fp32",
        ),
        "attention_kernels": FastPath(
            "torch's flash and memory-efficient attention, in an order that suits generation",
            "the device's own choice for scaled_dot_product_attention",
        ),
        "recorded_steps": FastPath("generation by recorded CUDA graphs", "a launch for each kernel"),
        "compiled_layers": FastPath("transformer layers compiled by torch.compile", "eager layers"),
        "fused_update": FastPath(
            "AdamW's update in one kernel, which also clips",
            "AdamW of torch, a kernel for each operation on all weights",
        ),
        "convolution_kernel": FastPath(
            "convolutions of recurrent blocks by one kernel",
            "operations of torch, one for each tap",
            "causal-conv1d",
            "causal_conv1d",
        ),
        "mamba_kernels": FastPath(
            "recurrences of Mamba and Mamba-2 by fused kernels",
            "scans by chunks in operations of torch",
            "mamba-ssm",
            "mamba_ssm",
        ),
        "linear_attention_kernels": FastPath(
            "the gated delta rule and RWKV's time mixing by Triton kernels",
            "scans by chunks in operations of torch",
            "flash-linear-attention",
            "fla",
        ),
    }
)
"""Fast paths by name."""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        devices: What people call several of them.
        vendor: Name of the vendor for messages; empty for CPUs.
        torch_type: Type of these devices in torch, which is DeepSpeed's name for them (`DS_ACCELERATOR`), too.
        collectives: Backends of torch.distributed that serve them, the usual one first. gloo copies no tensors of
            others than CPUs and NVIDIA's and AMD's GPUs.
        attention: Values of `attention_backend` that they have besides `auto`.
        fast_paths: The fast paths that they have.
    """

    devices: str
    vendor: str
    torch_type: Literal["cpu", "cuda", "npu", "xpu", "hpu"]
    collectives: tuple[str, ...]
    attention: tuple[AttentionBackend, ...] = ("math",)
    fast_paths: frozenset[FastPathName] = frozenset()


_OF_GPUS: Final[frozenset[FastPathName]] = frozenset(
    (
        "triton",
        "flex_attention",
        "product_added_to_fp32",
        "attention_kernels",
        "recorded_steps",
        "compiled_layers",
        "fused_update",
        "convolution_kernel",
        "mamba_kernels",
        "linear_attention_kernels",
    )
)

DEVICES: Final[Mapping[DeviceFamily, DeviceKind]] = MappingProxyType(
    {
        "cpu": DeviceKind(
            devices="CPUs",
            vendor="",
            torch_type="cpu",
            collectives=("gloo",),
            attention=("flash", "math"),
            fast_paths=frozenset(("fused_update",)),
        ),
        # Of NVIDIA's GPUs only Hopper has `scaled_grouped_product` in torch 2.13 (`FP8_EXPERTS`).
        "cuda": DeviceKind(
            devices="NVIDIA's GPUs",
            vendor="NVIDIA",
            torch_type="cuda",
            collectives=("nccl", "gloo"),
            attention=("flash", "cudnn", "flex", "memory_efficient", "math"),
            fast_paths=_OF_GPUS | {"grouped_product", "scaled_product", "scaled_grouped_product"},
        ),
        # Its kernel of `grouped_product` came later, and leaves out groups without rows (pytorch#174314). Its MI300 has
        # another e4m3 (float8_e4m3fnuz) than `scaled_product` multiplies. RCCL is called nccl, too.
        "rocm": DeviceKind(
            devices="AMD's GPUs",
            vendor="AMD",
            torch_type="cuda",
            collectives=("nccl", "gloo"),
            attention=("flash", "flex", "memory_efficient", "math"),
            fast_paths=_OF_GPUS,
        ),
        # torch_npu and Gaudi's plugin have fused optimizers of their own, with other arguments.
        "npu": DeviceKind(devices="Ascend", vendor="Ascend", torch_type="npu", collectives=("hccl",)),
        "xpu": DeviceKind(
            devices="Intel's GPUs",
            vendor="Intel",
            torch_type="xpu",
            collectives=("xccl", "ccl"),
            fast_paths=frozenset(("fused_update",)),
        ),
        "hpu": DeviceKind(devices="Gaudi", vendor="Gaudi", torch_type="hpu", collectives=("hccl",)),
    }
)
"""Kinds of devices."""


def family_has(family: DeviceFamily | None, name: FastPathName) -> bool:
    """Return whether a kind of device has a fast path; False for a kind that is not known."""
    return family is not None and name in DEVICES[family].fast_paths


LEAST_CAPABILITY: Final[Mapping[str, float]] = MappingProxyType({"bf16": 8.0, "fp16": 5.3, "fp8": 8.9})
"""Lowest compute capability of NVIDIA's GPUs that multiply a number format natively."""

FP8_EXPERTS: Final = 9.0
"""Compute capability of NVIDIA's GPUs with products of groups in fp8 and scales of rows (`torch._scaled_grouped_mm`):
only Hopper has them in torch 2.13. Blackwell has them for scales of blocks of 32 numbers."""
