"""Loading: weights, the optimizer's state and the position of a checkpoint, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from neox.checkpoint import OptimizerReader
from neox.checkpoint.optimizer_formats import FP32
from neox.engine.build import build_engine, build_model
from neox.engine.chat_template import settings_to_save, template_to_save
from neox.engine.deepspeed_patches import SwappedStage3
from neox.engine.distributed import all_succeeded, from_first_rank
from neox.engine.engine import Engine
from neox.engine.forward_check import compare_logits, fixed_logits
from neox.engine.optimizer_tensors import Fragment, OptimizerTensor, optimizer_tensors
from neox.engine.reference import first_start, weights_identity
from neox.engine.reference_copy import CopiedReference, WeightsCopy
from neox.engine.start import Start, check_local_copy, choose_start, share_partial_copy, start_before
from neox.engine.weights import gathered, read_weights, read_weights_fp32, weight_layers
from neox.errors import ConfigError, TokenizerError
from neox.log import get_logger
from neox.model import Embedding
from neox.objectives import build_objective
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from neox.tokenizer import TokenizerIdentity, identify_configured, tokenizer_of

_log = get_logger(__name__)


def open_engine(plan: RunPlan, grid: ParallelGrid, device: torch.device) -> Engine:
    """Build the engine with what the configuration says: initial weights, or the content of `load`.

    Raises:
        CheckpointError: On all ranks, if the checkpoint is missing or broken, belongs to another model, or has an
            optimizer state that does not fit.
    """
    start = from_first_rank(lambda: choose_start(plan))
    if start.checkpoint is not None:
        share_partial_copy(start.checkpoint)
        check_local_copy(start.checkpoint, hashes=plan.config.checkpoint.checkpoint_verify)
    objective = build_objective(plan)
    model = build_model(plan, grid, objective, device)
    copied: WeightsCopy | None = None
    first = start
    if plan.config.preferences.copies_reference:
        first = from_first_rank(lambda: first_start(plan, start))
        copied = _copy_first_weights(model, plan, grid, first)
    if start.checkpoint is not None:
        _load_weights(model, plan, grid, start, start.checkpoint)
    if start.new_prompt:
        _initialize_prompt(model, plan)
    engine = build_engine(plan, grid, device, objective, model)
    engine.run = start.run
    engine.chat_template = from_first_rank(lambda: template_to_save(plan, start.checkpoint))
    engine.tokenizer = from_first_rank(lambda: _tokenizer_identity(plan))
    engine.generation_settings = from_first_rank(lambda: settings_to_save(plan, start.checkpoint))
    if copied is not None:
        engine.with_reference = CopiedReference(engine, copied).complete
        engine.reference_from = first.source
    if plan.config.preferences.compares_with_start:
        engine.reference = from_first_rank(lambda: weights_identity(start))
    _load_state(engine, start)
    return engine


def _copy_first_weights(model: nn.Module, plan: RunPlan, grid: ParallelGrid, first: Start) -> WeightsCopy:
    """Return a copy of the weights that the run begins with, or began with if it goes on. All ranks call it together.

    Args:
        model: The model, with initial weights. The others are loaded into it.
        plan: The run.
        grid: Process groups.
        first: How the run began.

    Raises:
        CheckpointError: On all ranks, if these weights are not where they were.
    """
    if first.checkpoint is not None:
        share_partial_copy(first.checkpoint)
        check_local_copy(first.checkpoint, hashes=plan.config.checkpoint.checkpoint_verify)
        _load_weights(model, plan, grid, first, first.checkpoint)
    return WeightsCopy(model)


def _tokenizer_identity(plan: RunPlan) -> TokenizerIdentity | None:
    """Return the identity of the run's tokenizer; None for a model that is trained on ids without one."""
    try:
        return identify_configured(plan.config, tokenizer_of(plan.config))
    except TokenizerError:  # the launcher has refused to start a training on texts
        return None


def resume(engine: Engine, start: Start) -> None:
    """Load a checkpoint into an engine that may have trained; all ranks call it together.

    Raises:
        CheckpointError: On all ranks, if something is missing in the checkpoint.
    """
    assert start.checkpoint is not None
    assert start.with_optimizer, "an optimizer that has taken steps cannot be reset without its saved state"
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


def _load_weights(model: nn.Module, plan: RunPlan, grid: ParallelGrid, start: Start, path: Path) -> None:
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
                finetune=start.finetune,
                gpt_neox_date=date,
            )

    all_succeeded(read, f"loading {path}")


def _load_state(engine: Engine, start: Start) -> None:
    """Load the optimizer's state, set the engine's position, and check the forward pass if asked to."""
    engine.iteration = start.iteration
    engine.ledger = start.ledger
    engine.skipped = start.skipped
    engine.last_losses = start.last_losses
    engine.restart_replica_check()
    path = start.checkpoint
    if path is not None and start.with_optimizer:
        all_succeeded(lambda: load_optimizer(engine, path), f"loading the optimizer's state from {path}")
    else:
        engine.schedule.seek(start.iteration)
    _load_averages(engine, start)
    if path is not None and engine.plan.config.checkpoint.checkpoint_validation_with_forward_pass:
        logits = fixed_logits(engine)
        all_succeeded(lambda: compare_logits(path, logits, engine), f"checking the forward pass of {path}")


def _load_averages(engine: Engine, start: Start) -> None:
    """Load the average of the weights; without one in the checkpoint it starts as the weights."""
    averages = engine.averages
    path = start.checkpoint
    if averages is None:
        return
    steps = start.averaged_steps
    if path is None or steps is None:
        averages.restart()
        return
    all_succeeded(lambda: averages.load(path, steps), f"loading the averaged weights of {path}")


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
    """Fill an optimizer's tensor with fp32 weights, and return its states; none before the first step."""
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
        states["step"] = torch.tensor(reader.step, dtype=torch.float32, device=target.tensor.device)
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
