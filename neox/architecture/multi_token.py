"""Multi-token prediction on paper: modules behind the network that predict tokens further ahead.

DeepSeek-V3, arXiv:2412.19437, section 2.2. Module k of D gets the hidden states of depth k - 1, those of depth 0 being
the network's after the final norm. Embedding and head are the network's own; everything else below is one layer of the
layer plan, behind the head:

    hidden states of depth k - 1 at i      vectors of token i + k
                 |                                  |
               hnorm                              enorm
                 |                                  |
                 +------- [enorm, hnorm] 2H --------+
                                |
                        eh_proj [H, 2H]
                                |
                  a block of the last block's kind
                                |
                       shared_head.norm
                                |
                 hidden states of depth k at i ----> module k + 1
                                |
                               head  ---> cross entropy of token i + k + 1

Names are those of DeepSeek-V3's files (`model.layers.61.enorm`). The paper does not say whether hidden states are
taken before or after the norm of their depth. After it is what transformers (`MtpModel`) does with these files, and
Megatron-LM in training.
"""

from __future__ import annotations

from neox.architecture.architecture import Architecture
from neox.architecture.blocks import BLOCKS
from neox.architecture.choices import norm_parameters
from neox.architecture.parameter import ParameterSpec, in_module

MULTI_TOKEN_LOSS = "mtp_loss"
"""Score: mean cross entropy of the tokens further ahead, over all modules."""
MULTI_TOKEN_BLOCK = "block"
"""Name of a module's block."""


def multi_token_parameters(architecture: Architecture) -> tuple[ParameterSpec, ...]:
    """Return the parameters of one module of multi-token prediction."""
    hidden = architecture.hidden_size
    block = BLOCKS[architecture.attention[-1]].parameters(architecture, architecture.mlp[-1])
    return (
        *norm_parameters(architecture, "enorm"),
        *norm_parameters(architecture, "hnorm"),
        ParameterSpec("eh_proj.weight", (hidden, 2 * hidden), 0),
        *in_module(MULTI_TOKEN_BLOCK, block),
        *norm_parameters(architecture, "shared_head.norm"),
    )
