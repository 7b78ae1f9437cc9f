"""Small Hugging Face directories, written without transformers: a Llama and a byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, WIDTH, LAYERS, HEADS, KEY_HEADS = 16, 32, 2, 4, 2


def write_tokenizer(directory: Path, specials: tuple[str, ...] = ("<|end|>",), **config: Any) -> Tokenizer:
    """Write a byte-level tokenizer of 256 ids and special tokens after them. The first special token is its eos."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": specials[0], **config}
    write_json(directory / "tokenizer_config.json", settings)
    return tokenizer


def llama_tensors(rows: int, *, head: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights of a Llama by transformers' names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if head:
        shapes["lm_head.weight"] = (rows, HIDDEN)
    kv = HIDDEN // HEADS * KEY_HEADS
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        shapes |= {
            f"{block}input_layernorm.weight": (HIDDEN,),
            f"{block}post_attention_layernorm.weight": (HIDDEN,),
            f"{block}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{block}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{block}self_attn.v_proj.weight": (kv, HIDDEN),
            f"{block}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{block}mlp.gate_proj.weight": (WIDTH, HIDDEN),
            f"{block}mlp.up_proj.weight": (WIDTH, HIDDEN),
            f"{block}mlp.down_proj.weight": (HIDDEN, WIDTH),
        }
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes.items()}


def write_llama(
    directory: Path, rows: int, *, tensors: Mapping[str, torch.Tensor] | None = None, **config: Any
) -> Path:
    """Write `config.json` and weights of a small Llama; `config` replaces and adds keys."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 256,
        "dtype": "float32",
        **config,
    }
    write_json(directory / "config.json", settings)
    state = dict(tensors if tensors is not None else llama_tensors(rows))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


def write_adapter(directory: Path, **config: Any) -> Path:
    """Write a LoRA adapter of rank 2 on the queries of a small Llama, with the keys that peft writes."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        **config,
    }
    write_json(directory / "adapter_config.json", settings)
    generator = torch.Generator().manual_seed(3)
    state = {}
    for layer in range(LAYERS):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        state[f"{module}.lora_A.weight"] = torch.randn(2, HIDDEN, generator=generator)
        state[f"{module}.lora_B.weight"] = torch.randn(HIDDEN, 2, generator=generator)
    save_file(state, directory / "adapter_model.safetensors")
    return directory
