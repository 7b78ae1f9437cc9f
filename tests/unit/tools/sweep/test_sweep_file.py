"""Sweep files: which runs they describe, and what is refused by place."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.errors import ConfigError
from tools.sweep.places import find_places
from tools.sweep.sweep_file import Sweep, override, read_sweep


def read(directory: Path, text: str) -> Sweep:
    file = directory / "lr.yml"
    file.write_text("configs: [a.yml]\n" + text)
    return read_sweep(file)


def test_a_grid_has_every_combination(tmp_path: Path) -> None:
    sweep = read(tmp_path, "grid:\n  optimizer.params.lr: [1.0e-3, 0.01]\n  weight-decay: [0, 0.1]\n  seed: [3]\n")
    assert [run.name for run in sweep.runs] == [
        "lr=0.001,weight_decay=0,seed=3",
        "lr=0.001,weight_decay=0.1,seed=3",
        "lr=0.01,weight_decay=0,seed=3",
        "lr=0.01,weight_decay=0.1,seed=3",
    ]
    assert sweep.varied == ("optimizer.params.lr", "weight_decay")
    assert (sweep.name, sweep.directory) == ("lr", Path("runs/lr"))
    assert override("optimizer.params.lr", 1e-5) == "optimizer.params.lr=1e-05"
    assert override("attention_config", [[["flash"], 2]]) == 'attention_config=[[["flash"], 2]]'


def test_a_list_names_its_runs(tmp_path: Path) -> None:
    sweep = read(tmp_path, "list:\n- {name: base}\n- {name: a/b, norm: rmsnorm}\n- {norm: layernorm}\n")
    assert [run.name for run in sweep.runs][::2] == ["base", "norm=layernorm"]
    assert sweep.runs[1].name.startswith("a_b-")  # a directory has no slash, and another name gets another one
    assert sweep.runs[0].values == {}


def test_random_draws_are_repeated_and_extended(tmp_path: Path) -> None:
    text = "random:\n  runs: {}\n  seed: 5\n  values:\n    optimizer.params.lr: {{log_uniform: [1e-4, 1e-2]}}\n"
    text += "    num_layers: [2, 4]\n    seed: {{integer: [1, 9]}}\n    clip: {{uniform: [0.5, 1]}}\n"
    few = read(tmp_path, text.format(3)).runs
    more = read(tmp_path, text.format(40)).runs
    assert more[:3] == few
    rates = [run.values["optimizer.params.lr"] for run in more]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 10 < sum(rate < 1e-3 for rate in rates) < 30  # half of them: uniform in the logarithm
    assert {run.values["num_layers"] for run in more} == {2, 4}
    assert {run.values["seed"] for run in more} <= set(range(1, 10))
    assert all(0.5 <= run.values["clip"] <= 1 for run in more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grid: {seed: [1]}\nlist: [{}]\n", "one of grid, list, random"),
        ("grid: {seed: 1}\n", "lr.yml:2: `seed` must be a list"),
        ("grid: {save: [a, b]}\n", "lr.yml:2: `save`"),
        ("set: {include: a}\ngrid: {seed: [1]}\n", "lr.yml:2: `include`"),
        ("grid: {seed: [1, 1]}\n", "several runs are the same: seed=1"),
        ("grid: {seed: [1]}\nworkers: 3\n", "lr.yml:3: `workers` is no key of a sweep"),
        ("random: {runs: 5, seed: 1, values: {seed: [1, 2]}}\n", "only 2 combinations"),
        ("random: {runs: 5, seed: 1, values: {x: {normal: [1, 2]}}}\n", "lr.yml:2: `x`"),
        ("random: {runs: 5, seed: 1, values: {x: {log_uniform: [0, 2]}}}\n", "above 0"),
        ("goal: most\ngrid: {seed: [1]}\n", "lr.yml:2: `goal`"),
        ("metric: eval/mine_score\ngrid: {seed: [1]}\n", "lr.yml:2: `metric`"),
    ],
)
def test_malformed_files_are_refused_by_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert words in str(refused.value)


def test_places_of_a_hostfile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\nb slots=4\nc slots=4 spare\n")
    whole = find_places(str(hostfile), None)
    assert [(place.name, place.spare) for place in whole] == [("a", False), ("b", False), ("c", True)]
    assert whole[0].flags[:4] == ["-H", str(hostfile), "--include", "a:0,1,2,3"]
    halves = find_places(str(hostfile), 2)
    assert [place.flags[3] for place in halves[:3]] == ["a:0,1", "a:2,3", "b:0,1"]
    (here,) = find_places(None, None)
    assert here.flags == []
    hostfile.write_text("a slots=4\nb slots=2\n")
    with pytest.raises(ConfigError, match="different batches"):
        find_places(str(hostfile), None)
    assert [place.name for place in find_places(str(hostfile), 4)] == ["a"]
    with pytest.raises(ConfigError, match="-H"):
        find_places(None, 2)
