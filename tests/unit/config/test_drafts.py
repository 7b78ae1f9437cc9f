"""One run lists everything that is wrong, and nothing that only follows from a key that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from neox.config import draft_config
from neox.config.keys import REPLACEABLE, TOKENIZER_KEYS
from neox.plan import further_problems, load_config

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
def test_a_bad_key_causes_no_further_errors(name: str, tmp_path: Path) -> None:
    flat = json.loads(json.dumps(load_config([CONFIGS / name]).to_flat()))
    file = tmp_path / "bad.json"
    for path, changed in misspelled(flat):
        file.write_text(json.dumps(changed))
        draft = draft_config([file])
        assert further_problems(draft, WORLD[name], 50277) == [], path
        fine = path[0] in ANYTHING_GOES and path[0] in changed
        assert len(draft.problems) == (0 if fine else 1), path


def test_a_key_given_twice_causes_no_further_errors(tmp_path: Path) -> None:
    flat = load_config([CONFIGS / "20B.yml"]).to_flat()
    for key, value in flat.items():
        (tmp_path / "again.yml").write_text(yaml.safe_dump({key: _plain(value)}))
        draft = draft_config([CONFIGS / "20B.yml", tmp_path / "again.yml"])
        assert len(draft.problems) == (0 if key in REPLACEABLE - {*TOKENIZER_KEYS} else 1), key
        assert further_problems(draft, 8, 50277) == [], key


def test_one_run_lists_keys_laws_grid_and_batch(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text(
        "num_layers: 4\nhiden_size: 64\nnum_attention_heads: 5\nseq_length: 32\npos_emb: rotary\ntrain_iters: ten\n"
        "pipe_parallel_size: 3\ntrain_batch_size: 7\ngas: 2\ntrain_micro_batch_size_per_gpu: 3\nmin_lr: 9\n"
    )
    draft = draft_config([file])
    assert len(draft.problems) == 2  # hiden_size, train_iters
    more = "\n".join(further_problems(draft, 8, 100))
    assert f"{file}:11: `min_lr" in more
    assert "8 GPUs cannot be divided into copies of the model on 3" in more
    assert f"{file}:8: `train_batch_size: 7` is not a multiple of `train_micro_batch_size_per_gpu: 3`" in more
    assert "hidden_size" not in more  # which may have been meant
    file.write_text(file.read_text() + "pipe_parallel_size: 2\n")
    more = "\n".join(further_problems(draft_config([file]), 8, 100))
    assert "min_lr" in more
    assert "GPUs" not in more  # nothing is known of the grid


def test_values_in_doubt_are_those_that_may_have_been_meant_too(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("gsa: 4\nzero_optimization: {stge: 1}\noptimizer: {params: {betas: [0.9, x]}}\nzero_stage: 2\n")
    draft = draft_config([file], overrides=["nonsense"])
    assert {"gradient_accumulation_steps", "zero_optimization.stage", "optimizer.params.betas"} <= draft.doubtful
    assert draft.config.to_flat() == {"zero_optimization": {}, "optimizer": {"params": {}}}


def test_problems_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("seed: 1.5\nnum_layers: 2\nfp16: true\nnorm: layer\n")
    (tmp_path / "b.yml").write_text("hidden_size: x\nseq_length: y\n")
    draft = draft_config([tmp_path / "a.yml", tmp_path / "b.yml"], overrides=["warmup=2"])
    places = [problem.removeprefix(f"{tmp_path}/").split(": ")[0] for problem in draft.problems]
    assert places[-1] == "--set"
    assert sorted(places[:-1]) in (places[:-1], [*places[2:-1], *places[:2]])


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, (Mapping, list, tuple)) else value
