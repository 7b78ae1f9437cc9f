"""Steps, their sidecars, resumes, recipes and the command."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from neox.corpus import read_documents
from neox.errors import ConfigError, DataError
from tests.errors import raises_naming
from tools.web_text import STEPS, read_recipe, run_step
from tools.web_text.run import sidecar_path

sys.path.append(str(Path(__file__).parent))
toy: Any = importlib.import_module("toy_steps")  # by a name that worker processes can import


def documents(path: Path, count: int = 4000, *, kill: int = -1) -> Path:
    """A file of several chunks; some documents hold the word "drop", and one the word "kill"."""
    lines = []
    for i in range(count):
        word = "drop" if i % 7 == 3 else "kill" if i == kill else "keep"
        lines.append(json.dumps({"text": f"document {i} {word} " + "naïve text " * 120, "url": f"http://x/{i}"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def upper(source: Path, output: Path, **settings: Any) -> dict[str, Any]:
    return run_step(toy.UPPER, toy.UpperSettings(input=(source,), output=output, **settings))


def test_kept_dropped_and_counts(tmp_path: Path) -> None:
    source = documents(tmp_path / "in.jsonl", 50)
    report = upper(source, tmp_path / "out.jsonl.zst", report=tmp_path / "report.json")
    texts = [d.text for d in read_documents(tmp_path / "out.jsonl.zst")]
    assert report["documents_in"] == 50
    assert report["documents_out"] == len(texts) == 43
    assert report["dropped"]["word"][0] == 7
    assert report["changed"] == {"upper": 43}
    assert texts[0].startswith("DOCUMENT 0 KEEP NAÏVE")
    assert report["bytes_out"] == sum(len(text.encode()) for text in texts)
    assert json.loads((tmp_path / "report.json").read_text())["documents_out"] == 43
    plain = tmp_path / "plain.jsonl"
    upper(source, plain)
    dropped = [json.loads(line) for line in (tmp_path / "dropped" / "plain.jsonl").read_text().splitlines()]
    assert [d["url"] for d in dropped[:2]] == ["http://x/3", "http://x/10"]
    assert dropped[0]["dropped"] == "word"
    assert json.loads(plain.read_text().splitlines()[0])["url"] == "http://x/0"


def test_same_bytes_for_any_number_of_workers_and_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neox.resume.SECONDS_BETWEEN_STATES", 0)
    source = documents(tmp_path / "in.jsonl", 5000, kill=4999)  # about seven chunks
    one = tmp_path / "one.jsonl.zst"
    upper(source, one)
    kills = tmp_path / "kills"
    kills.write_text("xx")  # a worker is replaced once
    settings = {"workers": 2, "kill_at": str(kills)}
    several = tmp_path / "several.jsonl.zst"
    with raises_naming(DataError, "signal 9", "--workers"):
        upper(source, several, **settings)
    assert (tmp_path / "several.jsonl.zst.work" / "state.progress.json").exists()
    assert upper(source, several, **settings)["documents_in"] == 5000
    assert one.read_bytes() == several.read_bytes()
    for name in ("one", "several"):
        assert not (tmp_path / f"{name}.jsonl.zst.work").exists()
    assert (tmp_path / "dropped" / one.name).read_bytes() == (tmp_path / "dropped" / several.name).read_bytes()
    assert not multiprocessing.active_children()


def test_a_complete_step_is_kept_until_input_or_settings_change(tmp_path: Path) -> None:
    source, out = documents(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    assert upper(source, out)["fresh"]
    assert not upper(source, out, workers=2)["fresh"]
    assert upper(source, out, word="keep")["fresh"]
    documents(source, 21)
    assert upper(source, out, word="keep")["fresh"]
    out.unlink()
    assert upper(source, out, word="keep")["fresh"]


def test_an_input_that_was_changed_after_its_step_is_refused(tmp_path: Path) -> None:
    source, middle = documents(tmp_path / "in.jsonl", 20), tmp_path / "middle.jsonl"
    upper(source, middle)
    upper(middle, tmp_path / "out.jsonl")
    middle.write_text('{"text": "another"}\n')
    with raises_naming(DataError, "middle.jsonl", "upper", "middle.jsonl.step.json"):
        upper(middle, tmp_path / "out.jsonl")
    sidecar_path(middle).unlink()
    assert upper(middle, tmp_path / "out.jsonl")["documents_in"] == 1


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b'{"text": "good"}\n{"text": "\xff"}\n', ("in.jsonl:2 (byte 17)", "UTF-8")),
        (
            b'{"text": "' + b"x" * (2 << 20) + b'"}\n{"text": "good"}\n',
            ("in.jsonl:1 ", "2,097,", "--max-line-mb"),
        ),
        (b"", ("in.jsonl: ", "empty")),
        (b'{"text": "good"}\n{"other": 1}\n', ("in.jsonl:2 ", "'text'")),
    ],
)
@pytest.mark.parametrize("step", ["upper", "shuffle"])
def test_bad_inputs_are_named_or_skipped(tmp_path: Path, content: bytes, names: tuple[str, ...], step: str) -> None:
    source, chosen = tmp_path / "in.jsonl", toy.UPPER if step == "upper" else STEPS[step]
    source.write_bytes(content)
    values = {"input": (source,), "output": tmp_path / "out.jsonl", "max_line_mb": 1}
    with raises_naming(DataError, *names):
        run_step(chosen, chosen.settings(**values))
    assert not (tmp_path / "out.jsonl").exists()
    report = run_step(chosen, chosen.settings(**values, skip_bad=1))
    assert report["bad"] == len(report["bad_examples"]) == 1
    assert report["documents_out"] == content.count(b"good")
    with raises_naming(DataError, "--skip-bad 1"):  # the complete output lacks what may not be skipped now
        run_step(chosen, chosen.settings(**values))


@pytest.mark.parametrize(
    ("step", "values", "unused"),
    [
        ("extract", {"method": "bs4", "favor": "recall"}, ("--favor", "--method")),
        ("extract", {"method": "raw", "tables": False}, ("--tables", "--method")),
        ("dedup", {"exact": True, "threshold": 0.8}, ("--threshold", "--exact")),
    ],
)
def test_settings_without_effect_are_refused(
    tmp_path: Path, step: str, values: dict[str, Any], unused: tuple[str, str]
) -> None:
    paths = {"input": (tmp_path / "in.jsonl",), "output": tmp_path / "out.jsonl"}
    with raises_naming(ConfigError, *unused):
        STEPS[step].make_settings({**paths, **values}, lambda name: f"--{name.replace('_', '-')}")


def test_shuffling_depends_on_the_seed_alone(tmp_path: Path) -> None:
    source, step = documents(tmp_path / "in.jsonl", 2000), STEPS["shuffle"]

    def shuffled(name: str, **settings: Any) -> bytes:
        run_step(step, step.settings(input=(source,), output=tmp_path / name, **settings))
        return (tmp_path / name).read_bytes()

    whole = shuffled("whole.jsonl", seed=1)
    assert sorted(whole.splitlines()) == sorted(map(_compact, source.read_bytes().splitlines()))
    assert shuffled("runs.jsonl", seed=1, memory_mb=1) == whole
    assert shuffled("other.jsonl", seed=2) != whole


def _compact(line: bytes) -> bytes:
    return json.dumps(json.loads(line), ensure_ascii=False, separators=(",", ":")).encode()


def test_recipes_chain_steps_and_name_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yml"
    head = f"directory: {tmp_path / 'out'}\nseed: 3\nsteps:\n"
    path.write_text(head + "  - shuffle: {input: [a.jsonl], memory-mb: 2}\n  - shuffle\n")
    first, second = (chosen.settings for chosen in read_recipe(path, STEPS))
    assert second.input == (first.output,)
    assert first.output.name == "01-shuffle.jsonl.zst"
    assert (first.seed, second.seed) == (3, 3)
    for body, place, key in (
        ("  - shuffle:\n      input: a\n      sede: 1\n", "recipe.yml:6:", "`sede` of step shuffle"),
        ("  - shuffle:\n      input: a\n      memory_mb: many\n", "recipe.yml:6:", "`memory_mb` of step shuffle"),
        ("  - shuffle\n", "recipe.yml:", "`input` of step shuffle"),
        ("  - polish\n", "recipe.yml:", "`polish`"),
    ):
        path.write_text(head + body)
        with raises_naming(ConfigError, place, key):
            read_recipe(path, STEPS)


def test_every_setting_is_documented() -> None:
    for step in STEPS.values():
        assert step.settings.__doc__
        assert [name for name, info in step.settings.model_fields.items() if not info.description] == []


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"report": "in.jsonl"}, ("in.jsonl", "--report")),
        ({"report": "out.jsonl"}, ("out.jsonl", "--report")),
        ({"input": ("dropped/out.jsonl",)}, ("dropped/out.jsonl", "--output")),
        ({"output": "out.jsonl.gz"}, ("out.jsonl.gz", ".jsonl.zst")),
        ({"output": ""}, ("'.'",)),
        ({"input": ("\udcff.jsonl",)}, ("UTF-8",)),
    ],
)
def test_no_output_replaces_an_input_or_has_a_name_of_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], names: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dropped").mkdir()
    for name in ("in.jsonl", "dropped/out.jsonl", "\udcff.jsonl"):
        documents(Path(name), 2)
    with raises_naming(ConfigError, *names):
        run_step(toy.UPPER, toy.UpperSettings(**{"input": ("in.jsonl",), "output": "out.jsonl", **values}))
    assert Path("in.jsonl").read_bytes() == Path("dropped/out.jsonl").read_bytes()
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("content", ["[]", "null", '{"step": 1, "identity": "", "inputs": null, "outputs": null}', "{"])
def test_a_damaged_sidecar_is_named(tmp_path: Path, content: str) -> None:
    source, out = documents(tmp_path / "in.jsonl", 2), tmp_path / "out.jsonl"
    sidecar_path(out).write_text(content)
    assert upper(source, out)["fresh"]
    sidecar_path(out).write_text(content)
    with raises_naming(DataError, "out.jsonl.step.json"):
        upper(out, tmp_path / "next.jsonl")


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("directory: d\nsteps:\n  - shuffle: {input: a.jsonl}\n  - 5\n", ("r.yml:4",)),
        ("directory: d\nsteps:\n  - shuffle\n", ("r.yml:3: `input`",)),
        ("directory: d\nworkers: x\nsteps:\n  - shuffle: {input: a.jsonl}\n", ("r.yml:2: `workers`",)),
        ("directory: d\nsteps:\n  - split:\n      input: a.jsonl\n      output: b.txt\n", ("r.yml:5: `output`",)),
        (
            "directory: d\nsteps:\n  - clean: {input: a.jsonl, min-tokens: 1, min_tokens: 2}\n",
            ("r.yml:3: ", "min_tokens"),
        ),
        (
            "directory: d\nsteps:\n"
            + "".join(f"  - shuffle: {{input: {name}.jsonl, output: d/x.jsonl}}\n" for name in "ab"),
            ("r.yml:4: `output`", "shuffle"),
        ),
        (
            "directory: d\nsteps:\n  - tokenize: {input: [a/x.jsonl, b/x.jsonl], tokenizer_type: A, each: true}\n",
            ("r.yml:3: `tokenizer_type`",),
        ),
        (
            "directory: d\nsteps:\n"
            "  - tokenize: {input: [a/x.jsonl, b/x.jsonl], tokenizer_type: HFTokenizer, each: true}\n",
            ("a/x.jsonl", "b/x.jsonl"),
        ),
    ],
)
def test_mistakes_in_recipes_are_named_with_their_line(tmp_path: Path, recipe: str, names: tuple[str, ...]) -> None:
    (tmp_path / "r.yml").write_text(recipe)
    with raises_naming(ConfigError, *names):
        read_recipe(tmp_path / "r.yml", STEPS)
