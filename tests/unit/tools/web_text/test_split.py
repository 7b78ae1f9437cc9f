"""Train, validation and test sets."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from neox.errors import ConfigError
from tests.errors import raises_naming
from tools.web_text import run_step
from tools.web_text.signatures import similarity
from tools.web_text.split import SPLIT, SplitSettings

sys.path.append(str(Path(__file__).parent))
real: Any = importlib.import_module("real_texts")


def split(source: Path, output: Path, **settings: Any) -> dict[str, Any]:
    return run_step(SPLIT, SplitSettings(input=(source,), output=output, **settings))


def lines_of(folder: Path) -> dict[str, list[str]]:
    names = {"train": "out.jsonl", "valid": "out.valid.jsonl", "test": "out.test.jsonl"}
    return {part: (folder / name).read_text().splitlines() for part, name in names.items()}


def test_parts_hold_every_line_once_and_map_back_to_it(tmp_path: Path) -> None:
    source = real.write(tmp_path / "in.jsonl", real.passages(400))
    text = source.read_text().splitlines()
    source.write_text("\n\n".join(text) + "\n\nnot JSON\n")
    report = split(source, tmp_path / "out.jsonl", test_percent=20, dev_percent=10, near_duplicates=False, skip_bad=1)
    parts = lines_of(tmp_path)
    assert sorted(line for lines in parts.values() for line in lines) == sorted(text)
    assert {part: len(lines) for part, lines in parts.items()} == {part: report["details"][part] for part in parts}
    assert 0.15 < len(parts["test"]) / len(text) < 0.25
    assert 0.05 < len(parts["valid"]) / len(text) < 0.15
    original = source.read_text().splitlines()
    for name, lines in zip(("out", "out.valid", "out.test"), parts.values(), strict=True):
        places = [line.split("\t") for line in (tmp_path / f"{name}.tsv").read_text().splitlines()]
        assert [original[int(number) - 1] for _, number in places] == lines
        assert {file for file, _ in places} <= {str(source)}
    assert not split(
        source, tmp_path / "out.jsonl", test_percent=20, dev_percent=10, near_duplicates=False, skip_bad=1
    )["fresh"]


def test_near_duplicates_go_to_one_part(tmp_path: Path) -> None:
    texts = real.with_copies(seed=3, size=900, most_edits=6, limit=150)
    source = real.write(tmp_path / "in.jsonl", texts)

    def pairs_across(**settings: Any) -> int:
        split(source, tmp_path / "out.jsonl", test_percent=30, dev_percent=20, **settings)
        part_of = {json.loads(line)["text"]: part for part, lines in lines_of(tmp_path).items() for line in lines}
        return sum(
            part_of[a] != part_of[b] and similarity(a, b) >= 0.9
            for n, a in enumerate(texts)
            for b in texts[:n]
            if a[:40] == b[:40]
        )

    assert pairs_across() == 0
    assert pairs_across(near_duplicates=False) > 5


def test_the_seed_decides(tmp_path: Path) -> None:
    source = real.write(tmp_path / "in.jsonl", real.passages(2000, 80))
    found = []
    for seed in (1, 1, 2):
        split(source, tmp_path / "out.jsonl", seed=seed, test_percent=30)
        found.append((tmp_path / "out.test.jsonl").read_bytes())
        (tmp_path / "out.jsonl.step.json").unlink()
    assert found[0] == found[1] != found[2]


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    source = real.write(tmp_path / "in.jsonl", ["text"])
    with raises_naming(ConfigError, "--test-percent", "--dev-percent"):
        split(source, tmp_path / "out.jsonl", test_percent=60, dev_percent=40)
    with raises_naming(ConfigError, ".jsonl.zst"):
        split(source, tmp_path / "out")
