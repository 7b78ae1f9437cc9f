"""GPT-J (`GPTJForCausalLM`): attention and MLP read one norm, and rotary positions turn neighbouring dimensions.

Source: transformers, models/gptj. Attention has no biases. The MLP and the head have biases.
"""

from __future__ import annotations

from neox.families.config_entries import Size
from neox.families.family import Family, TensorSource, separate_projections
from neox.families.gpt2 import GPT2_NAMES, gpt2_entries
from neox.families.shared_entries import ending_entries

_BLOCK = "transformer.h.{i}."

GPTJ = Family(
    model_type="gptj",
    class_name="GPTJForCausalLM",
    score_class="GPTJForSequenceClassification",
    title="GPT-J",
    fixed_fields={
        "norm": "layernorm",
        "residual": "parallel_one_norm",
        "qkv_bias": False,
        "attention_output_bias": False,
        "head_bias": True,
        "positions": "rotary",
        "rotary_base": 10000.0,
    },
    config=(
        *gpt2_entries(num_layers=28, hidden_size=4096, heads=16, max_positions=2048, tied=False, dropout=0.0),
        Size("rotary_dim", "rotary_ndims", 64),
        *ending_entries(vocab_size=50400),
    ),
    tensors={
        "embedding": {"word_embeddings": TensorSource(("transformer.wte",))},
        "block": {
            "input_layernorm": TensorSource((f"{_BLOCK}ln_1",)),
            "attention.query_key_value": separate_projections(f"{_BLOCK}attn.", interleaved=True),
            "attention.dense": TensorSource((f"{_BLOCK}attn.out_proj",)),
            "mlp.dense_h_to_4h": TensorSource((f"{_BLOCK}mlp.fc_in",)),
            "mlp.dense_4h_to_h": TensorSource((f"{_BLOCK}mlp.fc_out",)),
        },
        "norm": {"norm": TensorSource(("transformer.ln_f",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix="transformer.",
    other_names=GPT2_NAMES,
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)
