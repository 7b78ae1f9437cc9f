"""Names and forms of the tensors in gpt-neox's layer files of every year.

The MLP's first weight with a gate has the rows of the value, then those of the gate, on each tensor rank. Its names:

    mlp.dense_h_to_4h, mlp.dense_4h_to_h   until 2024-09, and the names that are used everywhere else here
    mlp.linear1, mlp.linear2               since 2024-09-07 (pull request 1212)
    mlp.w1, mlp.w3, mlp.w2                 `mlp_type: llama` (2023-05 to 2024-09): gate, value, output

Buffers are tables that can be computed: frequencies, slopes, masks. gpt-neox stored them in some years.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from neox.checkpoint_files.names import canonical_parameter, is_buffer

_GATE = "mlp.w1."
_VALUE = "mlp.w3."
_OUTPUT = "mlp.w2."


def layer_weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a layer's state dict on one tensor rank by canonical name, without buffers."""
    weights: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or is_buffer(key):
            continue
        if key.startswith(_OUTPUT):
            weights[f"mlp.dense_4h_to_h.{key.removeprefix(_OUTPUT)}"] = value
        elif key.startswith(_GATE):
            kind = key.removeprefix(_GATE)
            weights[f"mlp.dense_h_to_4h.{kind}"] = torch.cat([state[_VALUE + kind], value])
        elif not key.startswith(_VALUE):
            weights[canonical_parameter(key)] = value
    return weights
