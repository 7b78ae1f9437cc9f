"""Files and overrides: dialect, merging, duplicates, and errors that name file and line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from neox.config import NeoXConfig
from neox.config.keys import OTHER_SYSTEMS
from neox.config.neox_config import known_keys
from neox.config.yaml_file import parse_text
from neox.errors import ConfigError
from neox.plan import config_from_files
from neox.plan.network.attention_config import attention_kinds
from neox.plan.rules import notes_without_effect, static_problems
from neox.problems import COMMAND_LINE, DEFAULT, Problem, Source

TINY = "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\npos_emb: rotary\ntrain_iters: 10\n"


def write(path, text):
    path.write_text(text)
    return path


def problems(*args, **kwargs) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        config_from_files(*args, **kwargs)
    return caught.value.problems


def lines(*args, **kwargs) -> list[tuple[tuple[str, ...], int]]:
    """Keys and line of each problem."""
    return [(problem.keys, problem.source.line) for problem in problems(*args, **kwargs)]


def test_neox_flow_style(tmp_path):
    path = write(
        tmp_path / "a.yml",
        """# comment
{
  "num-layers": 4,   # trailing comment
  "gpt_j_residual": True,
  "no-weight-tying": true,
  "vocab-file": None,
  "hostfile": "None",
  "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95],}},
  "min_lr": 1.0e-6,
  "attention-config": [[["flash"], 4]],
}
""",
    )
    config = config_from_files([path])
    assert config.model.num_layers == 4
    assert config.model.gpt_j_residual is True
    assert config.tokenizer.vocab_file is None
    assert config.runner.hostfile is None
    assert config.optimizer.optimizer.params.lr == 1e-5
    assert config.source("vocab_file") == DEFAULT
    assert config.source("num_layers") == Source.in_file(str(path), 3)
    assert config.source("optimizer.params.lr") == Source.in_file(str(path), 8)
    assert config.source("seed") == DEFAULT


def test_scalars_follow_yaml_1_2(tmp_path):
    path = write(tmp_path / "a.yml", "include: 12:30\nseed: 010\nmin_lr: .5e-3\nsplit: 969,30,1\ncomment: no\n")
    config = config_from_files([path])
    assert config.runner.include == "12:30"
    assert config.training.seed == 10
    assert config.schedule.min_lr == 5e-4
    assert config.runner.comment == "no"


def test_json_with_tabs(tmp_path):
    path = write(
        tmp_path / "a.json", json.dumps({"num_layers": 4, "optimizer": {"params": {"lr": 1e-05}}}, indent="\t")
    )
    config = config_from_files([path])
    assert config.model.num_layers == 4
    assert config.optimizer.optimizer.params.lr == 1e-5


def test_suffix_and_directory(tmp_path):
    write(tmp_path / "a.yml", TINY)
    write(tmp_path / "1-3B.yml", "seed: 7\n")
    config = config_from_files(["a", "1-3B"], conf_dir=tmp_path)
    assert (config.training.train_iters, config.training.seed) == (10, 7)
    (problem,) = problems(["b"], conf_dir=tmp_path)
    assert problem.source == Source.in_file(str(tmp_path / "b.yml"))
    assert "1-3B.yml, a.yml" in problem.message


def test_a_file_that_the_directory_lacks_is_looked_for_here(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs" / "a.yml", TINY)
    write(tmp_path / "a.yml", "no configuration")
    write(tmp_path / "mine.yml", "seed: 9\n")
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mine.yml"):
        config = config_from_files(["a", name], conf_dir="configs")
        assert (config.training.train_iters, config.training.seed) == (10, 9)


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    write(tmp_path / "quickstart.yml", TINY)
    monkeypatch.chdir(tmp_path)
    shipped = os.path.relpath(Path(__file__).parents[3] / "configs")
    for name, directory, hint in (
        ("quikstart.yml", tmp_path, "quickstart.yml?"),
        ("x.yml", "none", "no directory none"),
        ("one_gpu", None, f"`-d {shipped}`"),
        ("pythia/14M.yml", None, f"`-d {shipped}`"),
    ):
        (problem,) = problems([name], conf_dir=directory)
        assert hint in problem.message


def test_duplicate_in_one_file_and_across_files(tmp_path):
    one = write(tmp_path / "one.yml", "hidden-size: 64\nseed: 1\nhidden_size: 32\n")
    twice, *_ = problems([one])
    assert (twice.keys, twice.source.line) == (("hidden_size",), 3)
    assert f"{one}:1" in twice.message
    a = write(tmp_path / "a.yml", "seed: 1\nnum-layers: 2\n")
    b = write(tmp_path / "b.yml", "\nnum_layers: 4\nseed: 2\n")
    layers, seed, *_ = problems([a, b])
    assert (layers.keys, layers.source) == (("num_layers",), Source.in_file(str(b), 2))
    assert (seed.keys, seed.source) == (("seed",), Source.in_file(str(b), 3))
    assert f"{a}:2" in layers.message
    assert f"{a}:1" in seed.message


def test_what_lies_where_is_replaced_by_a_later_file(tmp_path):
    a = write(
        tmp_path / "a.yml", f"{TINY}\nsave: there\nvocab_file: v\nmerge_file: m\ntokenizer_type: GPT2BPETokenizer\n"
    )
    b = write(tmp_path / "b.yml", "save: here\n")
    config = config_from_files([a, b])
    assert config.checkpoint.save == "here"
    source = config.source("save")
    assert (source.file, source.line, source.replaces) == (str(b), 1, Source.in_file(str(a), 8))
    (note,) = notes_without_effect(config)
    assert note.keys == ("save",)
    assert str(a) in note.message
    assert str(b) in note.message
    whole = write(tmp_path / "c.yml", "tokenizer_type: HFTokenizer\nvocab-file: other\n")
    tokenizer = config_from_files([a, whole]).tokenizer
    assert (tokenizer.tokenizer_type, tokenizer.vocab_file, tokenizer.merge_file) == ("HFTokenizer", "other", None)
    for part in ("vocab_file: w\n", "merge_file: n\n", "tokenizer_type: HFTokenizer\n"):
        (problem,) = problems([a, write(tmp_path / "part.yml", part)])
        assert problem.keys == (part.partition(":")[0],)
        assert f"{a}:" in problem.message
    assert config_from_files(
        [write(tmp_path / "d.yml", f"{TINY}\nvocab_file: v\n"), write(tmp_path / "e.yml", "merge_file: m\n")]
    )
    f = write(tmp_path / "f.yml", "save: here\nlog_dir: x\nlog_dir: y\nseed: nonsense\n")
    assert lines([a, f]) == [(("log_dir",), 3), (("seed",), 4)]


def test_the_section_overrides_replaces_keys_of_earlier_files(tmp_path):
    write(tmp_path / "model.yml", "num_layers: 4\noptimizer: {type: Adam, params: {lr: 0.001, eps: 1e-6}}\n")
    text = "train_iters: 5\noverrides:\n  num-layers: 6\n  seed: 7\n  optimizer:\n    type: SGD\n"
    own = write(tmp_path / "own.yml", text)
    config = config_from_files([tmp_path / "model.yml", own])
    assert (config.model.num_layers, config.training.seed, config.training.train_iters) == (6, 7, 5)
    assert config.optimizer.optimizer.type == "SGD"
    source = config.source("num_layers")
    assert (source.line, source.replaces.line) == (3, 1)
    assert config.source("optimizer.type").line == 6
    assert config.source("seed").replaces is None
    assert "overrides" not in config.to_flat()
    notes = {key for note in notes_without_effect(config) for key in note.keys}
    assert {"num_layers", "optimizer"} <= notes


def test_settings_that_a_replaced_block_no_longer_has_are_named(tmp_path):
    write(tmp_path / "model.yml", "optimizer: {type: Adam, params: {lr: 0.001, betas: [0.9, 0.95]}}\nseed: 3\n")
    own = write(tmp_path / "own.yml", "overrides: {optimizer: {type: Adam, params: {lr: 0.01}}, seed: 4}\n")
    config = config_from_files([tmp_path / "model.yml", own])
    assert config.source("optimizer").dropped == ("params.betas: [0.9, 0.95]",)
    assert Source.from_json(config.source("optimizer").to_json()) == config.source("optimizer")
    (said,) = [note.message for note in notes_without_effect(config) if "drops" in note.message]
    assert "params.betas: [0.9, 0.95]" in said
    whole = write(tmp_path / "whole.yml", "overrides: {optimizer: {type: Adam, params: {lr: 1, betas: [0.8, 0.9]}}}\n")
    assert config_from_files([tmp_path / "model.yml", whole]).source("optimizer").dropped == ()


@pytest.mark.parametrize("text", ["overrides: 3\n", "overrides: {num_layers: 6}\n"])
def test_a_wrong_section_overrides_is_a_problem(tmp_path, text):
    (place,) = lines([write(tmp_path / "own.yml", TINY + "train_micro_batch_size_per_gpu: 1\n" + text)])
    assert place[1] == 8


def test_a_fragment_without_braces(tmp_path):
    text = '# of gpt-neox\n"num-layers": 4,\n"optimizer": {\n  "params": {"lr": 1e-4,},\n},\n'
    text += '"rotary_pct": 0.25, # a quarter\n'
    parsed = parse_text(text, "a")
    assert parsed.values == {"num_layers": 4, "optimizer": {"params": {"lr": 1e-4}}, "rotary_pct": 0.25}
    assert (parsed.lines["num_layers"], parsed.lines["rotary_pct"]) == (2, 6)
    assert parse_text('"a": [1,\n  2]\n"b": 3\n', "a").values == {"a": [1, 2], "b": 3}


def test_keys_of_other_systems_are_answered_with_ours(tmp_path):
    known = set(known_keys())
    for key, answer in OTHER_SYSTEMS.items():
        assert key not in known
        named = re.match(r"`(\w+)", answer)
        assert named is None or named[1] in known, (key, answer)
    theirs = {"pipeline_model_parallel_size": 2, "lr_warmup_fraction": 0.1, "use_rdma": True, "Global": {}, "<<": {}}
    found = problems([write(tmp_path / "a.yml", "".join(f"{key}: {value}\n" for key, value in theirs.items()))])
    assert [problem.keys[0] for problem in found][: len(theirs)] == list(theirs)
    for problem in found[: len(theirs)]:
        assert OTHER_SYSTEMS[problem.keys[0]] in problem.message


def test_keys_of_ports_are_met(tmp_path):
    keys = ("scaled_masked_softmax_fusion", "async_tensor_model_parallel_allreduce", "use_triangle_attn")
    config = config_from_files([write(tmp_path / "a.yml", TINY + "".join(f"\n{key}: true" for key in keys))])
    assert [note.keys[0] for note in notes_without_effect(config)] == [keys[1], keys[2], keys[0]]
    config = config_from_files([write(tmp_path / "b.yml", TINY + "train_impl: reinforce\n")])
    assert [problem.keys for problem in static_problems(config)] == [("train_impl",)]


def test_a_whole_file_given_again_is_one_problem(tmp_path):
    keys = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    text = "".join(f"{key}: 8\n" for key in keys)
    first = write(tmp_path / "first.yml", text)
    second = write(tmp_path / "second.yml", text)
    (problem,) = problems([first, second])
    assert problem.keys == keys
    assert (problem.source.file, problem.source.line) == (str(second), 1)
    assert f"4 keys are also given in {first}: `num_layers` (line 1), `hidden_size` (line 2)" in problem.message
    assert "`overrides:`" in problem.message


def test_duplicate_inside_a_block(tmp_path):
    path = write(tmp_path / "a.yml", "zero_optimization:\n  stage: 1\n  stage: 2\n")
    (problem, *_) = problems([path])
    assert (problem.keys, problem.source.line) == (("zero_optimization.stage",), 3)
    assert f"{path}:2" in problem.message


def test_two_files_with_one_basename(tmp_path):
    (tmp_path / "sub").mkdir()
    a, b = write(tmp_path / "a.yml", "seed: 1\n"), write(tmp_path / "sub" / "a.yml", "train_iters: 2\n")
    for files in ((a, b), (a, a)):
        (problem,) = problems(files)
        assert problem.source == Source.in_file(str(files[1]))


def test_unknown_keys_with_the_nearest(tmp_path):
    path = write(
        tmp_path / "a.yml", "seed: 1\nhiden_size: 64\nzero_optimization: {stge: 1}\nxyzzy: 1\nsave-itnerval: 5\n"
    )
    assert lines([path])[:4] == [
        (("hiden_size", "hidden_size"), 2),
        (("zero_optimization.stge", "zero_optimization.stage"), 3),
        (("xyzzy",), 4),
        (("save_itnerval", "checkpoint_factor"), 5),
    ]
    assert "`save_interval`" in problems([path])[3].message


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("stage", "zero_optimization.stage"),
        ("overlap_comm", "zero_optimization.overlap_comm"),
        ("initial_scale_power", "fp16.initial_scale_power"),
    ],
)
def test_a_key_of_a_block_outside_of_it_is_answered_with_its_path(tmp_path, key, path):
    (found,) = problems([write(tmp_path / "a.yml", TINY)], overrides=[f"{key}=1"])
    assert f"`{path}`" in found.message


def test_an_alias_on_the_command_line_names_the_override_of_its_setting(tmp_path):
    text = TINY + "optimizer: {type: Adam, params: {lr: 0.001}}\n"
    (found,) = problems([write(tmp_path / "a.yml", text)], overrides=["lr=0.1"])
    assert "--set optimizer.params.lr=0.1" in found.message


def test_one_kind_of_attention_is_that_of_all_layers(tmp_path):
    config = config_from_files([write(tmp_path / "a.yml", TINY + "attention_config: flash\n")])
    assert attention_kinds(config.model.attention_config, 4) == ("flash",) * 4


def test_a_decay_that_ends_before_the_run_is_noted(tmp_path):
    """A published `lr_decay_iters` stays when a run is made longer; then the last steps have the lowest rate."""
    path = write(tmp_path / "a.yml", TINY + "lr_decay_iters: 4\nmin_lr: 1.0e-5\n")

    def noted(*overrides: str) -> bool:
        notes = notes_without_effect(config_from_files([path], overrides=overrides))
        return any(note.keys == ("lr_decay_iters", "train_iters") for note in notes)

    assert noted()
    assert not noted("lr_decay_iters=10")
    assert not noted("lr_decay_style=constant")


def test_wrong_types_are_listed_together(tmp_path):
    path = write(tmp_path / "a.yml", "num_layers: four\nseed: 1.5\nnorm: batchnorm\nfp16: true\nrotary_pct: 2\n")
    keys = ("num_layers", "seed", "norm", "fp16", "rotary_pct")
    assert lines([path])[:5] == [((key,), line) for line, key in enumerate(keys, start=1)]


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("num_layers: four", "num_layers", "'four'"),
        ("seq_length: 1.5", "seq_length", "whole number"),
        ("min_lr: 1e-5x", "min_lr", "number"),
        ("gpt_j_residual: maybe", "gpt_j_residual", "true or false"),
        ("compile_layers: maybe", "compile_layers", "'auto'"),
        ("data_path: 5", "data_path", "text"),
        ("num_layers: true", "num_layers", "number"),
        ("zero_optimization: {reduce_bucket_size: true}", "zero_optimization.reduce_bucket_size", "number"),
        ("train_data_paths: a", "train_data_paths", "list"),
        ("fp16: true", "fp16", "block"),
        ("norm: layernrm", "norm", "`layernorm`?"),
        ("optimizer: {params: {betas: [0.9]}}", "optimizer.params.betas", "[0.9]"),
        ("optimizer: {params: {betas: [0.9, x]}}", "optimizer.params.betas", "betas.1"),
        ("scheduler: {type: Cosine}", "scheduler.type", "'LRRangeTest'"),
        ("scheduler: {params: {cycle_min_lr: 1.0e-5}}", "scheduler", "`type`"),
        ("rampup_batch_size: [32, 32]", "rampup_batch_size", "first size"),
        ("rampup_batch_size: 32", "rampup_batch_size", "first size"),
        ("lr_decay_style: wsd", "lr_decay_style", "`WSD`?"),
        ("scheduler: {type: WarmupLR, params: {foo: 3}}", "scheduler.params.foo", "warmup_num_steps"),
        ("optimizer: {params: {max_grad_norm: 1}}", "optimizer.params.max_grad_norm", "gradient_clipping"),
        ("optimizer: {type: SGD, params: {momentun: 1}}", "optimizer.params.momentun", "`momentum`?"),
        ("zero_optimization: {stage: 5}", "zero_optimization.stage", "0, 1, 2 or 3"),
        ("eval_interval: 0", "eval_interval", "1"),
    ],
)
def test_type_errors_in_plain_words(tmp_path, text, key, says):
    problem = problems([write(tmp_path / "a.yml", text)])[0]
    assert (problem.keys[0], problem.source.line) == (key, 1)
    assert says in problem.message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 0),
        ("# only a comment\n", 0),
        ("- a\n- b\n", 1),
        ("just text\n", 1),
        ("model:\n\tnum_layers: 4\n", 2),
        ('{\n "seed": 1\n "train_iters": 2\n}\n', 3),
        ("seed: [1, 2\n", 2),
        ("seed: !!python/object/apply:os.system ['true']\n", 1),
        ("seed: *nowhere\n", 1),
        ("? [a, b]\n: 1\n", 1),
        ("{\n  seed: 1,\n", 3),
        ("train_data_weights: [1,\n", 2),
        ("train_data_weights: [1\nseed: 1\n", 2),
        ("seed 1\n", 1),
        ("seed: 1\n---\nseed: 2\n", 2),
        ("? ''\n: 1\n", 1),
    ],
)
def test_bad_files_name_the_line(tmp_path, text, line):
    path = write(tmp_path / "a.yml", text)
    assert problems([path])[0].source == Source.in_file(str(path), line)


def test_not_text_not_a_file(tmp_path):
    (tmp_path / "dir.yml").mkdir()
    (tmp_path / "latin.yml").write_bytes(b"seed: 1\ncomment: caf\xe9\n")
    (tmp_path / "utf16.yml").write_bytes("seed: 1\n".encode("utf-16"))
    for name, line in (("dir.yml", 0), ("latin.yml", 2), ("utf16.yml", 1)):
        path = tmp_path / name
        assert [problem.source for problem in problems([path])] == [Source.in_file(str(path), line)]


def test_files_that_are_too_large_are_refused(tmp_path):
    big = write(tmp_path / "big.yml", "x: &x 1\n" + "".join(f"k{i}: *x\n" for i in range(800_000)))
    assert f"{big.stat().st_size:,}" in problems([big])[0].message


class TestOverrides:
    @pytest.fixture
    def file(self, tmp_path):
        return write(tmp_path / "a.yml", TINY + "optimizer: {type: Adam, params: {lr: 1.0e-3}}\nvocab_file: x.json\n")

    def test_values_win_over_files(self, file):
        config = config_from_files(
            [file],
            overrides=["train-iters=20", "optimizer.params.lr=1e-4", "zero_optimization.stage=1", "vocab_file=007"],
        )
        assert config.training.train_iters == 20
        assert config.optimizer.optimizer.params.lr == 1e-4
        assert config.optimizer.optimizer.type == "Adam"
        assert config.deepspeed.zero_optimization.stage == 1
        assert config.tokenizer.vocab_file == "007"
        assert config.source("optimizer.params.lr") == COMMAND_LINE
        assert config.source("optimizer.type").file == str(file)

    @pytest.mark.parametrize("nothing", ["None", "null", ""])
    def test_none_unsets(self, file, nothing):
        config = config_from_files([file], overrides=[f"vocab_file={nothing}", f"optimizer.params.lr={nothing}"])
        assert config.tokenizer.vocab_file is None
        assert config.optimizer.optimizer.params.lr == 0.001
        assert not config.given("vocab_file")
        assert config.source("vocab_file") == DEFAULT

    def test_blocks_and_lists(self, file):
        config = config_from_files(
            [file], overrides=["bf16={enabled: true}", "attention_config=[[[flash], 4]]", "seed=3"]
        )
        assert config.deepspeed.bf16.enabled
        assert config.model.attention_config == ([["flash"], 4],)

    def test_bad_overrides_are_listed_together(self, file):
        found = problems([file], overrides=["seed", "=3", "seed.x=1", "a b=1", "min_lr={a: 1, a: 2}"])
        assert {problem.keys for problem in found} == {("seed",), ("",), ("a b",), ("min_lr",)}
        assert {problem.source for problem in found} == {COMMAND_LINE}

    def test_reaching_into_a_value(self, file):
        (problem,) = problems([file], overrides=["train_iters.x=1"])
        assert problem.keys == ("train_iters",)

    def test_unknown_and_mistyped(self, file):
        found = problems([file], overrides=["trian_iters=5", "seed=abc"])
        assert {problem.keys for problem in found} == {("trian_iters",), ("seed",)}
        assert {problem.source for problem in found} == {COMMAND_LINE}


def test_flat_round_trip(tmp_path):
    config = config_from_files([write(tmp_path / "a.yml", TINY + "fp16: {enabled: true, fp16: true}\ngas: 4\n")])
    again = NeoXConfig.from_flat(config.to_flat(), config.sources())
    assert again == config
    assert again.to_flat() == config.to_flat()
    assert again.source("gas") == config.source("gas")


HOSTILE = {
    "many aliases": "a: &a [x]\n" + "".join(f"k{i}: *a\n" for i in range(60_000)),
    "many keys": "".join(f"k{i}: 1\n" for i in range(60_000)),
    "deep": "a: " + "[" * 300_000,
    "laughs": "a: &a [x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else '*a'] * 9)}]\n" for i in range(20)),
    "itself": "a: &a [*a]\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path, name):
    path = write(tmp_path / "a.yml", HOSTILE[name])
    (problem,) = problems([path])
    assert problem.source == Source.in_file(str(path))


def test_numbers_without_bounds_are_refused(tmp_path):
    path = write(tmp_path / "a.yml", TINY)
    for override in (
        "gpu_memory_gib=inf",
        "min_lr=nan",
        "num_layers=1000000",
        "num_layers=99999999999999999999999",
        "global_num_gpus=100000000",
        "optimizer.params.eps=inf",
        "train_data_weights=[inf, 1]",
    ):
        (problem,) = problems([path], overrides=[override])
        assert problem.keys == (override.partition("=")[0],)
        assert problem.source == COMMAND_LINE


def test_overrides_into_lists_and_unknown_blocks_name_their_place(tmp_path):
    path = write(tmp_path / "a.yml", TINY)
    for override, key in (("train_data_paths.0=x", "train_data_paths"), ("a.b.c=1", "a")):
        (problem,) = problems([path], overrides=[override])
        assert (problem.keys, problem.source) == ((key,), COMMAND_LINE)


def test_a_later_file_replaces_validation_sets_with_their_places(tmp_path):
    first = write(tmp_path / "a.yml", TINY + "train_data_paths: [x]\nvalid_data_paths:\n  old: x\n  both: x\n")
    second = write(tmp_path / "b.yml", "# machine\nvalid_data_paths:\n  both: /data/y\n")
    config = config_from_files([first, second])
    assert list(config.data.validation_sets) == ["both"]
    assert config.source("valid_data_paths.both").line == 3
    assert not config.given("valid_data_paths.old")
    assert "valid_data_paths.old" not in config.sources()
