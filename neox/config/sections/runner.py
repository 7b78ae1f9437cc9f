"""Sections of parallelism and of the launch: hosts, ports and launchers."""

from __future__ import annotations

from shlex import split
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Refused
from neox.config.sections.numbers import NonNegativeInt, Port, PositiveFloat, PositiveInt
from neox.devices import GPUS

if TYPE_CHECKING:
    GpuType: TypeAlias = str
else:
    GpuType = Literal[tuple(GPUS)]

PipelineScheduleName = Literal["1f1b", "interleaved", "dualpipev"]
"""Names of pipeline schedules; keys of `PIPELINE_SCHEDULES`."""


ContextKind = Literal["all_gather", "ulysses"]
"""What the ranks that divide a sample's tokens exchange in attention."""


class ParallelismConfig(Section):
    """Degrees of parallelism, and the division of layers into pipeline stages."""

    pipe_parallel_size: NonNegativeInt = 0
    """Number of pipeline stages. 0 and 1 both mean one stage (no pipeline)."""

    model_parallel_size: Annotated[NonNegativeInt, AfterValidator(lambda size: size or 1)] = 1
    """Number of tensor-parallel ranks that split every layer. 0 and 1 both mean that none are split."""

    sequence_parallel: bool = False
    """Shard the tokens of a micro batch over tensor ranks in norms, dropout and residuals, so that each rank keeps only
    its part of these activations. Ranks exchange a quarter more, and with gpt_j_residual a third more. The key belongs
    to a run, not to a model: checkpoints are the same, but dropout draws other masks."""

    context_parallel_size: PositiveInt = 1
    """Number of ranks that divide the tokens of each sample, for samples that are too long for one. They are
    neighbouring data-parallel ranks, which then read fewer samples by this factor. seq_length must be a multiple of
    twice this number. Checkpoints are the same."""

    context_parallel_kind: ContextKind = "all_gather"
    """What these ranks exchange in attention. `all_gather`: each rank gets the keys and values of all tokens; for any
    degree. `ulysses`: ranks exchange tokens for heads, so the degree must divide the heads of keys and values on each
    tensor rank."""

    expert_model_parallel_size: Annotated[
        PositiveInt,
        OnlyWith("moe_num_experts", above=1),
        Excludes("log_gradient_noise_scale"),
    ] = 1
    """Number of neighbouring data-parallel ranks that divide the experts (Megatron-LM's name). Each token goes to the
    ranks of its experts and back. Checkpoints are the same as without it."""

    pipe_partition_method: str = "type:transformer|mlp"
    """How layers are divided into stages: `uniform` (equal layer counts), `parameters` (equal parameter counts) or
    `type:REGEX` (equal counts of layers whose class name matches, ignoring case; blocks are `TransformerLayer`)."""

    pipeline_schedule: PipelineScheduleName = "1f1b"
    """Which layers a pipeline stage holds, and in which order it runs the micro batches of a step. All give the same
    losses and the same checkpoints. `1f1b`: one range of layers, forward and backward passes in turn. `interleaved`:
    several ranges (`virtual_stages`), so that stages wait less, pass on more, and keep more activations. `dualpipev`:
    two ranges, from both ends of the network, with at least two micro batches for each stage."""

    virtual_stages: Annotated[int | None, Field(ge=2), OnlyWith("pipeline_schedule", ("interleaved",))] = None
    """Ranges of layers on each stage with `pipeline_schedule: interleaved`, by default 2. Waiting is divided by it.
    Megatron's num_virtual_stages_per_pipeline_rank and num_layers_per_virtual_pipeline_stage are converted."""


class RunnerConfig(Section):
    """Hosts, ports and launchers."""

    hostfile: str | None = None
    """File of `host slots=N` lines."""

    include: Annotated[str | None, Excludes("exclude")] = None
    """Hosts and slots that are used: `worker-0:0,2@worker-1`."""

    exclude: str | None = None
    """Hosts and slots that are not used."""

    num_nodes: Annotated[int, Field(ge=-1), Refused("must be at least 1, or -1 for all hosts", when=(0,))] = -1
    """Number of hosts to use, from the start of the hostfile; -1 means all."""

    num_gpus: int | None = Field(None, ge=1, le=2**20)
    """Number of ranks on each host, by default one for each slot."""

    global_num_gpus: int | None = Field(None, ge=1, le=2**20)
    """Number of ranks over all hosts. By default it follows from the hosts. Give it in a dry run."""

    master_addr: str | None = None
    """Address of the first host."""

    master_port: Port | None = None
    """Port of the rendezvous, by default a free one (gpt-neox: 29500)."""

    launcher: Literal["local", "pdsh", "none", "slurm", "openmpi"] = "pdsh"
    """How ranks are started on several hosts; on one host they are always started locally. `none` prints the commands.
    gpt-neox's `mvapich` and DeepSpeed's `mpich` and `impi` are refused: use openmpi, slurm or pdsh."""

    launcher_args: Annotated[str | None, OnlyWith("launcher", ("slurm", "openmpi"))] = None
    """More arguments for srun or mpirun (DeepSpeed's --launcher_args), with a shell's quotes. For ssh there is the
    environment variable PDSH_SSH_ARGS_APPEND."""

    no_ssh_check: Annotated[bool, OnlyWith("launcher", ("pdsh",))] = False
    """Do not try ssh to the hosts first."""

    distributed_backend: Literal["auto", "nccl", "hccl", "xccl", "ccl", "gloo"] = "auto"
    """Backend of torch.distributed. `auto`: that of the accelerator, nccl for NVIDIA and AMD, hccl for Ascend and
    Gaudi, xccl for Intel, and gloo on CPUs. A backend that does not serve the accelerator is refused; gloo serves
    NVIDIA and AMD too. CPU ranks use gloo in any case, and a log line says so if another was named."""

    comment: Annotated[str | None, OnlyWith("launcher", ("slurm",))] = None
    """Comment passed to slurm."""

    account: Annotated[str | None, OnlyWith("launcher", ("slurm",))] = None
    """Account passed to slurm."""

    force_multi: Annotated[bool, OnlyWith("launcher", ("pdsh",))] = False
    """Launch through pdsh even if there is one host."""

    ssh_port: Annotated[Port | None, OnlyWith("launcher", ("pdsh",))] = None
    """Port of the hosts' ssh servers, by default the port of ssh's own configuration."""

    forward_environment: tuple[str, ...] | None = None
    """Environment variables that are passed to ranks on other hosts (`*` matches any text), instead of the default
    list: `NCCL_*`, `GLOO_*`, `OMP_*`, `HF_*`, `WANDB_*`, `TORCH_*`, `DS_*`, `PATH`, `LD_LIBRARY_PATH` and similar.
    Secrets (`*_KEY`, `*_TOKEN`) are passed separately, so that no command line and no log holds them."""

    doctor_timeout: Annotated[PositiveFloat, OnlyWith("launcher", ("pdsh",))] = 8.0
    """Seconds in which each host has to answer `deepy.py doctor` and the checks before a launch; raise it for busy
    hosts."""

    stop_timeout: PositiveFloat = 60.0
    """Seconds that ranks have to save and exit after SIGTERM or Ctrl-C, before they are killed."""

    gpu_type: GpuType | None = None
    """Kind of GPU that a file was made for, or that a plan is for: its memory and peak, unless gpu_memory_gib and
    peak_theoretical_tflops are given. On the command line (`--gpu-type`) it wins over these two in a file. The memory
    of this machine's GPUs wins over the kind in a file."""

    planned_num_gpus: int | None = Field(None, ge=1, le=2**20)
    """Number of GPUs for which a file's batch was chosen. It changes no run; a plan with another batch, because of
    another number of ranks, has a note with the key that keeps the batch. `tools/which_gpu.py` and `tools/ladder.py`
    plan with the batch of this number."""

    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of one GPU in GiB, with which the plan is compared. If neither this key nor gpu_type is given and a run
    uses only this machine's GPUs, their memory counts."""

    host_memory_gib: PositiveFloat | None = None
    """Main memory of each host in GiB, which its ranks share: CPU ranks for everything, GPU ranks for what they offload
    and what background saves copy. By default what the host has available; in a plan for `gpu_type`, each GPU's share
    of its usual host. A run that needs more is refused, and searches of layouts leave out what offloads more."""

    @field_validator("launcher", mode="before")
    @classmethod
    def _known_launcher(cls, value: Any) -> Any:
        """Refuse by name the launchers that only others have. As in DeepSpeed, case does not count."""
        if not isinstance(value, str):
            return value
        if value.lower() in ("mvapich", "mpich", "impi"):
            raise PydanticCustomError("launcher", "is not supported; use openmpi, slurm, pdsh or none")
        return value.lower()

    @field_validator("launcher_args")
    @classmethod
    def _closed_quotes(cls, value: str | None) -> str | None:
        """Refuse arguments that cannot be divided into words."""
        try:
            split(value or "")
        except ValueError as error:
            raise PydanticCustomError(
                "launcher_args", "cannot be divided into words: {why}", {"why": str(error)}
            ) from None
        return value
