"""File and parameter names in a checkpoint directory, as gpt-neox and DeepSpeed write them.

SAVE/latest                                          the name of the newest committed checkpoint
SAVE/global_step30/layer_02-model_00-model_states.pt one layer's weights of one tensor rank
SAVE/global_step30/mp_rank_01_model_states.pt        counters and client state; 01 = pp_rank * tp_size + tp_rank
SAVE/global_step30/zero_pp_rank_0_mp_rank_01_optim_states.pt   one data rank's part of the optimizer (ZeRO)
SAVE/global_step30/averaged_dp_0000_mp_01_weights.pt         one rank's part of the averaged weights (`ema_decay`)
SAVE/global_step30/manifest.json                     sizes and sha256 of every file; its presence means "complete"
"""

from __future__ import annotations

import re
from typing import NamedTuple

LATEST = "latest"
PENDING = ".latest-pending"
"""Marker file with the name of the checkpoint that is being committed, until `latest` names it."""
REPLACED = ".replaced-"
"""Start of the name of a checkpoint while another one of the same step takes its place."""
MANIFEST = "manifest.json"
CONFIG = "configs/config.yml"
AVERAGED_STEPS = "averaged_steps"
"""Name in the client state of the number of steps that the averaged weights have followed."""
AVERAGED_FROM = "averaged_from"
"""Name in the client state of the directories that were averaged, with their weights."""
SKIPPED = "skipped_batches"
"""Key in the client state of the ranges of steps whose batches were skipped after a loss spike."""
ROWS = "query_key_value_rows"
"""Name in the client state of the order of rows of fused queries, keys and values, which gpt-neox does not store."""
LAST_LOSSES = "last_losses"
"""Key in the client state of the losses of the last steps, in order, with which the next ones are compared."""
LEDGER = "data_ledger"
"""Name in the client state of the record of what was read of each dataset."""
REFERENCE = "reference_weights"
"""Name in the client state of the identity of the weights that a run on preferences began with."""
REFERENCE_FROM = "reference_from"
"""Name in the client state of the checkpoint that holds these weights, and which of its weights they are."""

_LAYER = re.compile(r"^layer_(\d+)(?:-model_(\d+))?-model_states\.pt$")
_MP_RANK = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_ZERO3_RANK = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_OPTIM = re.compile(r"^(?:(bf16|fp16)_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_AVERAGED = re.compile(r"^averaged_dp_(\d+)_mp_(\d+)_weights\.pt$")
_STEP = re.compile(r"^global_step(\d+)$")

# Later NeoX renamed the MLP's two linears; the names on the right are the ones used everywhere else.
_RENAMED = {"mlp.linear1.": "mlp.dense_h_to_4h.", "mlp.linear2.": "mlp.dense_4h_to_h."}


def layer_file(index: int, tp_rank: int) -> str:
    """Return the name of the file with layer `index`'s weights on tensor rank `tp_rank`."""
    return f"layer_{index:02d}-model_{tp_rank:02d}-model_states.pt"


def parse_layer_file(name: str) -> tuple[int, int] | None:
    """Return (layer index, tensor rank) of a layer file's name, or None. A name without tensor rank means rank 0."""
    match = _LAYER.match(name)
    if match is None:
        return None
    return int(match[1]), int(match[2] or 0)


def mp_rank_file(mp_rank: int) -> str:
    """Return the name of the file with the client state of model rank `mp_rank` = pp_rank * tp_size + tp_rank."""
    return f"mp_rank_{mp_rank:02d}_model_states.pt"


def parse_mp_rank_file(name: str) -> int | None:
    """Return the model rank of an `mp_rank` file's name, or None.

    ZeRO-3 writes such a file for each data rank. Only that of data rank 0 counts.
    """
    match = _MP_RANK.match(name)
    if match:
        return int(match[1])
    match = _ZERO3_RANK.match(name)
    if match and int(match[1]) == 0:
        return int(match[2])
    return None


class OptimizerFile(NamedTuple):
    """Parts of an optimizer file's name."""

    dp_rank: int
    mp_rank: int
    prefix: str


def parse_optimizer_file(name: str) -> OptimizerFile | None:
    """Parse the name of a ZeRO optimizer file. Return None for another name."""
    match = _OPTIM.match(name)
    if match is None:
        return None
    return OptimizerFile(dp_rank=int(match[2]), mp_rank=int(match[3]), prefix=match[1] or "")


def averaged_file(dp_rank: int, mp_rank: int) -> str:
    """Return the name of the file with a rank's part of the averaged weights; `mp_rank` as in `mp_rank_file`."""
    return f"averaged_dp_{dp_rank:04d}_mp_{mp_rank:02d}_weights.pt"


def parse_averaged_file(name: str) -> int | None:
    """Return the model rank in the name of a file of averaged weights, or None."""
    match = _AVERAGED.match(name)
    if match is None:
        return None
    return int(match[2])


def step_directory(iteration: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"global_step{iteration}"


def parse_step_directory(name: str) -> int | None:
    """Return the iteration in a checkpoint directory's name, or None."""
    match = _STEP.match(name)
    if match is None:
        return None
    return int(match[1])


def canonical_parameter(name: str) -> str:
    """Return a parameter's name inside its layer, with later NeoX's renamings reverted."""
    for old, new in _RENAMED.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def is_buffer(name: str) -> bool:
    """Return whether a stored tensor is not a weight but a table that can be computed (frequencies, slopes, masks)."""
    return name.endswith((".inv_freq", "alibi_embed.slopes", "attention.bias", "attention.masked_bias"))
