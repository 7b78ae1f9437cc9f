"""ZeRO 3's states and weights in files of a local disk, for `device: nvme`.

A tensor's memory is a file without a name that is mapped into the process. The kernel reads and writes its pages, keeps
as many of them in main memory as fit, and deletes the file when the process ends, in whatever way. DeepSpeed sees
tensors that are offloaded to main memory, so saving and loading know nothing of files.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from neox.errors import TrainingError, os_errors

_SMALLEST_BYTES = 2**16
"""Size below which tensors stay in main memory, because a file takes whole pages."""
_WILL_NEED = 3
"""`MADV_WILLNEED` of the system call `madvise`."""


def file_tensor(directory: Path, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in a new file.

    Args:
        directory: Directory of the file, which is created if it is missing.
        numel: Number of elements, above 0.
        dtype: Type of an element.

    Raises:
        TrainingError: If the directory cannot be written, or its disk is too small.
    """
    size = numel * dtype.itemsize
    what = f"nvme_path {directory} cannot hold another {size / 2**20:,.0f} MiB of offloaded states"
    with os_errors(TrainingError, what):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            # A mapped file without the blocks on disk would end the process by a signal once the disk is full.
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=numel, dtype=dtype)


def move_to_file(tensor: Tensor, directory: Path) -> None:
    """Let a tensor's memory be a file; a small one, and one that is in a file already, stay where they are."""
    if tensor.nbytes >= _SMALLEST_BYTES and not is_in_file(tensor):
        moved = file_tensor(directory, tensor.numel(), tensor.dtype).view(tensor.shape)
        tensor.data = moved.copy_(tensor.detach())


def is_in_file(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is a file."""
    return tensor.untyped_storage().filename is not None


def move_weights_to_files(layer: nn.Module, directory: Path) -> None:
    """Move this rank's parts of the weights of a layer that ZeRO 3 has divided."""
    parameter: Any  # with DeepSpeed's attributes
    for parameter in layer.parameters():
        if not parameter.ds_persist:
            move_to_file(parameter.ds_tensor, directory)


class SwappedStage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """DeepSpeed's ZeRO 3. Tensors that it offloads are in files if the configuration has an `nvme_path`.

    DeepSpeed's own `device: nvme` is not used. It compiles 15 C++ files on every host against libaio, locks its buffers
    in memory (systems allow 8 MiB by default), copies its files into checkpoints, and loads them only in the same
    layout.
    """

    def _configure_offloading(self, optimizer: Any, weights: Any) -> None:
        """Read from the configuration what is offloaded, and to which directories."""
        super()._configure_offloading(optimizer, weights)
        self.states_directory: Path | None = getattr(optimizer, "nvme_path", None)
        self.weights_directory: Path | None = getattr(weights, "nvme_path", None)

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        """Allocate the weights of each group of parameters."""
        if self.weights_directory is None:
            super()._create_param_groups_fp16_flat_cpu_memory()
            return
        for group in self.trainable_param_groups:
            numel = sum(parameter.partition_numel() for parameter in group["params"])
            self.param_groups_fp16_flat_cpu_memory.append(file_tensor(self.weights_directory, numel, self.dtype))

    def _create_fp32_partitions(self) -> None:
        """Copy the weights of each sub-group to fp32."""
        if self.states_directory is None:
            super()._create_fp32_partitions()
            return
        self.subgroup_to_device = dict.fromkeys(range(len(self.fp16_groups)), "cpu")
        for weights, ids in zip(self.fp16_partitioned_groups_flat, self.fp16_partitioned_groups_flat_id, strict=True):
            copied = file_tensor(self.states_directory, weights.numel(), torch.float32).copy_(weights)
            copied.ds_id = f"{ids[0]}_{ids[-1]}"  # type: ignore[attr-defined]
            self.fp32_partitioned_groups_flat.append(copied.requires_grad_())
        for group in self.optimizer.param_groups:
            group["params"] = []  # `_optimizer_step` sets them

    def initialize_optimizer_states(self) -> None:
        """Allocate the fp32 gradients."""
        if self.states_directory is None:
            super().initialize_optimizer_states()
            return
        for weights in self.fp32_partitioned_groups_flat:
            weights.grad = file_tensor(self.states_directory, weights.numel(), torch.float32)

    def _optimizer_step(self, sub_group_id: int) -> None:
        """Update a sub-group, while the next one is read."""
        if self.states_directory is None:
            super()._optimizer_step(sub_group_id)
            return
        for weights in self.fp32_partitioned_groups_flat[sub_group_id + 1 : sub_group_id + 2]:
            for tensor in self._in_files(weights):
                _read_ahead(tensor)
        super()._optimizer_step(sub_group_id)
        self.keep_states(self.fp32_partitioned_groups_flat[sub_group_id])

    def keep_states(self, weights: Tensor) -> None:
        """Move the states of a sub-group to files, if the states belong there; the optimizer has just made them."""
        if self.states_directory is not None:
            for state in self._states(weights):
                move_to_file(state, self.states_directory)

    def _states(self, weights: Tensor) -> list[Tensor]:
        return [state for state in self.optimizer.state.get(weights, {}).values() if isinstance(state, Tensor)]

    def _in_files(self, weights: Tensor) -> list[Tensor]:
        tensors = (weights, weights.grad, *self._states(weights))
        return [tensor for tensor in tensors if tensor is not None and is_in_file(tensor)]


def _read_ahead(tensor: Tensor) -> None:
    """Let the kernel read the pages of a tensor's file that are not in memory, meanwhile.

    It is not told which pages can go. It finds out when it must, and mapping all pages again takes longer than the
    update.
    """
    ctypes.CDLL(None).madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), _WILL_NEED)
