"""Figures of GPUs: files that say where they come from, and what a benchmark measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import gpu_figures
from neox.devices import DEVICES, GPUS
from neox.devices.gpu import GPU_FILES

RECORDED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "gpu-2026-11-27.json"


def test_the_h100_has_the_figures_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = json.loads(RECORDED.read_text())["steps"]["ceilings"]["figures"]
    written = json.loads((GPU_FILES / "h100.json").read_text())
    shutil.copy(GPU_FILES / "a100-80.json", tmp_path / "h100.json")
    monkeypatch.setattr(gpu_figures, "GPU_FILES", tmp_path)
    again = json.loads(gpu_figures.write_figures("h100", ceilings).read_text())
    for name, value in gpu_figures.measured_figures(ceilings).items():
        assert written[name] == again[name] == value
    assert written["sources"][0] == again["sources"][0]
    assert again["link_gbs"] == GPUS["a100-80"].link_gbs


@pytest.mark.parametrize("name", sorted(GPUS))
def test_figures_are_below_the_peaks_and_have_sources(name: str) -> None:
    gpu = GPUS[name]
    assert 0.2 * gpu.peak_tflops < gpu.attention_tflops <= gpu.matmul_tflops <= gpu.peak_tflops
    assert 0.5 * gpu.network_sheet_gbs < gpu.network_gbs <= gpu.network_sheet_gbs
    assert gpu.family in DEVICES
    assert ("fp8" in gpu.formats) <= (gpu.fp8_matmul_tflops > 0)
    assert len(gpu.sources) == 2, "of the GPU, and of its host"
