"""ERNIE 4.5 (`Ernie4_5ForCausalLM`), dense: Llama with interleaved rotary embeddings.

Source: transformers, models/ernie4_5. `use_bias` gives biases to all projections.
"""

from __future__ import annotations

from neox.families.config_entries import ALL_GLOBAL, ATTENTION_BIASES_EQUAL, Derived, Switch, Written
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import Rotary, ending_entries

ERNIE = Family(
    model_type="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    title="ERNIE 4.5",
    fixed_fields=NETWORK,
    config=(
        *llama_entries(
            max_positions=131072,
            norm_epsilon=1e-5,
            num_kv_heads=2,
            head_dim=128,
            rotary=Rotary(default_base=500000.0),
            tied=True,
        ),
        ALL_GLOBAL,
        Switch("use_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Derived("mlp_bias", lambda known: known["qkv_bias"]),
        # transformers' default is 0, and it does not train the embedding of the padding token
        Written("pad_token_id", None),
        *ending_entries(),
    ),
    tensors=llama_tensors(interleaved=True),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
