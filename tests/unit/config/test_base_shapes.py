"""`base_shapes_file`: the base width of mup's files, as gpt-neox writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.config import load_config
from neox.plan import static_problems

SHAPES = """\
# This is a base shape file encoded in yaml
# - `null` indicates a dimension is "finite", i.e. a non-"width" dimension
# - a number indicates the base dimension of an "infinite" dimension, i.e. some notion of "width"
sequential.0.word_embeddings.weight:
- null
- 256
sequential.2.attention.query_key_value.weight:
- 768
- 256
sequential.5.norm.weight:
- 256
"""
KEYS = """\
{"num_layers": 2, "hidden_size": 1024, "num_attention_heads": 4, "seq_length": 16, "max_position_embeddings": 16,
 "train_iters": 2, "train_micro_batch_size_per_gpu": 1, "use_mup": true, "lr_decay_style": "constant",
"""


def config_file(folder: Path, keys: str) -> Path:
    path = folder / "run.yml"
    path.write_text(KEYS + keys + "}")
    return path


@pytest.mark.parametrize("suffix", ["", ".0"])
@pytest.mark.parametrize("key", ["base_shapes_file", "base-shapes-file"])
def test_the_width_of_the_base_network_is_read(tmp_path: Path, suffix: str, key: str) -> None:
    (tmp_path / f"shapes.bsh{suffix}").write_text(SHAPES)
    loaded = load_config([config_file(tmp_path, f'"{key}": "{tmp_path}/shapes.bsh"')])
    assert not loaded.problems
    assert loaded.config.optimizer.mup_base_hidden_size == 256
    assert loaded.config.optimizer.width_multiplier(1024) == 4
    assert loaded.config.source("mup_base_hidden_size").rule == "base_shapes_file"
    assert not static_problems(loaded.config)


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (None, ""),
        ("", ""),
        ("0.word_embeddings.weight: [null, null]", ""),
        ("0.word_embeddings.weight: !!python/tuple [null, 256]", ""),
        ("other: [256]", ""),
        ("a: [", ""),
        (SHAPES, ', "mup_base_hidden_size": 128'),
    ],
)
def test_a_file_that_says_no_width_or_another_is_a_problem(tmp_path: Path, content: str | None, more: str) -> None:
    if content is not None:
        (tmp_path / "shapes").write_text(content)
    (problem,) = load_config([config_file(tmp_path, f'"base_shapes_file": "{tmp_path}/shapes"{more}')]).problems
    assert "base_shapes_file" in problem.keys
    assert problem.source.line > 0
