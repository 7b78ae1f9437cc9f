"""Construction of the training engine: the network, the optimizer, DeepSpeed's engine and the way its steps run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.partition_parameters import Init
from torch import Tensor, nn

from neox.architecture.recurrence import selective_fp32
from neox.devices import FP8_EXPERTS, LEAST_CAPABILITY
from neox.engine.checkpoints.run_files import RunFiles
from neox.engine.checkpoints.run_start import RunStart
from neox.engine.deepspeed_patches import (
    PipelineEngine,
    PlainEngine,
    clips_itself,
    copy_group,
    counts_in_norm,
    hidden_stdout,
    move_weights_to_files,
    runtime_json,
    shard_over_same_experts,
)
from neox.engine.deepspeed_patches.startup import import_muon_uncompiled, restore_linear
from neox.engine.device import other_paths
from neox.engine.distributed import grid_mpu
from neox.engine.engine import Engine
from neox.engine.feature import MakeFeatures, TrainedModel, no_features
from neox.engine.measurements import NoTimers, PassTimers, StepTimers, Timers
from neox.engine.micro_batches import LabelWeights, MicroBatchRunner, PipelineRunner, WholeNetworkRunner
from neox.engine.optimizer_tensors import matrix_parts, optimizer_tensors, parameter_names
from neox.engine.pipeline.stage_module import PipelineGPT
from neox.errors import ConfigError, LaunchError
from neox.log import get_logger
from neox.model import GPT, Block, GroupedLinear, biased_routers, build_layer, share_parameters
from neox.objectives import Objective, build_objective
from neox.ops import DTYPES, FP8_RECIPES, device_family
from neox.optim import ClippedOptimizer, ExpertGroups, Muon, NormScope, build_optimizer
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear
from neox.plan import RunPlan
from neox.plan.devices.compiled import compiles
from neox.plan.devices.unsupported import unsupported_by_device
from neox.plan.run_identity import run_identity

_log = get_logger(__name__)
_GRAPHS = 64
"""Graphs of one layer class: kinds of attention, modes, lengths. torch stops compiling after 8 without a word."""


def initialize_engine(
    plan: RunPlan, grid: ParallelGrid, device: torch.device, make_features: MakeFeatures = no_features
) -> Engine:
    """Build the network with its initial weights and give it to DeepSpeed; all ranks call it together.

    Nothing is loaded: a run begins with `neox.engine.open_engine`.
    """
    objective = build_objective(plan)
    model = build_model(plan, grid, objective, device)
    run = run_identity(plan.config)
    engine = build_engine(plan, grid, device, objective, model, RunStart(run), RunFiles(run), make_features)
    for feature in engine.features:
        feature.load(engine, RunStart(run))
    return engine


def build_engine(
    plan: RunPlan,
    grid: ParallelGrid,
    device: torch.device,
    objective: Objective,
    model: nn.Module,
    start: RunStart,
    run_files: RunFiles,
    make_features: MakeFeatures,
) -> Engine:
    """Give a model to DeepSpeed, with an optimizer; all ranks call it together.

    Only this function and `build_model` know which kinds of engine there are. DeepSpeed's constructor changes what it
    is given, so the order matters:

        ours                                   DeepSpeed's constructor                     ours again
        optimizer of the model's parameters -> wraps it (table of `neox.engine.engine`):   states are cleared
                                                 the optimizer then holds fp32 copies,
                                                 and some wrappers take a step
        Muon                                -> flattens parameters                         learns where matrices are
        biases of routers, in fp32          -> rounds all parameters to the precision      biases in fp32 again
        settings, clipping with ZeRO 0      -> gets neither (`runtime_json`)               the optimizer clips

    Args:
        plan: The run.
        grid: This rank's grid.
        device: Device of the model.
        objective: What a batch is and what its loss is.
        model: The network with its weights.
        start: How the run starts.
        run_files: What checkpoints say of the run.
        make_features: Builds what takes part in the training besides.
    """
    for line in other_paths(plan, device):
        _log.warning(line)
    if plan.config.deepspeed.zero_optimization.stage < 3:
        restore_linear()

    # With ZeRO 0 our optimizer computes the norm of the gradient: over which ranks, and of which parameters.
    norm_scope = None
    if clips_itself(plan):
        group = grid.model_group if grid.pp_size * grid.tp_size > 1 else None
        norm_scope = NormScope(group, lambda parameter: counts_in_norm(parameter, grid), grid.ep_group)
    optimizer = build_optimizer(plan, model.named_parameters(), norm_scope)
    if grid.ep_group is not None and grid.edp_group is not None:
        optimizer.expert_groups = ExpertGroups(same=grid.edp_group, divided=grid.ep_group)

    # Biases of routers move in small steps, so they stay fp32.
    biases: list[tuple[nn.Parameter, Tensor]] = []
    for router in biased_routers(model):
        assert router.selection_bias is not None
        biases.append((router.selection_bias, router.selection_bias.detach().clone()))

    deepspeed_engine: PlainEngine
    if isinstance(model, PipelineGPT):
        deepspeed_engine = _deepspeed_engine(PipelineEngine, plan, model, model.mpu(), optimizer)
    else:
        deepspeed_engine = _deepspeed_engine(PlainEngine, plan, model, grid_mpu(grid), optimizer)
        if plan.config.deepspeed.zero_optimization.overlap_comm is not False and isinstance(model, GPT):
            deepspeed_engine.reduce_during_backward(list(model.sequential))
    for parameter, bias in biases:
        parameter.data = bias
    # Some of DeepSpeed's wrappers take a step on zero gradients to allocate the optimizer's state. The learning rate is
    # 0 so far, so weights did not change, but the counter of steps and momenta did.
    optimizer.state.clear()
    if isinstance(optimizer, Muon):
        tensors = tuple(optimizer_tensors(plan, grid, model, deepspeed_engine.optimizer, optimizer))
        names = parameter_names(model, plan.layers)
        optimizer.parts = matrix_parts(plan, grid, model, names, tensors, split=optimizer.split_fused)
        optimizer.device = deepspeed_engine.device

    trained = TrainedModel(plan, grid, device, objective, deepspeed_engine, optimizer)
    features = make_features(trained, start)

    timers: Timers = NoTimers()
    if plan.config.deepspeed.wall_clock_breakdown:
        timers = StepTimers(device)
    elif any(feature.needs_computing_time for feature in features):
        timers = PassTimers(device)
    deepspeed_engine.step_timers = timers

    weights = LabelWeights.of(plan, objective, grid)
    runner: MicroBatchRunner
    if isinstance(deepspeed_engine, PipelineEngine):
        runner = PipelineRunner(deepspeed_engine, objective, weights, grid, device)
    else:
        runner = WholeNetworkRunner(deepspeed_engine, objective, weights, grid, device, timers)
    return Engine(trained, runner, timers, run_files, features)


def _deepspeed_engine(
    kind: Callable[..., Any], plan: RunPlan, model: nn.Module, mpu: Any, optimizer: ClippedOptimizer
) -> Any:
    """Return DeepSpeed's engine of a kind."""
    config = runtime_json(plan)
    import_muon_uncompiled()
    with hidden_stdout():
        return kind(
            args=None,
            model=model,
            optimizer=optimizer,
            mpu=mpu,
            dist_init_required=False,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )


def build_model(
    plan: RunPlan,
    grid: ParallelGrid,
    objective: Objective,
    device: torch.device,
    loaded: Collection[int] = (),
) -> nn.Module:
    """Build this rank's part of the network with its initial weights, in the precision of training.

    Args:
        plan: The run.
        grid: This rank's grid.
        objective: What the last stage computes.
        device: Device of the parameters.
        loaded: Layers whose weights are read from a checkpoint next: drawing them would cost a rank seconds for each
            billion of parameters.

    Raises:
        ConfigError: The plan asks for something that devices of this kind do not have. The launcher has refused it,
            unless nobody asked the hosts.
        LaunchError: The plan asks for something that this rank's GPU is too old for.
    """
    if problems := list(unsupported_by_device(plan, device_family(device.type))):
        raise ConfigError(problems)
    dtype = DTYPES[plan.precision]
    model: nn.Module
    if plan.config.deepspeed.zero_optimization.stage == 3:
        model = _partitioned_model(plan, grid, device, dtype, loaded)
    elif grid.pp_size > 1:
        model = PipelineGPT(plan, grid, objective, device=device, dtype=dtype, loaded=loaded)
    else:
        build = partial(build_layer, plan, grid=grid, device=device, dtype=dtype, loaded=loaded)
        model = GPT(plan, grid, build=build)
        share_parameters(enumerate(model.sequential), plan.layers)
    multiply_in_fp8(model, plan, device)
    choose_attention_backend(model, plan)
    compile_blocks(model, plan, device)
    return model


def _partitioned_model(
    plan: RunPlan, grid: ParallelGrid, device: torch.device, dtype: torch.dtype, loaded: Collection[int]
) -> GPT:
    """Build for ZeRO 3: partition each layer over data ranks before the next is built.

    So a model larger than a device's memory can be built.
    """
    zero = plan.config.deepspeed.zero_optimization
    directory = zero.weights_directory
    copies = copy_group(grid, zero.zero_hpz_partition_size or 1)

    def build(index: int) -> nn.Module:
        layer = build_layer(plan, index, grid, device=device, dtype=dtype, loaded=loaded)
        for spec in selective_fp32(plan.layers[index].parameters):
            parameter = layer.get_parameter(spec.name)  # without `Init`, DeepSpeed's constructor rounds it
            parameter.data = parameter.data.to(dtype)
        if plan.layers[index].parameters:
            shard_over_same_experts(layer, grid)
            Init(
                module=layer,
                data_parallel_group=grid.dp_group,
                zero_param_parallel_group=copies,
                config_dict_or_path=runtime_json(plan),
                dtype=dtype,
                mpu=grid_mpu(grid),
            )
            if directory is not None:
                move_weights_to_files(layer, Path(directory))
        return layer

    model = GPT(plan, grid, build=build)
    share_parameters(enumerate(model.sequential), plan.layers)
    return model


def multiply_in_fp8(model: nn.Module, plan: RunPlan, device: torch.device) -> None:
    """Let the linear layers of blocks multiply in fp8 if the plan asks for it.

    Other products of gMLP blocks, over positions and in their small attention, stay bf16.

    Raises:
        LaunchError: If the GPU has no products in fp8. Hosts that were not probed before the start find out here.
    """
    if plan.config.training.fp8 is None:
        return
    if device.type == "cpu":
        _log.warning("fp8: a CPU has no products in fp8 and imitates them in fp32, which is slower than bf16")
    else:
        _check_capability(device, experts=bool(plan.architecture.num_experts))
    # Made once, so that all blocks share one compiled graph.
    recipe = FP8_RECIPES[plan.config.training.fp8]
    multiply = recipe.linear
    products = (recipe.product, recipe.of_gradient)
    for block in model.modules():
        if not isinstance(block, Block):
            continue
        for layer in block.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.multiply = multiply
            if isinstance(layer, ColumnParallelLinear):
                layer.products = products
            if isinstance(layer, GroupedLinear):
                layer.fp8 = recipe


def choose_attention_backend(model: nn.Module, plan: RunPlan) -> None:
    """Let attention use the kernel that `attention_backend` names."""
    for module in model.modules():
        if isinstance(module, Block) and module.attention is not None and module.attention.impl == "flash":
            module.attention.backend = plan.config.training.attention_backend


def _check_capability(device: torch.device, *, experts: bool) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if experts and major + minor / 10 != FP8_EXPERTS:
        name = torch.cuda.get_device_name(device)
        rule = f"fp8 with experts needs GPUs of compute capability {FP8_EXPERTS}, unlike {name}"
        raise LaunchError(f"{rule}: torch has no grouped product in fp8 for others; remove fp8")
    if major + minor / 10 < LEAST_CAPABILITY["fp8"]:
        name = torch.cuda.get_device_name(device)
        raise LaunchError(f"fp8 needs GPUs of compute capability {LEAST_CAPABILITY['fp8']} or more, unlike {name}")


def compile_blocks(model: nn.Module, plan: RunPlan, device: torch.device) -> None:
    """Compile the blocks of a model in place if the plan asks for it. Names stay, and equal blocks share a graph."""
    keys = plan.config.training
    if not compiles(plan.config, device_family(device.type)):
        return
    if keys.compile_layers == "auto" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        _log.warning("compile_layers: auto finds no C compiler on this host: layers are not compiled, and slower")
        return
    import torch._dynamo.config
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = _GRAPHS
    if keys.activation_memory_budget is not None:
        torch._functorch.config.activation_memory_budget = keys.activation_memory_budget
    for module in model.modules():
        if isinstance(module, Block):
            module.compile()
