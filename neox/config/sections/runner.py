"""Hosts, ports and launchers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from neox.config.sections.base import OnlyWith, Section


class RunnerConfig(Section):
    """Where ranks start and how."""

    hostfile: str | None = None
    """File of `host slots=N` lines."""

    include: str | None = None
    """Hosts and slots to use: `worker-0:0,2@worker-1`."""

    exclude: str | None = None
    """Hosts and slots not to use."""

    num_nodes: int = -1
    """Use the first so many hosts; -1 is all."""

    num_gpus: int | None = Field(None, ge=1, le=2**20)
    """Ranks on each host; all slots where unset."""

    global_num_gpus: int | None = Field(None, ge=1, le=2**20)
    """Ranks over all hosts; counted from hosts where unset, explicit in a dry run."""

    master_addr: str | None = None
    """Address of the first host."""

    master_port: int | None = Field(None, ge=1, le=65535)
    """Port of the rendezvous; a free one where unset (gpt-neox: 29500)."""

    launcher: Literal["local", "pdsh", "none", "slurm", "openmpi"] = "pdsh"
    """How ranks are started on several hosts; one host is always started locally. `none` prints the commands.
    gpt-neox's `mvapich` is refused: use openmpi, slurm or pdsh."""

    no_ssh_check: Annotated[bool, OnlyWith("launcher", ("pdsh",))] = False
    """Do not try ssh to the hosts first."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """torch.distributed backend; nccl becomes gloo on a machine without GPU, said aloud."""

    comment: Annotated[str | None, OnlyWith("launcher", ("slurm",))] = None
    """Comment passed to slurm."""

    account: Annotated[str | None, OnlyWith("launcher", ("slurm",))] = None
    """Account passed to slurm."""

    force_multi: Annotated[bool, OnlyWith("launcher", ("pdsh",))] = False
    """Launch through pdsh even where there is one host."""

    ssh_port: Annotated[int | None, OnlyWith("launcher", ("pdsh",))] = Field(None, ge=1, le=65535)
    """Port of the hosts' ssh servers; what ssh's own configuration says where unset."""

    forward_environment: tuple[str, ...] | None = None
    """Environment variables (with `*`) that travel to the ranks on other hosts, in place of the default list: NCCL_*,
    GLOO_*, OMP_*, HF_*, WANDB_*, TORCH_*, DS_*, PATH, LD_LIBRARY_PATH and their kin. Secrets (..._KEY, ..._TOKEN) among
    them travel apart, on no command line and in no log."""

    doctor_timeout: Annotated[float, OnlyWith("launcher", ("pdsh",))] = Field(8.0, gt=0)
    """Seconds that each host has to answer `deepy.py doctor` and the checks before a launch; busy hosts need more."""

    stop_timeout: float = Field(60.0, gt=0)
    """Seconds that ranks have to save and end after SIGTERM or Ctrl-C, before they are killed."""

    gpu_memory_gib: float = Field(80.0, gt=0)
    """Memory of one GPU, in GiB, that a dry run compares with."""

    @field_validator("launcher", mode="before")
    @classmethod
    def _no_mvapich(cls, value: Any) -> Any:
        """Refuse by name what gpt-neox had and this has not."""
        if value == "mvapich":
            raise PydanticCustomError("mvapich", "is not supported; use openmpi, slurm, pdsh or none")
        return value
