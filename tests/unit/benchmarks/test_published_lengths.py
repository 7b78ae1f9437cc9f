"""The lengths that docs/long-context.md names are those of the plan."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published_lengths import table
from neox.config import load_config
from neox.plan import gpu_device, resolve
from neox.plan.search.longest_sequence import longest_sample

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "long-context.md").read_text(encoding="utf-8")


def test_the_table_next_to_published_lengths_is_the_plans() -> None:
    assert "\n".join(table()) in PAGE


def test_the_note_of_the_shipped_configuration_is_the_plans() -> None:
    config = load_config([ROOT / "configs" / "long" / "llama3-8B-128k.yml"]).config
    plan = resolve(config, 64, 128_256)
    found = longest_sample(plan, gpu_device(plan))
    assert found is not None
    assert found.changes == (("zero_optimization.stage", "2"),)
    assert f"seq_length may be up to {found.tokens:,} with these settings" in PAGE
