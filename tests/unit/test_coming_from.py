"""What the pages for users of other systems offer: each command of ours parses, and each key loads."""

from __future__ import annotations

import os
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from neox.config import NeoXConfig
from neox.config.keys import UNSUPPORTED
from neox.plan import config_from_files, gpu_device, resolve
from neox.plan.devices.device import memory_on
from neox.preflight.command_line import parse_arguments
from neox.preflight.planning import read_config

ROOT = Path(__file__).parents[2]
PAGES = ("coming-from.md", "recipes/09-from-others.md")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for page in PAGES
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]
OURS = list(dict.fromkeys(row[1].strip("`") for row in ROWS))
COMMANDS = [text for text in OURS if text.startswith("python ")]


def test_every_row_has_three_cells() -> None:
    assert {len(row) for row in ROWS} == {3}
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, script, *words = shlex.split(command)
    if Path(script).name == "deepy.py":
        arguments = parse_arguments(words)
        if arguments.script != "doctor":
            read_config(arguments)
        return
    tool = ROOT / script
    if not tool.parent.samefile(ROOT / "tools"):  # another name of a tool
        assert os.access(tool, os.R_OK)
        text = tool.read_text(encoding="utf-8")
        tool = next(file for file in (ROOT / "tools").glob("*.py") if f'"{file.name}"' in text)
    monkeypatch.syspath_prepend(str(tool.parent))
    names = runpy.run_path(str(tool))
    (names.get("parser") or names["build_parser"])().parse_args(words)


def test_keys_load() -> None:
    texts = [text for text in OURS if text not in COMMANDS]
    assert len(texts) > 30
    for text in texts:
        keys = yaml.safe_load(text)
        assert isinstance(keys, dict), text
        NeoXConfig.from_flat(keys.get("overrides", keys))
        assert not keys.keys() & UNSUPPORTED.keys(), text


def test_memory_beside_fleetx() -> None:
    """The page's numbers are about those of the plan."""
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (345M|1\.3B)[^|]*\|[^|]*\| (.*) \|$", page, re.MULTILINE))
    no_flash, whole = 'attention_config=[[["global"], "all"]]', "checkpoint_activations=false"
    shown = {(model, stage): cell for model, row in rows.items() for stage, cell in enumerate(row.split(" | "))}
    (flash,) = re.findall(r"without recomputation is (.*) \(ZeRO 0\)", page)
    asked = {("345M", stage): [no_flash, whole] for stage in (0, 1)}
    asked |= {("1.3B", stage): [no_flash, "hidden_size=2048"] for stage in (0, 1)}
    asked |= {("flash", 0): [whole]}
    for (model, stage), overrides in asked.items():
        files = [ROOT / "configs" / name for name in ("gpt2/345M.yml", "local_setup.yml")]
        config = config_from_files(files, overrides=[*overrides, f"zero_optimization.stage={stage}"])
        plan = resolve(config, 1, 50257)
        found = memory_on(plan, gpu_device(plan)).total / 2**30
        assert float({**shown, ("flash", 0): flash}[model, stage].split()[0]) == pytest.approx(found, rel=0.05), found
