"""Sections of parallelism and of the launch: hosts, ports and launchers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Refused
from neox.config.sections.numbers import NonNegativeInt, Port, PositiveFloat, PositiveInt
from neox.config.sections.pipeline_schedules import PipelineScheduleName


class ParallelismConfig(Section):
    """Degrees of parallelism, and the division of layers into pipeline stages."""

    pipe_parallel_size: NonNegativeInt = 0
    """Pipeline stages. 0 and 1 both mean one stage (no pipeline)."""

    model_parallel_size: PositiveInt = 1
    """Tensor-parallel ranks that split every layer."""

    sequence_parallel: bool = False
    """Divide the tokens of a micro batch over tensor ranks in norms, dropout and residuals, so that each rank keeps its
    share of these activations. Ranks exchange a quarter more, with gpt_j_residual a third. A choice of the run:
    checkpoints are the same, and dropout draws other masks."""

    pipe_partition_method: str = "type:transformer|mlp"
    """How layers are divided into stages: `uniform` (equal layer counts), `parameters` (equal parameter counts) or
    `type:REGEX` (equal counts of layers whose class name matches, ignoring case; blocks are `TransformerLayer`)."""

    pipeline_schedule: PipelineScheduleName = "1f1b"
    """Order in which pipeline stages run the micro batches of a step. `1f1b`: forward and backward passes in turn."""


class RunnerConfig(Section):
    """Hosts, ports and launchers."""

    hostfile: str | None = None
    """File of `host slots=N` lines."""

    include: Annotated[str | None, Excludes("exclude")] = None
    """Hosts and slots to use: `worker-0:0,2@worker-1`."""

    exclude: str | None = None
    """Hosts and slots not to use."""

    num_nodes: Annotated[int, Field(ge=-1), Refused("must be at least 1, or -1 for all hosts", when=(0,))] = -1
    """Number of hosts to use, the first of the hostfile; -1 is all."""

    num_gpus: int | None = Field(None, ge=1, le=2**20)
    """Ranks on each host; all slots where unset."""

    global_num_gpus: int | None = Field(None, ge=1, le=2**20)
    """Ranks over all hosts; derived from the hosts where unset. Give it in a dry run."""

    master_addr: str | None = None
    """Address of the first host."""

    master_port: Port | None = None
    """Port of the rendezvous; a free one where unset (gpt-neox: 29500)."""

    launcher: Literal["local", "pdsh", "none", "slurm", "openmpi"] = "pdsh"
    """How ranks are started on several hosts; one host is always started locally. `none` prints the commands.
    gpt-neox's `mvapich` is refused: use openmpi, slurm or pdsh."""

    no_ssh_check: Annotated[bool, OnlyWith("launcher", ("pdsh",))] = False
    """Do not try ssh to the hosts first."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """torch.distributed backend; On a machine without GPUs it is gloo; a log line says so if nccl was asked for."""

    comment: Annotated[str | None, OnlyWith("launcher", ("slurm",))] = None
    """Comment passed to slurm."""

    account: Annotated[str | None, OnlyWith("launcher", ("slurm",))] = None
    """Account passed to slurm."""

    force_multi: Annotated[bool, OnlyWith("launcher", ("pdsh",))] = False
    """Launch through pdsh even where there is one host."""

    ssh_port: Annotated[Port | None, OnlyWith("launcher", ("pdsh",))] = None
    """Port of the hosts' ssh servers; from ssh's own configuration where unset."""

    forward_environment: tuple[str, ...] | None = None
    """Environment variables (`*` matches any text) passed to ranks on other hosts, instead of the default list: NCCL_*,
    GLOO_*, OMP_*, HF_*, WANDB_*, TORCH_*, DS_*, PATH, LD_LIBRARY_PATH and similar. Secrets (..._KEY, ..._TOKEN) are
    passed separately, on no command line and in no log."""

    doctor_timeout: Annotated[PositiveFloat, OnlyWith("launcher", ("pdsh",))] = 8.0
    """Seconds each host has to answer `deepy.py doctor` and the checks before a launch; raise it for busy hosts."""

    stop_timeout: PositiveFloat = 60.0
    """Seconds that ranks have to save and exit after SIGTERM or Ctrl-C, before they are killed."""

    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of one GPU, in GiB, that the plan is compared with; that of this machine's GPUs counts where a run uses
    these alone and this is not given."""

    host_memory_gib: PositiveFloat | None = None
    """Main memory of each host, in GiB, that its CPU ranks share; what the host has available where unset. A run that
    needs more is refused."""

    @field_validator("launcher", mode="before")
    @classmethod
    def _no_mvapich(cls, value: Any) -> Any:
        """Refuse by name the launcher that only gpt-neox has."""
        if value == "mvapich":
            raise PydanticCustomError("mvapich", "is not supported; use openmpi, slurm, pdsh or none")
        return value
