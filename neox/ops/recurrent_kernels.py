"""Fused kernels of recurrent blocks, from packages that may be installed on machines with GPUs.

    our function            kernel                     its package             takes
    causal_convolution      causal_conv1d_fn           causal-conv1d           2 to 4 taps
    mamba's selective_scan  selective_scan_fn          mamba-ssm               no state, one document in a row
    mamba2's chunked_scan   mamba_chunk_scan_combined  mamba-ssm               16 bits
    gated_delta_scan        chunk_gated_delta_rule     flash-linear-attention  16 bits
    wkv_scan                chunk_rwkv6                flash-linear-attention  16 bits

The last three kernels would multiply 32 bits in TF32, so they get inputs of 16 bits only (steps and states are fp32).
What a kernel does not take, runs with `deterministic` (their backward passes add up in any order), and steps of one
token are computed by torch's operations. Each function here has the arguments and results of ours.

Legend: B batch, S sequence, N heads, K width of keys, V width of values, D state dim.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from neox.devices import FAST_PATHS, FastPathName
from neox.errors import LaunchError
from neox.ops.fast_paths import has_fast_path, machine_has_fast_path

CONVOLUTION: Final[FastPathName] = "convolution_kernel"
MAMBA: Final[FastPathName] = "mamba_kernels"
LINEAR_ATTENTION: Final[FastPathName] = "linear_attention_kernels"
_MAMBA2_CHUNK: Final = 256


class _Kernel(NamedTuple):
    """A function of a package."""

    path: FastPathName
    module: str
    function: str


_CAUSAL_CONV1D: Final = _Kernel(CONVOLUTION, "causal_conv1d", "causal_conv1d_fn")
_SELECTIVE_SCAN: Final = _Kernel(MAMBA, "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
_MAMBA2_SCAN: Final = _Kernel(MAMBA, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
_GATED_DELTA: Final = _Kernel(LINEAR_ATTENTION, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
_RWKV6: Final = _Kernel(LINEAR_ATTENTION, "fla.ops.rwkv6", "chunk_rwkv6")
_OF_KIND: Final[Mapping[str, tuple[_Kernel, ...]]] = MappingProxyType(
    {
        "mamba": (_CAUSAL_CONV1D, _SELECTIVE_SCAN),
        "mamba2": (_CAUSAL_CONV1D, _MAMBA2_SCAN),
        "gated_delta": (_CAUSAL_CONV1D, _GATED_DELTA),
        "rwkv": (_RWKV6,),
    }
)


def import_kernels(
    mixer: Literal["mamba", "mamba2", "gated_delta", "rwkv"], device: torch.device | str | None = None
) -> None:
    """Import the kernels of a mixer that this machine's accelerator takes, before torch.compile traces their calls.

    A compiled block cannot import: its graph would break there. What does not fit this torch, whatever it raises, is an
    error where a run calls it. A deterministic run calls none, nor do weights on a CPU.

    Args:
        mixer: Kind of mixer.
        device: Device of its weights; None for torch's default.
    """
    on_cpu = torch.device(device or torch.get_default_device()).type == "cpu"
    if on_cpu or torch.are_deterministic_algorithms_enabled():
        return
    for kernel in _OF_KIND[mixer]:
        if machine_has_fast_path(kernel.path):
            with suppress(Exception):
                _function(kernel)


def takes_kernel(name: FastPathName, x: Tensor) -> bool:
    """Return whether a tensor's device has these kernels, and the run may use them."""
    return has_fast_path(name, x.device) and not torch.are_deterministic_algorithms_enabled()


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None) -> Tensor:
    """Convolve: [B, S, C] -> [B, S, C]; arguments as of `neox.ops.causal_convolution`."""
    fused = _function(_CAUSAL_CONV1D)
    if x.stride(0) % 8 or x.stride(1) % 8 or x.stride(2) != 1:  # what the kernel's loads need
        x = x.contiguous()
    documents = None if positions is None else _numbers_of_documents(positions == 0)
    y: Tensor = fused(x.transpose(1, 2), weight, bias, seq_idx=documents)
    return y.transpose(1, 2)


def selective_scan(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Run Mamba's recurrence from states of zero: [B, S, F] -> [B, S, F]."""
    fused = _function(_SELECTIVE_SCAN)
    y: Tensor = fused(*(tensor.transpose(1, 2).contiguous() for tensor in (x, dt)), decay, b.mT, c.mT)
    return y.transpose(1, 2)


def chunked_scan(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run Mamba-2's recurrence; return outputs [B, S, N, P] and the last states [B, N, P, D], fp32."""
    fused = _function(_MAMBA2_SCAN)
    documents = None if starts is None else _numbers_of_documents(_first_tokens(starts))
    y, last = fused(
        x, dt, decay, b, c, _MAMBA2_CHUNK, initial_states=state, seq_idx=documents, return_final_states=True
    )
    return y.float(), last.float()


def gated_delta_scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule; return outputs [B, S, N, V] and the last states [B, N, K, V]."""
    fused = _function(_GATED_DELTA)
    copies = values.shape[2] // keys.shape[2]
    if copies > 1:  # only newer versions share keys between heads
        queries, keys = queries.repeat_interleave(copies, 2), keys.repeat_interleave(copies, 2)
    inputs = (queries, keys, values, log_decay, strength)
    return _in_documents(fused, inputs, (), state, starts, use_qk_l2norm_in_kernel=True)


def wkv_scan(
    receptance: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Mix time as RWKV 6; return outputs [B, S, N, V], fp32, and the last states [B, N, K, V]."""
    fused = _function(_RWKV6)
    y, last = _in_documents(fused, (receptance, keys, values, log_decay), (bonus,), state, starts, scale=1.0)
    return y.float(), last


def _in_documents(
    fused: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    state: Tensor | None,
    starts: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Call a kernel of flash-linear-attention, which takes documents in one row of all tokens.

    Args:
        fused: The kernel.
        inputs: Tensors [B, S, N, ...].
        weights: Tensors that do not depend on tokens.
        state: States before the first token; None for zeros.
        starts: Index in the row at which each token's document starts, [B, S]; None for one document a row.
        **settings: Further arguments.
    """
    if starts is None:
        return fused(*inputs, *weights, initial_state=state, output_final_state=True, **settings)
    batch, length = starts.shape
    firsts = _first_tokens(starts).flatten().nonzero().squeeze(1)
    ends = torch.cat((firsts, firsts.new_tensor([batch * length])))
    joined = [tensor.reshape(1, batch * length, *tensor.shape[2:]) for tensor in inputs]
    y, last = fused(*joined, *weights, output_final_state=True, cu_seqlens=ends, **settings)
    # The states of each row's last document.
    numbers = _first_tokens(starts).flatten().cumsum(0).view(batch, length)[:, -1] - 1
    return y.view(batch, length, *y.shape[2:]), last[numbers]


def _first_tokens(starts: Tensor) -> Tensor:
    """Return which tokens are the first of their document, bool [B, S]; a row begins with one."""
    first = starts == torch.arange(starts.shape[1], device=starts.device)
    first[:, 0] = True
    return first


def _numbers_of_documents(first: Tensor) -> Tensor:
    """Return the number of each token's document in its row, int32 [B, S]."""
    return first.cumsum(1, dtype=torch.int32)


def _function(kernel: _Kernel) -> Callable[..., Any]:
    """Return a function of a package that is installed.

    Raises:
        LaunchError: It cannot be imported: built for another version of torch, or too old.
    """
    try:
        module = sys.modules.get(kernel.module)  # torch.compile follows this, but no import
        if module is None:
            module = importlib.import_module(kernel.module)
        found: Callable[..., Any] = getattr(module, kernel.function)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        package = FAST_PATHS[kernel.path].package
        raise LaunchError(
            f"{package} is installed, but {kernel.module}.{kernel.function} cannot be imported ({error}); install the "
            "version for this torch, or remove it: torch's operations compute the same"
        ) from error
    return found
