"""Hugging Face directories as others publish them: what stands in their files is used, carried, or refused by name."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from neox.checkpoint import CheckpointReader
from neox.convert import from_hf, to_hf
from neox.convert.verification import compare_logits
from neox.data.token_files.sidecar import Sidecar, check_tokenizer
from neox.errors import ConfigError, ConversionError, DataError, GenerationError, TokenizerError
from neox.families import FAMILIES
from neox.generation.completion import generate
from neox.generation.request import SamplingParams
from neox.plan import config_from_files, resolve
from neox.preprocess.preprocess_run import check_settings
from neox.preprocess.settings import PreprocessSettings, TokenizerSpec
from neox.tokenizer import build_tokenizer, tokenizer_of
from neox.tokenizer.chat import ChatRenderer, own_chat_template
from neox.tokenizer.huggingface import tokens_beside
from tests.errors import raises_naming
from tests.field.hf_models import edit_json, llama_tensors, write_adapter, write_json, write_llama, write_tokenizer
from tests.unit.generation.toy import ToyCodec, ToyModel, next_letter


@pytest.fixture
def with_padding_token(tmp_path):
    """A model whose tokenizer has a token more than its embedding has rows."""
    directory = tmp_path / "hf"
    write_tokenizer(directory, ("<|end|>", "[PAD]"), pad_token="[PAD]")
    return write_llama(directory, 257)


def test_export_of_a_tokenizer_with_more_ids_than_rows(with_padding_token, tmp_path):
    """EuroEval#52, tokenizers#1609: what came in goes out, and prompts with the token are refused."""
    result = from_hf(with_padding_token, tmp_path / "ck")
    back = to_hf(tmp_path / "ck", config_from_files([result.config_file]), tmp_path / "back", verify=False)
    assert json.loads((back.output / "config.json").read_text())["vocab_size"] == 257
    assert build_tokenizer("HFTokenizer", back.output / "tokenizer.json").vocab_size == 258
    with raises_naming(GenerationError, "26"):
        generate(ToyModel(next_letter, vocab_size=25), ["z"], SamplingParams(), ToyCodec())


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_that_need_scales(tmp_path, dtype):
    """transformers PR 36828: files in fp8 or int8, without a `quantization_config`, are refused by name."""
    tensors = llama_tensors(257)
    key = "model.layers.0.mlp.up_proj.weight"
    write_llama(tmp_path / "hf", 257, tensors={**tensors, key: tensors[key].to(dtype)})
    with raises_naming(ConversionError, key):
        from_hf(tmp_path / "hf", tmp_path / "ck")


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


@pytest.mark.parametrize(
    ("targets", "excluded", "stored"),
    [
        (["q_proj"], ["layers.0.self_attn.q_proj"], [1]),
        (["q_proj", "v_proj"], ["v_proj"], [0, 1]),
        (["q_proj", "k_proj"], r".*\.(0\.self_attn\.q|\d+\.self_attn\.k)_proj", [1]),
    ],
)
def test_excluded_modules_have_no_adapter(tmp_path, targets, excluded, stored):
    """peft's `exclude_modules`: ends of names, or a pattern of whole names. The other layers' adapters are imported."""
    write_llama(tmp_path / "hf", 257)
    adapter = write_adapter(tmp_path / "adapter", target_modules=targets, exclude_modules=excluded)
    file = adapter / "adapter_model.safetensors"
    state = {key: value for key, value in load_file(file).items() if int(key.split(".")[4]) in stored}
    save_file(state, file)
    result = from_hf(tmp_path / "hf", tmp_path / "ck", adapter_dir=adapter)
    assert config_from_files([result.config_file]).training.lora.r == 2
    write_json(
        adapter / "adapter_config.json",
        {**json.loads((adapter / "adapter_config.json").read_text()), "exclude_modules": None},
    )
    with raises_naming(ConversionError, "adapter_model"):
        from_hf(tmp_path / "hf", tmp_path / "other", adapter_dir=adapter)


def test_tokens_that_only_other_files_name(tmp_path):
    """transformers adds tokens of added_tokens.json and named special tokens, here behind the ids of tokenizer.json."""
    write_tokenizer(tmp_path / "hf", pad_token="[PAD]")
    write_json(tmp_path / "hf" / "added_tokens.json", {"<|new|>": 257})
    write_json(tmp_path / "hf" / "special_tokens_map.json", {"eos_token": "<|new|>"})
    write_llama(tmp_path / "hf", 259)
    config = config_from_files([from_hf(tmp_path / "hf", tmp_path / "ck").config_file])
    tokenizer = tokenizer_of(config)
    assert (tokenizer.vocab_size, tokenizer.eod) == (259, 257)
    assert tokenizer.encode("<|new|>[PAD]") == [257, 258]


def test_tokens_beside_a_tokenizer_that_is_read_alone(tmp_path, caplog):
    """`--vocab-file` on a downloaded directory: tokens that only other files name are pieces here, and that is said."""
    write_tokenizer(tmp_path, pad_token="[PAD]")
    write_json(tmp_path / "added_tokens.json", {"<|two|>": 258, "<|one|>": 257})
    spec = TokenizerSpec("HFTokenizer", str(tmp_path / "tokenizer.json"))
    backend = spec.build().backend
    assert tokens_beside(tmp_path / "tokenizer.json", backend) == ["<|one|>", "<|two|>", "[PAD]"]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.convert_tokens_to_ids(["<|one|>", "<|two|>", "[PAD]"]) == [257, 258, 259]
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    caplog.set_level("WARNING")
    check_settings(PreprocessSettings((str(tmp_path / "x.jsonl"),), str(tmp_path / "x"), spec))
    assert "lacks 3 tokens" in caplog.text
    theirs.save_pretrained(tmp_path / "whole")
    whole = build_tokenizer("HFTokenizer", tmp_path / "whole" / "tokenizer.json")
    assert tokens_beside(tmp_path / "whole" / "tokenizer.json", whole.backend) == []
    edit_json(tmp_path / "tokenizer_config.json", eos_token="<|one|>")
    with raises_naming(TokenizerError, "<|one|>", "save_pretrained"):
        spec.build()


def test_named_templates_come_along(tmp_path):
    """chat_template.jinja and additional_chat_templates/ of transformers, through an import over an older one."""
    write_tokenizer(tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    (tmp_path / "hf" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    write_llama(tmp_path / "hf", 257)
    for overwrite in (False, True):
        result = from_hf(tmp_path / "hf", tmp_path / "ck", overwrite=overwrite)
    back = to_hf(tmp_path / "ck", config_from_files([result.config_file]), tmp_path / "back", verify=False)
    assert (back.output / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_the_eos_token_ends_a_text_that_the_settings_do_not_name(tmp_path):
    """mlx-vlm PR 2112: generation_config.json names one end, the tokenizer another one; both end a text."""
    write_tokenizer(tmp_path / "hf", ("<|im_end|>", "<|endoftext|>"))
    write_llama(tmp_path / "hf", 258)
    write_json(tmp_path / "hf" / "generation_config.json", {"eos_token_id": [257]})
    tokenizer = tokenizer_of(config_from_files([from_hf(tmp_path / "hf", tmp_path / "ck").config_file]))
    assert tokenizer.end_ids == (256, 257)


def test_added_tokens_beside_those_of_the_vocabulary(tmp_path):
    """llama.cpp PR 3633: added_tokens.json repeats first ids of the vocabulary, and adds two (FastChat#153: one)."""
    write_tokenizer(tmp_path / "hf")
    first = build_tokenizer("HFTokenizer", tmp_path / "hf" / "tokenizer.json").backend.id_to_token(0)
    added = {first: 0, "<|end|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    write_json(tmp_path / "hf" / "added_tokens.json", added)
    write_llama(tmp_path / "hf", 259)
    tokenizer = tokenizer_of(config_from_files([from_hf(tmp_path / "hf", tmp_path / "ck").config_file]))
    assert tokenizer.encode("<|im_start|><|im_end|>") == [257, 258]


def test_added_tokens_with_ids_of_others(tmp_path):
    """tokenizers PR 1444 (Yi): the configuration gives its own end an id that another token has."""
    token = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    write_tokenizer(tmp_path / "hf", added_tokens_decoder={"2": {**token, "special": True}})
    write_llama(tmp_path / "hf", 257)
    with raises_naming(ConversionError, "<|im_end|>", tmp_path / "hf" / "tokenizer_config.json"):
        from_hf(tmp_path / "hf", tmp_path / "ck")


def test_a_padding_token_that_no_row_has(tmp_path):
    """transformers#24899: a tokenizer with a padding token of its own is one longer than the model's vocabulary."""
    write_tokenizer(tmp_path / "hf", pad_token="<pad>")
    write_llama(tmp_path / "hf", 257)
    config = config_from_files([from_hf(tmp_path / "hf", tmp_path / "ck").config_file])
    plan = resolve(config.updated({"train_micro_batch_size_per_gpu": 1}), 1, tokenizer_of(config).vocab_size)
    assert (plan.vocab_size, plan.padded_vocab_size, tokenizer_of(config).vocab_size) == (257, 257, 258)


def test_one_file_beside_an_index_of_others(tmp_path):
    """mlx-vlm PR 1464: transformers reads model.safetensors, whatever an index next to it names."""
    directory = write_llama(tmp_path / "hf", 257)
    write_json(directory / "model.safetensors.index.json", {"weight_map": {"model.norm.weight": "gone.safetensors"}})
    assert from_hf(directory, tmp_path / "ck").parameters == sum(part.numel() for part in llama_tensors(257).values())
    (directory / "model.safetensors").unlink()
    with raises_naming(ConversionError, "gone.safetensors"):  # sglang PR 32279
        from_hf(directory, tmp_path / "ck2")


@pytest.mark.parametrize("name", ["hidden_size", "n_embd"])
def test_sizes_of_gpt2_under_either_name(name):
    """transformers' `attribute_map`: GPT-2's sizes have the usual names, too."""
    sizes = {"n_layer": 2, "n_head": 4, name: 32, "vocab_size": 64}
    architecture, _ = FAMILIES["gpt2"].read_config(sizes)
    assert (architecture.hidden_size, architecture.mlp_width) == (32, 128)


def test_adapters_of_a_head(tmp_path):
    """peft#2018: an adapter of the head of a tied model would change the embedding."""
    write_llama(tmp_path / "hf", 257, tensors=llama_tensors(257, head=False), tie_word_embeddings=True)
    write_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    for key in list(tensors):
        if ".layers.0." in key:
            tensors[f"base_model.model.lm_head.{key.split('.', 7)[7]}"] = tensors[key].clone()
    save_file(tensors, path)
    with raises_naming(ConversionError, "lm_head"):
        from_hf(tmp_path / "hf", tmp_path / "ck", adapter_dir=tmp_path / "adapter")


def sharded(directory, unlisted, twice=()):
    """Divide a Llama into two files, with an index that lacks some tensors; both files hold those named `twice`."""
    write_tokenizer(directory)
    write_llama(directory, 257)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for name, of_file in (("a.safetensors", sorted(tensors)[::2]), ("b.safetensors", sorted(tensors)[1::2])):
        own = dict.fromkeys((*of_file, *twice))
        save_file({key: tensors[key].clone() for key in own}, directory / name)
        weight_map |= {key: name for key in of_file if key not in unlisted}
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return tensors


def test_tensors_that_an_index_does_not_list(tmp_path):
    """As in transformers whole shards are read, so that a head of its own is not lost; the tensors are named."""
    tensors = sharded(tmp_path / "hf", {"lm_head.weight"})
    result = from_hf(tmp_path / "hf", tmp_path / "ck")
    back = to_hf(tmp_path / "ck", config_from_files([result.config_file]), tmp_path / "back", verify=False)
    assert torch.equal(load_file(back.output / "model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])


def test_shards_that_contradict_their_index(tmp_path):
    """A tensor that is not in its file, and one of two files, are named."""
    sharded(tmp_path / "hf", ())
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.9.x"] = "a.safetensors"
    write_json(tmp_path / "hf" / "model.safetensors.index.json", index)
    with raises_naming(ConversionError, "model.layers.9.x", "a.safetensors"):
        from_hf(tmp_path / "hf", tmp_path / "ck")
    sharded(tmp_path / "two", (), twice=("lm_head.weight", "model.norm.weight"))
    with raises_naming(ConversionError, "a.safetensors", "b.safetensors"):
        from_hf(tmp_path / "two", tmp_path / "ck")


@pytest.mark.parametrize("decoder", [False, True])
def test_special_tokens_of_the_map(tmp_path, decoder):
    """Templates and ends follow special_tokens_map.json, which older transformers wrote, as the owner reads it."""
    write_tokenizer(tmp_path, ("<|end|>", "<|begin|>", "<|eot|>"), chat_template="{{ bos_token }}{{ eos_token }}")
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|eot|>"})
    if decoder:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        entry = {"0": {"content": "!", "special": False}}
        write_json(tmp_path / "tokenizer_config.json", {**config, "added_tokens_decoder": entry})
    tokenizer = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    text = ChatRenderer(own_chat_template(tmp_path / "tokenizer.json", tokenizer)).render([{"role": "user"}])
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert text == theirs.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    assert (tokenizer.eod, tokenizer.bos) == (theirs.eos_token_id, theirs.bos_token_id)


def test_rope_parameters_beside_the_kinds_of_blocks():
    """transformers ignores what stands beside the two dictionaries: what contradicts the rest is refused by name."""
    for family, base in ((FAMILIES["gemma3_text"], 1000000.0), (FAMILIES["olmo3"], 500000.0)):
        flat = {"rope_type": "default", "rope_theta": base}
        assert read_rope(family, {"rope_parameters": flat}) == read_rope(family, {})
        nested = {"full_attention": {"rope_type": "default", "rope_theta": 7e5}}
        assert read_rope(family, {"rope_parameters": {**nested, "rope_theta": 7e5}})[0] == 7e5
        for wrong in ({"rope_theta": 3e5}, {"rope_type": "linear", "factor": 8.0}, {**nested, "rope_theta": 3e5}):
            ignored = wrong.keys() - nested.keys()
            with raises_naming(ConversionError, "rope_parameters", "full_attention", lines=1 + len(ignored)):
                read_rope(family, {"rope_parameters": wrong})


def read_rope(family, entries):
    """Return the bases of a small config.json with some entries."""
    small = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
    network, _ = family.read_config({**small, "head_dim": 8, "intermediate_size": 32, "vocab_size": 64, **entries})
    return network.rotary_base, network.local_rotary_base


def word_tokenizer(directory):
    """Write a tokenizer that knows none of the words of the built-in text, as those of DNA, music or numbers."""
    vocab = {"<unk>": 0, **{f"w{number}": number for number in range(1, 257)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w256"})


def test_a_verification_can_fail(tmp_path, monkeypatch):
    """A comparison of equal ids would pass with any rotary base: random ids take their place, and show it."""
    directory = write_llama(tmp_path / "hf", 257)
    word_tokenizer(directory)
    imported = from_hf(directory, tmp_path / "ck")
    config = config_from_files([imported.config_file])
    check = to_hf(tmp_path / "ck", config, tmp_path / "back").check
    assert check.distinct > 50
    assert check.weakness is None
    assert check.difference < 1e-4

    given = to_hf(tmp_path / "ck", config, tmp_path / "given", verify_text=" ".join(["w5"] * 40))
    assert "different ids" in given.check.weakness
    assert "proves nothing" in (tmp_path / "given" / "README.md").read_text()

    def with_another_base(reader, config, directory, *rest):
        edit_json(directory / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 7.0})
        return compare_logits(reader, config, directory, *rest)

    monkeypatch.setattr(sys.modules[to_hf.__module__], "compare_logits", with_another_base)
    with raises_naming(ConversionError, "differ"):
        to_hf(tmp_path / "ck", config, tmp_path / "wrong")


def test_logits_that_never_differ_verify_nothing(tmp_path):
    """A head of zeros, as muP's at the start: equal logits of 0 are no check of a network."""
    tensors = llama_tensors(257)
    tensors["lm_head.weight"].zero_()
    directory = write_llama(tmp_path / "hf", 257, tensors=tensors)
    write_tokenizer(directory)
    imported = from_hf(directory, tmp_path / "ck")
    check = to_hf(tmp_path / "ck", config_from_files([imported.config_file]), tmp_path / "back").check
    assert "same at all positions" in check.weakness
