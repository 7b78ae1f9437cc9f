"""The picture of numbers by layer."""

from __future__ import annotations

import json

from matplotlib import image

from neox.metrics import draw_stability, stability_names


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_map_for_each_quantity(tmp_path):
    rows = []
    for iteration in range(1, 41):
        row = {"iteration": iteration, "kind": "step", "train/lm_loss": 1.0}
        if iteration % 10 == 0:
            for layer in (0, 2, 3):
                row[f"stability/gradient_norm/{layer}"] = 0.1 * iteration + layer
            for layer in (2, 3):
                row[f"stability/attention_logit/{layer}"] = -1.0 if iteration == 10 else float(layer)
        rows.append(row)
    metrics = tmp_path / "metrics.jsonl"
    write_rows(metrics, rows)
    assert stability_names(metrics) == {"gradient_norm": [0, 2, 3], "attention_logit": [2, 3]}
    assert draw_stability(metrics, tmp_path / "stability.png")
    pixels = image.imread(tmp_path / "stability.png")
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[-1])}) > 50  # more than text and frames


def test_nothing_is_drawn_without_numbers(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"iteration": 1, "kind": "step", "train/lm_loss": 1.0}])
    assert not draw_stability(tmp_path / "metrics.jsonl", tmp_path / "stability.png")
    assert not (tmp_path / "stability.png").exists()
