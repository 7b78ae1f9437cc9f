"""Names and sizes of kernels that the planner and the kernels themselves must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

AttentionImpl = Literal["eager", "fused", "flash"]
"""How attention is computed: by torch operations, with the Triton softmax, or by torch's
`scaled_dot_product_attention`."""

QUERY_BLOCK: Final = 128
"""Queries of a block when a CPU computes causal flash attention block by block."""

MOST_BLOCKED: Final = 512
"""Longest sequence whose attention to all earlier tokens a CPU computes in blocks. Beyond, torch's own flash attention
is as fast."""

MASKED_QUERY_BLOCK: Final = 64
"""Queries of a block when a CPU computes causal flash attention of windows, documents or patterns of blocks."""

MASKED_SCORES: Final = 2**19
"""Scores that this attention holds at once on a CPU: those of several heads only if they are no more."""

DELTA_CHUNK: Final = 64
"""Tokens of a chunk of the gated delta rule."""

LOSS_CHUNK: Final[Mapping[str, int]] = MappingProxyType({"cpu": 2**21, "accelerator": 2**27})
"""Logits that head and cross entropy hold at once: what stays in a CPU's cache, what keeps an accelerator busy."""

FUSED_SOFTMAX_LENGTH: Final = 2**16
"""Longest row of the fused softmax: each is one block of a GPU's registers, and longer ones would spill."""

FLEX_HEAD_DIM: Final = 16
"""Least width of a head for FlexAttention's kernel of GPUs."""

MASKED_QUERY_CHUNK: Final = 1024
"""Queries that a GPU compares at once with the keys of a window when it reads a prompt."""

REDUCED_RANGE: Final = 2**25
"""Elements of gradients that the backward pass sends together at least: 64 MB in bf16, with which networks reach their
bandwidth."""

FP8_MULTIPLE: Final = 16
"""Every dimension of a matrix product in fp8 is a multiple of this on a GPU (cuBLAS)."""

FP8_QUOTIENTS: Final = 2**25
"""Elements of experts' operands that are divided by their scales at once: 128 MiB in fp32."""
