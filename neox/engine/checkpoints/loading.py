"""Loading: from the choice of a checkpoint to an engine with its weights, optimizer state and position, in any layout.

    all ranks   agree_on_start         which checkpoint, and what of it; every machine verifies its files (`run_start`)
    rank 0      begin_start            opens it, and moves later ones away; every rank gets the answer
    all ranks   build_model            initial weights of what the checkpoint lacks
      rank      read_weights           its layers, tensor rows and experts, before DeepSpeed wraps the model: the fp32
                                       weights of the optimizer are copies of these
    all ranks   build_engine           DeepSpeed, optimizer, features
      rank      load_optimizer         RESUME only: fp32 weights, states, loss scale, counters, learning rate
      features  load                   each its own state

At other degrees nothing is converted. The optimizer holds tensors of this run's layout; `optimizer_tensors` says which
elements of which parameters each of them holds, and exactly these are read from the checkpoint, however it is divided:

    parameter of the network   [ 0 ......................... 4095 ]
    checkpoint, 2 data ranks   [ file 0           | file 1         ]
    here, 3 data ranks         [ rank 0   | rank 1    | rank 2     ]     rank 1 reads from both files
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from neox.checkpoint import OptimizerReader
from neox.checkpoint.optimizer.file_formats import FP32
from neox.engine.build_engine import build_engine, build_model
from neox.engine.checkpoints.run_files import files_of_run
from neox.engine.checkpoints.run_start import (
    RunStart,
    agree_on_start,
    begin_start,
    start_before,
)
from neox.engine.deepspeed_patches import SwappedStage3
from neox.engine.distributed import all_succeeded, from_first_rank
from neox.engine.engine import Engine
from neox.engine.feature import MakeFeatures, no_features
from neox.engine.optimizer_tensors import Fragment, OptimizerTensor, optimizer_tensors
from neox.engine.weights import gathered, read_weights, read_weights_fp32, weight_layers
from neox.errors import ConfigError
from neox.log import get_logger
from neox.model import Embedding
from neox.objectives import Objective, build_objective
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from neox.plan.run_start import ChosenStart, StartMode
from neox.tokenizer import tokenizer_of

_log = get_logger(__name__)


def open_engine(
    plan: RunPlan,
    grid: ParallelGrid,
    device: torch.device,
    make_features: MakeFeatures = no_features,
    chosen: ChosenStart | None = None,
) -> Engine:
    """Build the engine with what the configuration says: initial weights, or the content of `load`.

    Args:
        plan: The run.
        grid: This rank's grid.
        device: Device of the model.
        make_features: Builds what takes part in the training besides.
        chosen: The start on which all ranks have agreed (`agree_on_start`); None to agree here.

    Raises:
        CheckpointError: On all ranks, if the checkpoint is missing or broken, belongs to another model, or has an
            optimizer state that does not fit.
    """
    if chosen is None:
        plan, chosen = agree_on_start(plan)
    agreed = chosen
    start = from_first_rank(lambda: begin_start(plan, agreed))
    objective = build_objective(plan)
    model = build_loaded_model(plan, grid, device, objective, start)
    run_files = from_first_rank(lambda: files_of_run(plan, start.run, start.checkpoint))
    engine = build_engine(plan, grid, device, objective, model, start, run_files, make_features)
    _load_state(engine, start)
    return engine


def build_loaded_model(
    plan: RunPlan, grid: ParallelGrid, device: torch.device, objective: Objective, start: RunStart
) -> nn.Module:
    """Build this rank's part of the network with the weights of a start; all ranks call it together.

    Raises:
        CheckpointError: On all ranks, if the checkpoint is missing or broken.
    """
    loaded: frozenset[int] = frozenset()
    if start.checkpoint is not None:
        loaded = frozenset(range(len(plan.layers))) - start.new_layers
    model = build_model(plan, grid, objective, device, loaded)
    if start.checkpoint is not None:
        _load_weights(model, plan, grid, start, start.checkpoint)
    if start.has_new_prompt:
        _initialize_prompt(model, plan)
    return model


def resume(engine: Engine, start: RunStart) -> None:
    """Load a checkpoint into an engine that may have trained; all ranks call it together.

    Raises:
        CheckpointError: On all ranks, if something is missing in the checkpoint.
    """
    assert start.checkpoint is not None
    assert start.mode is StartMode.RESUME, "an optimizer that has taken steps cannot be reset without its saved state"
    _load_weights(engine.deepspeed_engine.module, engine.plan, engine.grid, start, start.checkpoint)
    _load_state(engine, start)


def roll_back(engine: Engine, step: int) -> int | None:
    """Load the newest checkpoint before a step into an engine in training; all ranks call it together.

    Args:
        engine: The engine.
        step: The step, counted from 1.

    Returns:
        The iteration of the checkpoint; None if there is none.

    Raises:
        CheckpointError: On all ranks, if the checkpoint is damaged.
    """
    start = from_first_rank(lambda: start_before(engine.plan, step))
    if start is None:
        return None
    resume(engine, start)
    return start.iteration


def _initialize_prompt(model: nn.Module, plan: RunPlan) -> None:
    """Set the soft prompt to the vectors of a text's tokens, repeated or cut to the prompt's length."""
    settings = plan.config.model.soft_prompt_tuning
    count = plan.architecture.soft_prompt_tokens
    if not count or settings is None or not settings.init_string:
        return
    ids = from_first_rank(lambda: _prompt_ids(plan, settings.init_string))
    layers = dict(weight_layers(model))
    embedding = layers[0]
    prompt = layers[1]
    weight = next(prompt.parameters())
    repeated = (ids * (count // len(ids) + 1))[:count]
    rows = torch.tensor(repeated, device=weight.device).unsqueeze(0)  # [1, prompt tokens]
    with torch.no_grad(), gathered(embedding):
        vectors = cast(Embedding, embedding).word_embeddings(rows).squeeze(0)  # [prompt tokens, H]
    with torch.no_grad(), gathered(prompt, changed=True):
        weight.copy_(vectors)


def _prompt_ids(plan: RunPlan, text: str) -> list[int]:
    ids = list(tokenizer_of(plan.config).encode(text))
    if not ids:
        raise ConfigError("soft_prompt_tuning.init_string has no tokens; give another text, or remove it")
    return ids


def _load_weights(model: nn.Module, plan: RunPlan, grid: ParallelGrid, start: RunStart, path: Path) -> None:
    date = plan.config.checkpoint.gpt_neox_date

    def read() -> None:
        if "precision" in start.changed:
            # Layer files hold weights rounded to the saved precision; the optimizer has them in fp32.
            read_weights_fp32(model, plan.layers, grid, path, gpt_neox_date=date)
        else:
            read_weights(
                model,
                plan.layers,
                grid,
                path,
                weights=start.weights,
                finetune=start.mode is StartMode.FINETUNE,
                gpt_neox_date=date,
                new_layers=start.new_layers,
            )

    all_succeeded(read, f"loading {path}")


def _load_state(engine: Engine, start: RunStart) -> None:
    """Load the optimizer's state, set the engine's position, and let features load theirs."""
    engine.start_at(start.iteration)
    path = start.checkpoint
    if path is not None and start.mode is StartMode.RESUME:
        all_succeeded(lambda: load_optimizer(engine, path), f"loading the optimizer's state from {path}")
    else:
        engine.schedule.seek(start.iteration)
    for feature in engine.features:
        feature.load(engine, start)


@torch.no_grad()
def load_optimizer(engine: Engine, path: Path) -> None:
    """Load this rank's optimizer, loss scaler, counters and schedule from a checkpoint of any layout.

    Every tensor of the optimizer is filled from the checkpoint's parameters, one at a time. Only the elements that this
    rank holds are read, unless the tensor degree changes. Learning rates, betas and decays stay the configuration's.
    No collective operations take place.

    Raises:
        CheckpointError: If something is missing in the checkpoint, or the optimizer's wrapper is unknown.
    """
    reader = OptimizerReader(
        path,
        engine.plan.layers,
        engine.grid.dp_rank / engine.grid.dp_size,
        gpt_neox_date=engine.plan.config.checkpoint.gpt_neox_date,
    )
    model = engine.deepspeed_engine.module
    wrapper = engine.deepspeed_engine.optimizer
    targets = list(optimizer_tensors(engine.plan, engine.grid, model, wrapper, engine.optimizer))
    for target in targets:
        reader.check_has(fragment.key for fragment in target.fragments)
    for target in targets:
        states = _fill_weights_and_read_states(target, engine, reader)
        engine.optimizer.keep(target.tensor, states)
        if isinstance(wrapper, SwappedStage3):
            wrapper.keep_states(target.tensor)
    _restore_scaler(engine, reader)
    engine.restore_counters(reader.client_state)


def _fill_weights_and_read_states(
    target: OptimizerTensor, engine: Engine, reader: OptimizerReader
) -> dict[str, Tensor]:
    """Fill an optimizer's tensor with fp32 weights, and return its states; none before the first step.

    States are on the tensor's device. The counter of steps is in CPU memory, where most optimizers read it.
    """
    rank = (engine.grid.tp_rank, engine.grid.tp_size)
    states: dict[str, Tensor] = {}
    for fragment in target.fragments:
        _copy_fragment(reader, fragment, FP32, rank, target.tensor)
        index, name = fragment.key
        for state in sorted(reader.names(index, name)):
            if reader.optimizer.state(state).axis is not None:
                # A vector along one axis of a whole parameter, which is the only one in the tensor.
                states[state] = reader.shard(index, name, state, *rank).to(target.tensor, copy=True)
                continue
            if state not in states:
                states[state] = _zeros(target.tensor, engine, state)
            _copy_fragment(reader, fragment, state, rank, states[state])
    if states and reader.optimizer.counts_steps:
        states["step"] = torch.tensor(reader.step, dtype=torch.float32)
    return states


def _copy_fragment(
    reader: OptimizerReader, fragment: Fragment, state: str, rank: tuple[int, int], tensor: Tensor
) -> None:
    """Copy the fp32 weights or a state of a fragment to its place in a tensor of the optimizer.

    Args:
        reader: Reader of the checkpoint.
        fragment: Part of a parameter, and its place in the tensor.
        state: Name of the state, or `FP32`.
        rank: Tensor rank and tensor degree of this run.
        tensor: Tensor that is filled.
    """
    if not fragment.length:
        return
    part = tensor.view(-1)[fragment.start : fragment.start + fragment.length]
    part.copy_(reader.elements(*fragment.key, state, rank, (fragment.first, fragment.length)))


def _zeros(tensor: Tensor, engine: Engine, state: str) -> Tensor:
    """Return zeros for a state. One that is kept in 8 bits is read in fp64, which holds its numbers exactly."""
    kind = engine.plan.config.optimizer.optimizer.kind
    if kind.state(state).bits == 8:
        return torch.zeros(tensor.shape, dtype=torch.float64)
    return torch.zeros_like(tensor)


def _restore_scaler(engine: Engine, reader: OptimizerReader) -> None:
    """Set fp16's loss scaler to the saved one's state."""
    if engine.plan.precision != "fp16":
        return
    if reader.scaler is None:
        _log.info(
            "the checkpoint, saved in %s, has no loss scale: it starts at its initial value", reader.layout["precision"]
        )
        return
    wrapper = engine.deepspeed_engine.optimizer
    scaler = wrapper.loss_scale_config if isinstance(wrapper, FP16_UnfusedOptimizer) else wrapper.loss_scaler
    numbers = vars(scaler)
    for name, value in reader.scaler.items():
        if name in numbers:
            numbers[name] = value
