"""Files and overrides: dialect, merging, duplicates, and errors that name file and line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from neox.config.keys import OTHER_SYSTEMS
from neox.config.neox_config import known_keys
from neox.config.yaml_file import parse_text
from neox.errors import ConfigError
from neox.plan import load_config
from neox.plan.rules import notes_without_effect, static_problems

TINY = "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\npos_emb: rotary\ntrain_iters: 10\n"


def write(path, text):
    path.write_text(text)
    return path


def problems(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    return str(caught.value)


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
    config = load_config([path])
    assert config.model.num_layers == 4
    assert config.model.gpt_j_residual is True
    assert config.tokenizer.vocab_file is None
    assert config.runner.hostfile is None
    assert config.optimizer.optimizer.params.lr == 1e-5
    assert config.source("vocab_file") == "default"
    assert config.source("num-layers".replace("-", "_")) == f"{path}:3"
    assert config.source("optimizer.params.lr") == f"{path}:8"
    assert config.source("seed") == "default"


def test_scalars_follow_yaml_1_2(tmp_path):
    path = write(tmp_path / "a.yml", "include: 12:30\nseed: 010\nmin_lr: .5e-3\nsplit: 969,30,1\ncomment: no\n")
    config = load_config([path])
    assert config.runner.include == "12:30"
    assert config.training.seed == 10
    assert config.schedule.min_lr == 5e-4
    assert config.runner.comment == "no"


def test_json_with_tabs(tmp_path):
    path = write(
        tmp_path / "a.json", json.dumps({"num_layers": 4, "optimizer": {"params": {"lr": 1e-05}}}, indent="\t")
    )
    config = load_config([path])
    assert config.model.num_layers == 4
    assert config.optimizer.optimizer.params.lr == 1e-5


def test_suffix_and_directory(tmp_path):
    write(tmp_path / "a.yml", TINY)
    write(tmp_path / "1-3B.yml", "seed: 7\n")
    config = load_config(["a", "1-3B"], conf_dir=tmp_path)
    assert (config.training.train_iters, config.training.seed) == (10, 7)
    message = problems(["b"], conf_dir=tmp_path)
    assert "b.yml: no such file" in message
    assert "1-3B.yml, a.yml" in message


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    write(tmp_path / "quickstart.yml", TINY)
    assert "did you mean quickstart.yml?" in problems(["quikstart.yml"], conf_dir=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "there is no directory none" in problems(["x.yml"], conf_dir="none")
    shipped = os.path.relpath(Path(__file__).parents[3] / "configs")
    assert f"did you forget `-d {shipped}`?" in problems(["one_gpu"])
    assert f"did you forget `-d {shipped}`?" in problems(["pythia/14M.yml"])


def test_duplicate_in_one_file_and_across_files(tmp_path):
    one = write(tmp_path / "one.yml", "hidden-size: 64\nseed: 1\nhidden_size: 32\n")
    message = problems([one])
    assert f"{one}:3" in message
    assert f"{one}:1" in message
    assert "hidden-size" in message
    a, b = (
        write(tmp_path / "a.yml", "seed: 1\nnum-layers: 2\n"),
        write(tmp_path / "b.yml", "\nnum_layers: 4\nseed: 2\n"),
    )
    message = problems([a, b])
    assert f"{b}:2: `num_layers` is also given at {a}:2" in message
    assert f"{b}:3: `seed` is also given at {a}:1" in message


def test_what_lies_where_is_replaced_by_a_later_file(tmp_path):
    a = write(
        tmp_path / "a.yml", f"{TINY}\nsave: there\nvocab_file: v\nmerge_file: m\ntokenizer_type: GPT2BPETokenizer\n"
    )
    b = write(tmp_path / "b.yml", "save: here\n")
    config = load_config([a, b])
    assert config.checkpoint.save == "here"
    assert config.source("save").startswith(f"{b}:1 (replacing {a}:")
    assert any("`save: here`" in note and str(a) in note and str(b) in note for note in notes_without_effect(config))
    whole = write(tmp_path / "c.yml", "tokenizer_type: HFTokenizer\nvocab-file: other\n")
    tokenizer = load_config([a, whole]).tokenizer
    assert (tokenizer.tokenizer_type, tokenizer.vocab_file, tokenizer.merge_file) == ("HFTokenizer", "other", None)
    for part in ("vocab_file: w\n", "merge_file: n\n", "tokenizer_type: HFTokenizer\n"):
        message = problems([a, write(tmp_path / "part.yml", part)])
        assert "a tokenizer is replaced whole: give" in message
        assert f"also given at {a}:" in message
    assert load_config(
        [write(tmp_path / "d.yml", f"{TINY}\nvocab_file: v\n"), write(tmp_path / "e.yml", "merge_file: m\n")]
    )
    message = problems([a, write(tmp_path / "f.yml", "save: here\nlog_dir: x\nlog_dir: y\nseed: nonsense\n")])
    assert message.index("`log_dir` is given twice") < message.index("`seed")


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
    message = problems(
        [
            write(
                tmp_path / "a.yml",
                "pipeline_model_parallel_size: 2\nlr_warmup_fraction: 0.1\nuse_rdma: true\nGlobal: {}\n<<: {}\n",
            )
        ]
    )
    for expected in (
        "here it is `pipe_parallel_size`",
        "`warmup`",
        "NCCL_IB_DISABLE",
        "top of the file",
        "several files",
    ):
        assert expected in message


def test_keys_of_ports_are_met(tmp_path):
    keys = ("scaled_masked_softmax_fusion", "async_tensor_model_parallel_allreduce", "use_triangle_attn")
    config = load_config([write(tmp_path / "a.yml", TINY + "".join(f"\n{key}: true" for key in keys))])
    notes = "\n".join(notes_without_effect(config))
    for key in keys:
        assert f"`{key}: true`" in notes
    config = load_config([write(tmp_path / "b.yml", TINY + "train_impl: dpo\n")])
    assert any("`train_impl: dpo` does not work here" in problem for problem in static_problems(config))


def test_duplicate_inside_a_block(tmp_path):
    path = write(tmp_path / "a.yml", "zero_optimization:\n  stage: 1\n  stage: 2\n")
    assert f"{path}:3: `stage` is given twice, first at {path}:2" in problems([path])


def test_two_files_with_one_basename(tmp_path):
    (tmp_path / "sub").mkdir()
    a, b = write(tmp_path / "a.yml", "seed: 1\n"), write(tmp_path / "sub" / "a.yml", "train_iters: 2\n")
    assert f"{b}: has the name of {a}; rename one" in problems([a, b])
    assert f"{a}: is given twice" in problems([a, a])


def test_unknown_keys_with_the_nearest(tmp_path):
    path = write(
        tmp_path / "a.yml", "seed: 1\nhiden_size: 64\nzero_optimization: {stge: 1}\nxyzzy: 1\nsave-itnerval: 5\n"
    )
    message = problems([path])
    assert f"{path}:2: unknown key `hiden_size`; did you mean `hidden_size`?" in message
    assert f"{path}:3: `zero_optimization` has no key `stge`; did you mean `stage`?" in message
    assert f"{path}:4: unknown key `xyzzy`" in message
    assert f"{path}:5: unknown key `save_itnerval`; did you mean `save_interval`?" in message


def test_wrong_types_are_listed_together(tmp_path):
    path = write(tmp_path / "a.yml", "num_layers: four\nseed: 1.5\nnorm: batchnorm\nfp16: true\nrotary_pct: 2\n")
    message = problems([path])
    for line, key in enumerate(("num_layers", "seed", "norm", "fp16", "rotary_pct"), start=1):
        assert f"{path}:{line}: `{key}: " in message, key


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_layers: four", "`num_layers: 'four'` should be a whole number"),
        ("seq_length: 1.5", "should be a whole number"),
        ("min_lr: 1e-5x", "should be a number"),
        ("gpt_j_residual: maybe", "should be true or false"),
        ("data_path: 5", "should be text"),
        ("num_layers: true", "should be a number"),
        ("zero_optimization: {reduce_bucket_size: true}", "should be a number"),
        ("train_data_paths: a", "should be a list"),
        ("fp16: true", "should be a block"),
        ("norm: layernrm", "did you mean `layernorm`?"),
        ("optimizer: {params: {betas: [0.9]}}", "`optimizer.params.betas: [0.9]` has too few values"),
        ("scheduler: {type: Cosine}", "`scheduler.type: 'Cosine'` should be 'LRRangeTest'"),
        ("scheduler: {params: {cycle_min_lr: 1.0e-5}}", "needs `type`"),
        ("rampup_batch_size: [32, 32]", "it is [first size, increment, samples"),
        ("rampup_batch_size: 32", "it is [first size, increment, samples"),
        ("lr_decay_style: wsd", "did you mean `WSD`?"),
        ("scheduler: {type: WarmupLR, params: {foo: 3}}", "`scheduler.params` has no key `foo`; it has "),
        ("optimizer: {params: {max_grad_norm: 1}}", "gradient_clipping is the key for that"),
        ("zero_optimization: {stage: 5}", "should be 0, 1, 2 or 3"),
        ("eval_interval: 0", "greater than or equal to 1"),
    ],
)
def test_type_errors_in_plain_words(tmp_path, text, expected):
    assert expected in problems([write(tmp_path / "a.yml", text)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "key: value"),
        ("just text\n", "key: value"),
        ("model:\n\tnum_layers: 4\n", "a.yml:2: a tab"),
        ('{\n "seed": 1\n "train_iters": 2\n}\n', "a.yml:3"),
        ('{\n "seed": 1\n "train_iters": 2\n}\n', "comma"),
        ("seed: [1, 2\n", "a.yml:2"),
        ("seed: !!python/object/apply:os.system ['true']\n", "a.yml:1: the tag"),
        ("seed: *nowhere\n", "a.yml:1"),
        ("? [a, b]\n: 1\n", "a.yml:1: a key must be a word"),
        ("a: &a [*a]\n", "too large or too deep"),
    ],
)
def test_bad_files(tmp_path, text, expected):
    path = write(tmp_path / "a.yml", text)
    assert expected in problems([path])


def test_not_text_not_a_file(tmp_path):
    (tmp_path / "dir.yml").mkdir()
    assert "is a directory" in problems([tmp_path / "dir.yml"])
    (tmp_path / "latin.yml").write_bytes(b"seed: 1\ncomment: caf\xe9\n")
    assert "latin.yml:2: is not UTF-8" in problems([tmp_path / "latin.yml"])
    (tmp_path / "utf16.yml").write_bytes("seed: 1\n".encode("utf-16"))
    assert "is not UTF-8" in problems([tmp_path / "utf16.yml"])


def test_files_that_are_too_large_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    bomb = write(tmp_path / "bomb.yml", "\n".join(lines))
    big = write(tmp_path / "big.yml", "x: &x 1\n" + "".join(f"k{i}: *x\n" for i in range(800_000)))
    assert "too large or too deep" in problems([bomb])
    assert "bytes; a configuration has at most" in problems([big])
    deep = write(tmp_path / "deep.yml", "seed: " + "[" * 5000)
    assert "deep.yml" in problems([deep])


class TestOverrides:
    @pytest.fixture
    def file(self, tmp_path):
        return write(tmp_path / "a.yml", TINY + "optimizer: {type: Adam, params: {lr: 1.0e-3}}\nvocab_file: x.json\n")

    def test_values_win_over_files(self, file):
        config = load_config(
            [file],
            overrides=["train-iters=20", "optimizer.params.lr=1e-4", "zero_optimization.stage=1", "vocab_file=007"],
        )
        assert config.training.train_iters == 20
        assert config.optimizer.optimizer.params.lr == 1e-4
        assert config.optimizer.optimizer.type == "Adam"
        assert config.deepspeed.zero_optimization.stage == 1
        assert config.tokenizer.vocab_file == "007"
        assert config.source("optimizer.params.lr") == "--set"
        assert config.source("optimizer.type").startswith(str(file))

    @pytest.mark.parametrize("nothing", ["None", "null", ""])
    def test_none_unsets(self, file, nothing):
        config = load_config([file], overrides=[f"vocab_file={nothing}", f"optimizer.params.lr={nothing}"])
        assert config.tokenizer.vocab_file is None
        assert config.optimizer.optimizer.params.lr == 0.001
        assert not config.given("vocab_file")
        assert config.source("vocab_file") == "default"

    def test_blocks_and_lists(self, file):
        config = load_config([file], overrides=["bf16={enabled: true}", "attention_config=[[[flash], 4]]", "seed=3"])
        assert config.deepspeed.bf16.enabled
        assert config.model.attention_config == ([["flash"], 4],)

    def test_bad_overrides_are_listed_together(self, file):
        message = problems([file], overrides=["seed", "=3", "seed.x=1", "a b=1"])
        for text in ("--set seed:", "--set =3:", "--set a b=1:"):
            assert text in message

    def test_reaching_into_a_value(self, file):
        assert "`train_iters` is 10, not a block" in problems([file], overrides=["train_iters.x=1"])

    def test_unknown_and_mistyped(self, file):
        message = problems([file], overrides=["trian_iters=5", "seed=abc"])
        assert "--set: unknown key `trian_iters`; did you mean `train_iters`?" in message
        assert "--set: `seed: 'abc'`" in message


def test_flat_round_trip(tmp_path):
    from neox.config import NeoXConfig

    config = load_config([write(tmp_path / "a.yml", TINY + "fp16: {enabled: true, fp16: true}\ngas: 4\n")])
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
    assert "too large or too deep" in problems([path])


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
        assert "--set: `" in problems([path], overrides=[override]), override


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{\n  seed: 1,\n", ":3: the file ends inside a bracket"),
        ("train_data_weights: [1,\n", ":2: the file ends inside a bracket"),
        (
            "train_data_weights: [1\nseed: 1\n",
            ":2: expected ',' or ']', but got ':'; a comma or a closing bracket is missing",
        ),
        ("seed 1\n", ":1: should hold `key: value` pairs, but holds the text `seed 1`"),
        ("- seed\n", ":1: a list stands where"),
        ("seed: 1\n---\nseed: 2\n", ":2: a second document"),
        ("? ''\n: 1\n", ":1: unknown key ``"),
    ],
)
def test_syntax_in_plain_words(tmp_path, text, expected):
    path = write(tmp_path / "a.yml", text)
    assert f"{path}{expected}" in problems([path])


def test_overrides_into_lists_and_unknown_blocks_name_their_place(tmp_path):
    path = write(tmp_path / "a.yml", TINY)
    assert "--set: `train_data_paths: {'0': 'x'}` should be a list" in problems(
        [path], overrides=["train_data_paths.0=x"]
    )
    assert "--set: unknown key `a`" in problems([path], overrides=["a.b.c=1"])
