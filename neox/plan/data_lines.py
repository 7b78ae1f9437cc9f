"""Lines of the plan about the training data."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.sections.data import DataConfig


def data_lines(data: DataConfig) -> Iterator[str]:
    """Yield lines about the training data; none if documents are read as they are."""
    if not any(data.fim_rates):
        return
    rates = ", ".join(f"{100 * rate:g} %" for rate in data.fim_rates)
    units = "the documents in each sample"
    if data.fim_level == "document":
        units = "the documents that fit into a sample"
    yield f"fim       {rates} of {units} (fim_rate), {100 * data.fim_spm_rate:g} % of them suffix first (fim_spm_rate)"
