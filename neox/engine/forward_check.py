"""`checkpoint_validation_with_forward_pass`: the logits of a fixed input lie in the checkpoint, and are compared when
it is loaded."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from neox.checkpoint import load_file
from neox.engine.bodies import DTYPES, PipelineBody
from neox.engine.engine import Engine
from neox.errors import CheckpointError
from neox.log import get_logger
from neox.parallel import gather_last_dim

_log = get_logger(__name__)
FILE = "validation_logits.pt"
_LENGTH = 64
# Of the largest logit. Other degrees sum in another order, which 16 bits round differently.
_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}


@torch.no_grad()
def fixed_logits(engine: Engine) -> Tensor | None:
    """Logits [1, S, V] in fp32 on the CPU of the fixed input, on the last stage's ranks; None on others.

    All ranks call it together.
    """
    plan, grid, body = engine.plan, engine.grid, engine.body
    length = min(plan.config.model.seq_length or _LENGTH, _LENGTH)
    x = (torch.arange(length, device=engine.device) % plan.vocab_size)[None]  # [1, S]
    body.eval()
    if not isinstance(body, PipelineBody):
        return _whole(body(x), engine)
    step = grid.dp_size * grid.tp_size  # from a stage to the next
    if grid.pp_rank > 0:
        shape = (1, length, plan.layers.hidden_size)
        x = torch.empty(shape, dtype=DTYPES[plan.precision], device=engine.device)
        dist.recv(x, grid.rank - step)
    x = body.module(x)
    if grid.pp_rank < grid.pp_size - 1:
        dist.send(x.contiguous(), grid.rank + step)
        return None
    return _whole(x, engine)


def _whole(logits: Tensor, engine: Engine) -> Tensor:
    whole: Tensor = gather_last_dim(logits, engine.grid)
    return whole.float().cpu()


def compare_logits(path: Path, logits: Tensor | None, engine: Engine) -> None:
    """Compare with what the checkpoint holds; no collectives. Raises CheckpointError where they differ."""
    file = path / FILE
    if not file.is_file():
        if engine.grid.rank == 0:
            _log.warning("%s holds no logits: it was saved without checkpoint_validation_with_forward_pass", path)
        return
    if logits is None:
        return
    stored = load_file(file)
    expected: Tensor = stored["logits"]
    length, vocabulary = min(expected.shape[1], logits.shape[1]), engine.plan.vocab_size
    expected, found = expected[:, :length, :vocabulary], logits[:, :length, :vocabulary]
    allowed = max(_TOLERANCE[stored["precision"]], _TOLERANCE[engine.plan.precision]) * float(expected.abs().max())
    largest = float((expected - found).abs().max())
    if not largest <= allowed:
        raise CheckpointError(
            f"{path}: the loaded model's logits differ by {largest:.3g} from those stored when it was saved (allowed: "
            f"{allowed:.3g}); another configuration, another build of the kernels, or a damaged checkpoint. Unset "
            "checkpoint_validation_with_forward_pass to load it all the same"
        )
    if engine.grid.rank == engine.grid.world_size - 1:
        _log.info("the loaded model's logits agree with the stored ones to %.1e", largest)
