"""One run lists everything that is wrong, and nothing that only follows from a key that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from neox.config import load_config
from neox.config.keys import REPLACEABLE, TOKENIZER_KEYS
from neox.plan import check_run, config_from_files
from neox.problems import COMMAND_LINE, Problem, Source, in_file_order

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
WORLD = {"20B.yml": 8, "quickstart.yml": 2}
ANYTHING_GOES = {"synchronize_each_layer"}  # keys without effect


def misspelled(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield copies of a configuration with one key misspelled or of a wrong type each, and its path."""
    for key, value in values.items():
        swapped = key[:-2] + key[-1] + key[-2] if key[-1] != key[-2] else key[:-1]
        others = {name: inner for name, inner in values.items() if name != key}
        for changed in ({**others, swapped: value}, {**values, key: {"x": [1]}}):
            yield (*path, key), changed
        if isinstance(value, dict):
            for inner_path, inner in misspelled(value, (*path, key)):
                yield inner_path, {**values, key: inner}


@pytest.mark.parametrize("name", WORLD)
def test_a_bad_key_causes_no_further_problems(name: str, tmp_path: Path) -> None:
    flat = json.loads(json.dumps(config_from_files([CONFIGS / name]).to_flat()))
    file = tmp_path / "bad.json"
    for path, changed in misspelled(flat):
        file.write_text(json.dumps(changed))
        loaded = load_config([file])
        fine = path[0] in ANYTHING_GOES and path[0] in changed
        assert len(loaded.problems) == (0 if fine else 1), path
        assert check_run(loaded, WORLD[name], 50277) == list(loaded.problems), path


def test_a_key_given_twice_causes_no_further_problems(tmp_path: Path) -> None:
    flat = config_from_files([CONFIGS / "20B.yml"]).to_flat()
    for key, value in flat.items():
        (tmp_path / "again.yml").write_text(yaml.safe_dump({key: _plain(value)}))
        loaded = load_config([CONFIGS / "20B.yml", tmp_path / "again.yml"])
        if key in REPLACEABLE - {*TOKENIZER_KEYS}:
            assert loaded.problems == ()
        else:
            assert [problem.keys for problem in loaded.problems] == [(key,)]
        assert check_run(loaded, 8, 50277) == list(loaded.problems), key


def test_one_run_lists_keys_rules_grid_and_batch(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text(
        "num_layers: 4\nhiden_size: 64\nnum_attention_heads: 5\nseq_length: 32\npos_emb: rotary\ntrain_iters: ten\n"
        "pipe_parallel_size: 3\ntrain_batch_size: 7\ngas: 2\ntrain_micro_batch_size_per_gpu: 3\nmin_lr: 9\n"
    )
    found = {problem.keys: problem.source.line for problem in check_run(load_config([file]), 8, 100)}
    assert found == {
        ("hiden_size", "hidden_size"): 2,  # and no rule about hidden_size, which may have been meant
        ("train_iters",): 6,
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"): 8,
        ("min_lr", "optimizer.params.lr"): 11,
        ("pipe_parallel_size", "model_parallel_size"): 0,
    }
    file.write_text(file.read_text() + "pipe_parallel_size: 2\n")
    found = {problem.keys: problem.source.line for problem in check_run(load_config([file]), 8, 100)}
    assert ("min_lr", "optimizer.params.lr") in found
    assert ("pipe_parallel_size", "model_parallel_size") not in found, "nothing is known of the grid"


def test_values_in_doubt_are_those_that_may_have_been_meant_too(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("gsa: 4\nzero_optimization: {stge: 1}\noptimizer: {params: {betas: [0.9, x]}}\nzero_stage: 2\n")
    loaded = load_config([file], overrides=["nonsense"])
    assert {"gradient_accumulation_steps", "zero_optimization.stage", "optimizer.params.betas"} <= loaded.doubtful
    assert loaded.config.to_flat() == {"zero_optimization": {}, "optimizer": {"params": {}}}


def test_problems_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("seed: 1.5\nnum_layers: 2\nfp16: true\nnorm: layer\n")
    (tmp_path / "b.yml").write_text("hidden_size: x\nseq_length: y\n")
    loaded = load_config([tmp_path / "a.yml", tmp_path / "b.yml"], overrides=["warmup=2"])
    *in_files, last = [problem.source for problem in loaded.problems]
    places = [(Path(source.file).name, source.line) for source in in_files]
    of_a, of_b = [("a.yml", 1), ("a.yml", 3), ("a.yml", 4)], [("b.yml", 1), ("b.yml", 2)]
    assert places in (of_a + of_b, of_b + of_a)
    assert last == COMMAND_LINE


def test_the_first_problem_of_a_file_decides_where_the_file_comes() -> None:
    places = [COMMAND_LINE, Source.in_file("b", 9), Source.in_file("a", 1), Source.in_file("b", 2)]
    ordered = in_file_order(Problem((), "wrong", place) for place in places)
    assert [problem.source for problem in ordered] == [places[3], places[1], places[2], places[0]]


@pytest.mark.parametrize(
    ("path", "concerned"),
    [("optimizer.params.lr", True), ("optimizer", True), ("optimizer.params.lr.x", True), ("optimizer.param", False)],
)
def test_a_problem_concerns_keys_inside_and_around_its_own(path: str, concerned: bool) -> None:
    assert Problem(("seed", "optimizer.params.lr"), "wrong").concerns([path]) is concerned


def test_sources_survive_json_and_name_their_place() -> None:
    first = Source.in_file("a.yml", 3)
    second = Source.in_file("b.yml", 1, replaces=first)
    for source, text in (
        (first, "a.yml:3"),
        (second, "b.yml:1 (replacing a.yml:3)"),
        (first.derived("auto"), "a.yml:3 (auto)"),
        (COMMAND_LINE, "--set"),
    ):
        assert Source.from_json(json.loads(json.dumps(source.to_json()))) == source
        assert str(source) == text


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, (Mapping, list, tuple)) else value
