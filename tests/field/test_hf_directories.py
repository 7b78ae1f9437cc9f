"""Hugging Face directories as others publish them: what stands in their files is used, carried, or refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from neox.checkpoint import CheckpointReader
from neox.convert import from_hf, to_hf
from neox.data.sidecar import Sidecar, check_tokenizer
from neox.errors import ConfigError, ConversionError, DataError, GenerationError, TokenizerError
from neox.generation.completion import generate
from neox.generation.load import load_model
from neox.generation.request import SamplingParams
from neox.generation.startup import choose_checkpoint, one_process
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve, with_trained_model
from neox.tokenizer import build_tokenizer, tokenizer_of
from tests.errors import raises_naming
from tests.field.hf_models import llama_tensors, write_adapter, write_json, write_llama, write_tokenizer
from tests.unit.generation.toy import ToyCodec, ToyModel, next_letter


def run_of(config_file, **keys):
    """Return the plan, the tokenizer and the model of a generation with an imported model."""
    config = one_process(with_trained_model(config_from_files([config_file]).updated(keys)))
    tokenizer = tokenizer_of(config)
    plan = resolve(config, 1, tokenizer.vocab_size)
    checkpoint = choose_checkpoint(plan, tokenizer)
    return plan, tokenizer, load_model(plan, checkpoint, ParallelGrid.single(), torch.device("cpu"))


@pytest.fixture
def with_padding_token(tmp_path):
    """A model whose tokenizer has a token more than its embedding has rows."""
    directory = tmp_path / "hf"
    write_tokenizer(directory, ("<|end|>", "[PAD]"), pad_token="[PAD]")
    return write_llama(directory, 257)


def test_a_token_without_a_row(with_padding_token, tmp_path):
    """EuroEval#52, tokenizers#1609: text without the token works, as in transformers; text with it is refused."""
    result = from_hf(with_padding_token, tmp_path / "ck")
    plan, tokenizer, model = run_of(result.config_file)
    assert (tokenizer.vocab_size, plan.vocab_size, plan.padded_vocab_size) == (258, 257, 257)
    assert any("258" in note and "257" in note for note in plan.notes)
    params = SamplingParams(max_new_tokens=2, min_new_tokens=1)
    assert generate(model, ["how", "many people"], params, tokenizer)[0].length >= 1
    with raises_naming(GenerationError, "257"):
        generate(model, ["answer [PAD]"], params, tokenizer)
    with raises_naming(GenerationError, "257"):
        model.score(torch.tensor([[1, 257]]), torch.tensor([[2, 3]]))
    back = to_hf(tmp_path / "ck", config_from_files([result.config_file]), tmp_path / "back", verify=False)
    assert json.loads((back.output / "config.json").read_text())["vocab_size"] == 257
    assert build_tokenizer("HFTokenizer", back.output / "tokenizer.json").vocab_size == 258


def test_data_with_a_token_without_a_row(with_padding_token, tmp_path):
    """The plan's number of ids is that of the rows, so data that needs more is refused before ranks start."""
    config = config_from_files([from_hf(with_padding_token, tmp_path / "ck").config_file])
    plan = resolve(config.updated({"train_micro_batch_size_per_gpu": 1}), 1, 258)
    assert plan.vocab_size == 257
    sidecar = Sidecar("HFTokenizer", "hash", 258, 256, True, 1, 2, max_id=257)
    with raises_naming(DataError, "257", "data"):
        check_tokenizer(sidecar, "data", vocab_size=plan.vocab_size, tokenizer_hashes=())


def test_rows_that_are_too_few_by_mistake(with_padding_token, tmp_path):
    """Only the embedding of an imported model may have fewer rows than the tokenizer has ids."""
    config = config_from_files([from_hf(with_padding_token, tmp_path / "ck").config_file])
    one = {"train_micro_batch_size_per_gpu": 1}
    own = config.updated(one, without=["hf_architecture"])
    with raises_naming(ConfigError, "padded_vocab_size"):
        resolve(own, 1, 258)
    with raises_naming(ConfigError, "padded_vocab_size"):
        resolve(config.updated({**one, "added_tokens": ["<|new|>"]}), 1, 259)


def test_a_tokenizer_with_gaps_in_its_ids(tmp_path):
    """phi-2's and others' ids have gaps: the number of tokens is not larger than every id."""
    tokenizer = json.loads(write_tokenizer(tmp_path).to_str())
    tokenizer["model"]["vocab"]["far"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    built = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    assert built.vocab_size == 301
    tokenizer["model"]["vocab"]["near"] = 259
    added = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**added, "id": number, "content": f"<{number}>"} for number in (301, 302)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with raises_naming(TokenizerError, "259"):
        build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")


def test_a_head_of_its_own_under_a_tie_flag(tmp_path):
    """LlamaFactory#10832, transformers#45127: the tensors decide, as in transformers 5."""
    directory = tmp_path / "hf"
    write_tokenizer(directory)
    tensors = llama_tensors(257)
    write_llama(directory, 257, tensors=tensors, tie_word_embeddings=True)
    result = from_hf(directory, tmp_path / "ck")
    assert config_from_files([result.config_file]).model.no_weight_tying
    back = to_hf(tmp_path / "ck", config_from_files([result.config_file]), tmp_path / "back", verify=False)
    assert torch.equal(load_file(back.output / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])
    assert json.loads((back.output / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("kept", ["both", "embedding", "head"])
def test_a_tied_model_may_hold_either_tensor(tmp_path, kept):
    """transformers ties either way; torch's files hold both (transformers' `tie_weights`)."""
    tensors = llama_tensors(257)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if kept != "both":
        del tensors[{"embedding": "lm_head.weight", "head": "model.embed_tokens.weight"}[kept]]
    write_llama(tmp_path / "hf", 257, tensors=tensors, tie_word_embeddings=True)
    result = from_hf(tmp_path / "hf", tmp_path / "ck")
    config = config_from_files([result.config_file])
    assert not config.model.no_weight_tying
    expected = llama_tensors(257)["model.embed_tokens.weight"]
    assert torch.equal(CheckpointReader(result.checkpoint).parts(0, "word_embeddings.weight")[0], expected)


def test_equal_tensors_without_a_tie_flag_stay_two(tmp_path):
    """A head that equals the embedding by chance, or at the start, is trained by itself."""
    tensors = llama_tensors(257)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_llama(tmp_path / "hf", 257, tensors=tensors)
    result = from_hf(tmp_path / "hf", tmp_path / "ck")
    assert config_from_files([result.config_file]).model.no_weight_tying
    del tensors["lm_head.weight"]
    write_llama(tmp_path / "other", 257, tensors=tensors)
    with raises_naming(ConversionError, "lm_head.weight", lines=2):
        from_hf(tmp_path / "other", tmp_path / "ck2")


def test_several_end_ids(tmp_path):
    """exllamav2#449, mlx-vlm#309, litgpt#812: each id of generation_config.json ends a text, and exports keep them."""
    directory = tmp_path / "hf"
    write_tokenizer(directory, ("<|end|>", "<|eot|>", "<|eom|>"))
    write_llama(directory, 259)
    given = {"eos_token_id": [258, 257], "pad_token_id": 257, "bos_token_id": 7, "temperature": 0.6, "do_sample": True}
    write_json(directory / "generation_config.json", given)
    result = from_hf(directory, tmp_path / "ck")
    config = config_from_files([result.config_file])
    assert tokenizer_of(config).end_ids == (256, 258, 257)
    back = to_hf(tmp_path / "ck", config, tmp_path / "back", verify=False)
    written = json.loads((back.output / "generation_config.json").read_text())
    assert written == {**given, "eos_token_id": [258, 257, 256]}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_ends_at_a_further_id(num_beams):
    """The second of two end ids ends a text, greedily and with beams."""
    codec = ToyCodec()
    codec.end_ids = (0, 4)
    params = SamplingParams(max_new_tokens=8, num_beams=num_beams)
    (completion,) = generate(ToyModel(next_letter), ["a"], params, codec)
    assert (completion.text, completion.finished) == ("bc", True)


@pytest.mark.parametrize("given", [258, [258, 257], -1, None])
def test_end_ids_of_config_json(tmp_path, given):
    """Llama 3.1's config.json holds a list, and quantized copies often lack generation_config.json."""
    directory = tmp_path / "hf"
    write_tokenizer(directory, ("<|end|>", "<|eot|>", "<|eom|>"))
    write_llama(directory, 259, eos_token_id=given)
    tokenizer = tokenizer_of(config_from_files([from_hf(directory, tmp_path / "ck").config_file]))
    ids = given if isinstance(given, list) else [given]
    assert tokenizer.end_ids == (256, *(number for number in ids if number is not None and number >= 0))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alora_invocation_tokens", [258]),  # peft#2609
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [0]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("lora_bias", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "of_next_year"),
        ("megatron_config", {"a": 1}),
        ("peft_type", "LOHA"),
        ("kasa_config", {"beta": 1}),
        ("key_of_next_year", True),
    ],
)
def test_keys_of_adapters_with_which_they_are_another_function(tmp_path, key, value):
    """An adapter is imported as plain LoRA only if every key says that it is one."""
    write_llama(tmp_path / "hf", 257)
    write_adapter(tmp_path / "adapter", **{key: value})
    with raises_naming(ConversionError, key):
        from_hf(tmp_path / "hf", tmp_path / "ck", adapter_dir=tmp_path / "adapter")


@pytest.mark.parametrize("changes", [{}, {"fan_in_fan_out": True, "inference_mode": True, "revision": "main"}])
def test_adapters_that_are_plain(tmp_path, changes):
    """Keys without an effect on a saved adapter may have any value."""
    write_llama(tmp_path / "hf", 257)
    write_adapter(tmp_path / "adapter", **changes)
    result = from_hf(tmp_path / "hf", tmp_path / "ck", adapter_dir=tmp_path / "adapter")
    assert config_from_files([result.config_file]).training.lora.r == 2
