"""Hugging Face directories as their owners publish them: wrappers, tensors that transformers ignores, old names."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from neox.convert import from_hf, to_hf
from neox.convert.hf_tokenizer import import_tokenizer
from neox.errors import ConversionError, TokenizerError
from neox.plan import config_from_files
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming
from tests.field.hf_models import write_json, write_llama, write_tokenizer

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def same_weights(first, second):
    files = sorted(path.name for path in first.glob("layer_*"))
    assert files == sorted(path.name for path in second.glob("layer_*"))
    for name in files:
        ours, theirs = (torch.load(directory / name, weights_only=True) for directory in (first, second))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


def wrap(plain, directory, model_type, prefix, *, head="lm_head.", further=(), **outer):
    """Write a directory with a Llama-like network of `plain` as the text network of another model."""
    directory.mkdir()
    tensors = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        ours, theirs = ("lm_head.", head) if key.startswith("lm_head.") else ("model.", prefix)
        tensors[key.replace(ours, theirs, 1)] = tensor
    tensors |= {key: torch.zeros(2, 2) for key in further}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    inner = json.loads((plain / "config.json").read_text())
    inner = {key: value for key, value in inner.items() if key not in ("dtype", "architectures", "eos_token_id")}
    write_json(
        directory / "config.json",
        {"model_type": model_type, "dtype": "float32", "eos_token_id": 256, "text_config": inner, **outer},
    )
    return directory


@pytest.mark.parametrize(
    ("prefix", "head", "further"),
    [
        # google/gemma-3, llava-hf, mistralai/Mistral-Small-3.1: before transformers 4.52
        ("language_model.model.", "language_model.lm_head.", ["vision_tower.embed.weight", "multi_modal_projector.w"]),
        # Qwen/Qwen3.5, and what transformers 5 saves
        ("model.language_model.", "lm_head.", ["model.visual.patch_embed.proj.weight", "model.visual.merger.weight"]),
        # Qwen/Qwen2-VL: the text network has no prefix
        ("model.", "lm_head.", ["visual.patch_embed.proj.weight"]),
    ],
)
def test_the_text_network_of_a_wrapper(tmp_path, prefix, head, further, caplog):
    """Soup#427, unsloth#5541, Megatron-Bridge#3891, vllm PR 36607: published around a text network."""
    plain = write_llama(tmp_path / "plain", 257)
    write_tokenizer(plain)
    wrapped = wrap(plain, tmp_path / "wrapped", "mistral3", prefix, head=head, further=further)
    expected = from_hf(plain, tmp_path / "a")
    caplog.set_level("WARNING")
    found = from_hf(wrapped, tmp_path / "b")
    same_weights(expected.checkpoint, found.checkpoint)
    for key in further:
        assert ".".join(key.split(".")[: 2 if key.startswith("model.") else 1]) in caplog.text
    settings = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == 256


def test_wrappers_around_other_networks_name_both_types(tmp_path):
    plain = write_llama(tmp_path / "plain", 257, model_type="qwen2_5_vl_text")
    wrapped = wrap(plain, tmp_path / "wrapped", "qwen2_5_vl", "model.")
    with pytest.raises(
        ConversionError, match="qwen2_5_vl, around a text network of model_type qwen2_5_vl_text"
    ) as caught:
        from_hf(wrapped, tmp_path / "ck")
    assert str(caught.value).count("\n") < 20


def test_tensors_that_transformers_ignores(tmp_path, caplog):
    """Model-Optimizer PR 860, speculators PR 340, slime PR 1503, llama.cpp PR 25589: `mtp.*` of Qwen3-Next.

    Qwen3NextForCausalLM and Qwen3_5ForCausalLM have `_keys_to_ignore_on_load_unexpected = ["^mtp.*"]`.
    """
    from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        layer_types=["linear_attention", "full_attention"],
        tie_word_embeddings=True,
        eos_token_id=256,
    )
    plain = tmp_path / "plain"
    Qwen3_5ForCausalLM(config).save_pretrained(plain)
    further = ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight", "model.visual.pos_embed.weight"]
    published = wrap(
        plain,
        tmp_path / "published",
        "qwen3_5",
        "model.language_model.",
        further=further,
        architectures=["Qwen3_5ForConditionalGeneration"],
        vision_config={"model_type": "qwen3_5"},
    )
    expected = load_file(plain / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(published).state_dict()
    assert all(torch.equal(theirs[key], value) for key, value in expected.items())
    caplog.set_level("WARNING")
    same_weights(from_hf(plain, tmp_path / "a").checkpoint, from_hf(published, tmp_path / "b").checkpoint)
    assert "2 of mtp.*" in caplog.text
    with raises_naming(ConversionError, "multi-token"):
        from_hf(published, tmp_path / "c", mtp_num_layers=1)


def test_pointers_of_git_lfs_are_named(tmp_path):
    """A clone without `git lfs pull` has small texts in place of its large files."""
    directory = write_llama(tmp_path / "hf", 257)
    (directory / "model.safetensors").write_bytes(LFS)
    with raises_naming(ConversionError, "git lfs pull", "model.safetensors"):
        from_hf(directory, tmp_path / "ck")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with raises_naming(ConversionError, "git lfs pull", "pytorch_model.bin"):
        from_hf(directory, tmp_path / "ck")
    write_llama(directory, 257)
    (directory / "pytorch_model.bin").unlink()
    (directory / "tokenizer.json").write_bytes(LFS)
    with raises_naming(TokenizerError, "git lfs pull", "tokenizer.json"):
        from_hf(directory, tmp_path / "ck")
    (tmp_path / "sp.model").write_bytes(LFS)
    with raises_naming(TokenizerError, "git lfs pull"):
        build_tokenizer("SPMTokenizer", tmp_path / "sp.model")


def train_sentencepiece(directory, model_type):
    """Train a small model with byte fallback."""
    import sentencepiece

    generator = random.Random(0)
    words = ["capital", "France", "Paris", "the", "of", "is", "and", "dog", "ran", "over", "to", "see", "today", "old"]
    lines = [" ".join(generator.choice(words) for _ in range(9)) for _ in range(300)]
    (directory / "corpus.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "corpus.txt"),
        model_prefix=str(directory / "sp"),
        vocab_size=340,
        model_type=model_type,
        byte_fallback=True,
        hard_vocab_limit=False,
        pad_id=3,
        pad_piece="[PAD]",
        user_defined_symbols="<|endoftext|>",
        minloglevel=2,
        **({"normalization_rule_name": "identity", "remove_extra_whitespaces": False} if model_type == "bpe" else {}),
    )
    return directory / "sp.model"


@pytest.mark.parametrize(
    ("name", "class_name", "model_type"),
    [("spiece.model", "T5Tokenizer", "unigram"), ("tokenizer.model", "LlamaTokenizer", "bpe")],
)
def test_files_that_transformers_takes_for_a_tokenizer(tmp_path, caplog, name, class_name, model_type):
    """ggml#169: a GPT-NeoX directory with `spiece.model` and T5's class. The ids are sentencepiece's, or it is said.

    transformers' T5Tokenizer has no byte fallback, and its LlamaTokenizer joins blanks in another way.
    """
    import sentencepiece

    model = train_sentencepiece(tmp_path, model_type)
    directory, output = tmp_path / "hf", tmp_path / "out"
    directory.mkdir()
    output.mkdir()
    (directory / name).write_bytes(model.read_bytes())
    write_json(directory / "config.json", {"model_type": "gpt_neox"})
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "[PAD]"}
    settings = {"tokenizer_class": class_name, "extra_ids": 0, "additional_special_tokens": [], **names}
    write_json(directory / "tokenizer_config.json", settings)
    caplog.set_level("WARNING")
    copied = import_tokenizer(directory, output)
    assert copied is not None
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    tokenizer = build_tokenizer("HFTokenizer", copied)
    for text in ("the dog ran over", "France is Paris", "today the old"):
        assert tokenizer.encode_bare(text) == processor.encode(text)
    assert tokenizer.eod == processor.piece_to_id("</s>")
    assert "sentencepiece into" in caplog.text


def test_a_directory_without_a_vocabulary_has_no_tokenizer(tmp_path):
    """AutoTokenizer of transformers 5 gives an empty tokenizer there, and `[]` for every text."""
    directory = write_llama(tmp_path / "hf", 257)
    (tmp_path / "out").mkdir()
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (directory / "notes.txt").write_text("trained for a week")
    assert import_tokenizer(directory, tmp_path / "out") is None
    assert not list((tmp_path / "out").iterdir())


def test_a_card_shows_a_tokenizer_only_if_there_is_one(tmp_path):
    """gpt-neox PR 882: a tokenizer of SentencePiece has no form there, and the card's code gave an empty one."""
    directory = write_llama(tmp_path / "hf", 400)
    imported = from_hf(directory, tmp_path / "ck")
    model = train_sentencepiece(tmp_path, "unigram")
    keys = {"tokenizer_type": "SPMTokenizer", "vocab_file": str(model)}
    config = config_from_files([imported.config_file]).updated(keys)
    plain = to_hf(tmp_path / "ck", config, tmp_path / "without", verify=False).output
    assert "AutoTokenizer" not in (plain / "README.md").read_text()
    write_tokenizer(directory)
    imported = from_hf(directory, tmp_path / "with-tokenizer")
    config = config_from_files([imported.config_file])
    whole = to_hf(tmp_path / "with-tokenizer", config, tmp_path / "with", verify=False).output
    assert "AutoTokenizer" in (whole / "README.md").read_text()


def test_weights_in_blocks_of_fp8_as_deepseek_publishes_them(tmp_path):
    """DeepSeek-V3, Qwen3-FP8: a scale for each 128 x 128 weights (DeepSeek's `fp8_cast_bf16.py`)."""
    hidden, width = 192, 320  # blocks at the edges are smaller
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens.weight": (257, hidden), "norm.weight": (hidden,)}
    block = "layers.0."
    shapes |= {f"{block}input_layernorm.weight": (hidden,), f"{block}post_attention_layernorm.weight": (hidden,)}
    linear = {f"{block}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    linear |= {f"{block}mlp.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    linear |= {f"{block}mlp.down_proj.weight": (hidden, width)}
    stored, plain = {}, {}
    for name, shape in shapes.items():
        plain[f"model.{name}"] = stored[f"model.{name}"] = torch.randn(shape, generator=generator).bfloat16()
    for name, (rows, columns) in linear.items():
        weight = (torch.randn(rows, columns, generator=generator) * 20).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
        stored |= {f"model.{name}": weight, f"model.{name}_scale_inv": scales}
        whole = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                whole[row, column] = weight[row, column].float() * scales[row // 128, column // 128]
        plain[f"model.{name}"] = whole.bfloat16()
    settings = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write_llama(tmp_path / "fp8", 257, tensors=stored, quantization_config=quantized, **settings)
    write_llama(tmp_path / "bf16", 257, tensors=plain, **settings)
    same_weights(
        from_hf(tmp_path / "bf16", tmp_path / "a").checkpoint, from_hf(tmp_path / "fp8", tmp_path / "b").checkpoint
    )
    del stored["model.layers.0.mlp.up_proj.weight"]
    write_llama(tmp_path / "alone", 257, tensors=stored, quantization_config=quantized, **settings)
    with raises_naming(ConversionError, "scales", "up_proj"):
        from_hf(tmp_path / "alone", tmp_path / "c")
    write_llama(tmp_path / "int8", 257, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with raises_naming(ConversionError, "bitsandbytes", lines=2):
        from_hf(tmp_path / "int8", tmp_path / "d")


def test_experts_of_gpt_oss_in_mxfp4():
    """gpt-oss is published in MXFP4 only; transformers' own conversion is the right value."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from neox.convert.hf_weights import _from_mxfp4

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 64, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 64, 2), generator=generator, dtype=torch.uint8)
    found = _from_mxfp4(blocks, scales)
    assert found.shape == (3, 64, 64)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize(
    "entries",
    [
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        {
            "rope_parameters": {"rope_theta": 1e6},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_theta": 5e5,
        },
        {
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6},
            "rope_scaling": {},
            "rope_theta": 5e5,
        },
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
    ],
    ids=str,
)
def test_both_forms_of_rotary_positions(entries):
    """Entries of transformers 4 and 5 in one file: transformers 5.24 decides."""
    from transformers import LlamaConfig

    from neox.families import FAMILIES

    right = LlamaConfig(**entries).rope_parameters
    small = {
        "intermediate_size": 64,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 9,
        "model_type": "llama",
    }
    network, _ = FAMILIES["llama"].read_config({**small, **entries})
    assert network.rotary_base == right["rope_theta"]
    assert dict(network.rope_scaling).get("factor") == right.get("factor")


def test_a_model_of_mamba_ssm_is_named(tmp_path):
    """state-spaces/mamba-130m, and what gpt-neox's `convert_neox_to_mamba_ssm.py` writes: no `model_type`."""
    config = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True}
    write_json(tmp_path / "config.json", config)
    with raises_naming(ConversionError, "mamba_ssm", "convert_mamba_ssm_checkpoint_to_pytorch.py"):
        from_hf(tmp_path, tmp_path / "ck")
