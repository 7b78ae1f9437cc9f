"""Tests that rest on what only some versions of transformers have."""

import pytest
import transformers
from transformers import modeling_layers

IS_4 = transformers.__version__.startswith("4.")
IS_5_0 = transformers.__version__.startswith("5.0.")
needs_rope_parameters = pytest.mark.skipif(
    IS_4, reason="transformers 4 has no `rope_parameters`, which 5 computes from"
)
needs_stacked_experts = pytest.mark.skipif(
    IS_4, reason="transformers 4 has a module for each expert, 5 one tensor for all"
)
loads_adapters_of_experts = pytest.mark.skipif(
    IS_5_0, reason="peft gives a function of transformers 5.0 an argument of later versions (`loading_info`)"
)
needs_mtp_model = pytest.mark.skipif(
    not hasattr(modeling_layers, "MtpModel"),
    reason="this version of transformers has no module for multi-token prediction",
)
of_the_locked_version = pytest.mark.skipif(
    IS_4 or IS_5_0, reason="keys, classes and functions inside transformers, as the locked version has them"
)
compared_with_later = pytest.mark.skipif(
    IS_4 or IS_5_0, reason="random sizes and keys that later releases have; 5.0.0 saves experts of width 1 as vectors"
)
hands_thinking_over = pytest.mark.skipif(
    IS_4 or IS_5_0, reason="these versions do not hand `thinking` of a message to templates as `reasoning_content`"
)
