"""The table of predicted and measured memory, from files as the training benchmark writes them."""

import json

from benchmarks.memory_table import main

SHAPE = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 16, "seq": 2048, "micro_batch": 4, "accumulation": 1}


def row(side, predicted, measured):
    kinds = {"attention": "flash", "compile": True, "recompute": False}
    return {"side": side, "shape": SHAPE, **kinds, "predicted_memory_bytes": predicted, "peak_memory_bytes": measured}


def table(directory, monkeypatch):
    monkeypatch.setattr("sys.argv", ["memory_table.py", str(directory)])
    return main()


def test_runs_that_know_both_figures(tmp_path, monkeypatch, capsys):
    measured, model, planned = (
        row("neox bf16", 30 * 2**30, 40 * 2**30),
        row("model bf16", None, 2**30),
        row("neox fp32", 2**30, None),
    )
    (tmp_path / "some-gpu").mkdir()
    for number, rows in enumerate(([measured], [model], [planned], [measured, model])):  # two sides have one peak
        about = {"date": "2026-11-21", "device": "NVIDIA H100", "name": "1.3B", "rows": rows}
        (tmp_path / "some-gpu" / f"train-{number}.json").write_text(json.dumps(about))
    assert table(tmp_path, monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        *("2026-11-21", "NVIDIA H100", "1.3B bf16", "4 x 2048", "flash, compiled", "no", "30.0 GiB", "40.0 GiB", "0.75")
    ]


def test_no_run(tmp_path, monkeypatch, capsys):
    assert table(tmp_path, monkeypatch) == 1
    assert "gpu.sh" in capsys.readouterr().err
