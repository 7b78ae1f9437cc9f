"""Published configurations of gpt-neox and its forks: a plan, or a refusal with the keys that are named here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import resolve

STORED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published_files.yml").read_text())
FILES: dict[str, dict[str, Any]] = STORED["files"]
PAGE = Path(__file__).parents[2] / "docs" / "gpt-neox-files.md"
ORGANISATIONS = sorted({file["organisation"] for file in FILES.values()})


def keys_of(file: dict[str, Any]) -> dict[str, Any]:
    common = {key: value for key, value in STORED["common"].items() if key not in file.get("without", ())}
    keys = {**common, **file["keys"]}
    if not {"train_micro_batch_size_per_gpu", "train_batch_size", "batch_size"} & keys.keys():
        keys["train_micro_batch_size_per_gpu"] = 1
    return keys


@pytest.mark.parametrize("organisation", ORGANISATIONS)
def test_each_file_has_a_plan_or_is_refused_by_name(organisation: str) -> None:
    for name, file in FILES.items():
        if file["organisation"] != organisation:
            continue
        refused: list[str] = []
        try:
            resolve(NeoXConfig.from_flat(keys_of(file)), file["world"], 50277)
        except ConfigError as error:
            refused = sorted({problem.keys[0] for problem in error.problems})
        assert refused == file.get("refused", []), name


def test_the_page_counts_them() -> None:
    assert len(FILES) >= 60
    assert len(ORGANISATIONS) >= 8
    page = PAGE.read_text()
    for organisation in ORGANISATIONS:
        files = [file for file in FILES.values() if file["organisation"] == organisation]
        plans = sum("refused" not in file for file in files)
        assert f"| {organisation} | {len(files)} | {plans} |" in page, organisation
