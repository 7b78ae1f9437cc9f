"""Log-probabilities of answers by the model in an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from neox.data.answer_pairs.answers import ANSWERS_PER_PAIR, AnswerPairs, PromptAnswer
from neox.data.answer_pairs.pair_rows import layout_rows
from neox.engine import Engine
from neox.engine.micro_batches import own_tokens
from neox.launch import report_progress
from neox.log import progress
from neox.objectives.causal_lm import network_inputs
from neox.objectives.preferences import AnswerTargets, answer_sums
from neox.parallel import LowRankAdapter


@torch.no_grad()
def answer_log_probs(engine: Engine, pairs: AnswerPairs, *, adapters: bool = True) -> np.ndarray:
    """Return the sum of the log-probabilities of each answer's tokens in fp32, [pairs, 2].

    Micro batches are divided over data ranks, and their tokens over context ranks. All ranks call it together. No
    random numbers are drawn.

    Args:
        engine: The engine with the model.
        pairs: Pairs of answers. Those that are too long for a row get NaN.
        adapters: Whether the adapters of `lora` are enabled.
    """
    switch: AbstractContextManager[None] = nullcontext()
    if not adapters:
        switch = adapters_off(engine.deepspeed_engine.module)
    with switch:
        return _answer_log_probs(engine, pairs)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of a model inside a `with` block."""
    found = [module for module in model.modules() if isinstance(module, LowRankAdapter)]
    scales = [adapter.scale for adapter in found]
    for adapter in found:
        adapter.scale = 0.0
    try:
        yield
    finally:
        for adapter, scale in zip(found, scales, strict=True):
            adapter.scale = scale


def _answer_log_probs(engine: Engine, pairs: AnswerPairs) -> np.ndarray:
    """Return the log-probabilities of answers with the current weights, [pairs, 2]."""
    plan = engine.plan
    grid = engine.grid
    length = plan.batch_schedule.full_length
    batches = _batches(pairs, length, plan.batch.train_micro_batch_size_per_gpu)
    result = torch.zeros(len(pairs), ANSWERS_PER_PAIR, dtype=torch.float32, device=engine.device)
    steps = -(-len(batches) // grid.data_size)
    with progress("reference", steps, "batches") as bar:
        for step in range(steps):
            number = step * grid.data_size + grid.data_rank
            rows = batches[min(number, len(batches) - 1)]  # a rank without a batch computes one that nobody counts
            sums = _sums_of_rows(engine, pairs, rows, length)
            bar.update(1)
            report_progress()  # on hosts without rank 0 nobody prints the bar
            if number >= len(batches) or grid.cp_rank > 0:  # all context ranks have the same sums
                continue
            for row, own in enumerate(rows):
                result[own] = sums[row, : len(own)]
    if grid.dp_size > 1:
        dist.all_reduce(result, group=grid.dp_group)
    found: np.ndarray = result.cpu().numpy()
    found[pairs.sizes.sum(axis=1) > length] = np.nan
    return found


def _batches(pairs: AnswerPairs, length: int, rows_of_batch: int) -> list[list[list[int]]]:
    """Return the pairs of each row of each micro batch, in the order of the files."""
    rows: list[list[int]] = []
    left = 0
    for number, size in enumerate(pairs.sizes.sum(axis=1).tolist()):
        if size > length:
            continue
        if not rows or size > left:
            rows.append([])
            left = length
        rows[-1].append(number)
        left -= size
    return [rows[first : first + rows_of_batch] for first in range(0, len(rows), rows_of_batch)]


def _sums_of_rows(engine: Engine, pairs: AnswerPairs, rows: list[list[int]], length: int) -> Tensor:
    """Return the sums of the answers in some rows, [rows, most pairs of a row, 2], on all ranks of a model."""
    documents = []
    for own in rows:
        row: list[PromptAnswer] = []
        for number in own:
            row += pairs.documents(number)
        documents.append(row)
    fields = layout_rows(documents, length)
    return sums_of_batch(engine, {name: torch.from_numpy(field).to(engine.device) for name, field in fields.items()})


def sums_of_batch(engine: Engine, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the summed log-probabilities of a batch's answers with the current weights [B, P, 2].

    All ranks of a model call it together, and its context ranks; all get the result.

    Args:
        engine: The engine with the model.
        batch: Fields of rows of pairs (`neox.data.answer_pairs.pair_rows.layout_rows`), on the device.
    """
    own = own_tokens(batch, engine.grid)
    sums = partial(answer_sums, targets=AnswerTargets.of_batch(own))
    shape = (*batch["pair_mask"].shape, ANSWERS_PER_PAIR)
    return engine.apply(network_inputs(own), sums, torch.zeros(shape, device=engine.device))
