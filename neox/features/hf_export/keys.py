"""Keys of exports in training."""

from __future__ import annotations

from typing import Annotated, Literal

from neox.config.sections.base import Section
from neox.config.sections.conditions import OnlyWith, Requires


class HfExportKeys(Section):
    """Keys of exports in training."""

    hf_export: Annotated[
        Literal["every save", "best"] | None,
        OnlyWith("save"),
        Requires("save_best", when=("best",), advice="name the metric"),
    ] = None
    """Export committed checkpoints to Hugging Face's format while training goes on, in a process of their own next to
    rank 0: `every save`, or only those that become the `best` (save_best), without those that another one has passed
    before their turn. Each is verified as `tools/convert_to_hf.py` does, and appears complete or not at all."""

    hf_export_dir: Annotated[str | None, OnlyWith("hf_export")] = None
    """Directory of the exports, `global_stepN` or `best` in it (`best.json` says of which checkpoint). By default it is
    that of `save` with `-hf` at its end."""

    hf_export_hub: Annotated[str | None, OnlyWith("hf_export")] = None
    """Repository of the Hugging Face hub (`USER/NAME`) to which exports are uploaded, too: each as the revision
    `stepN`. A new repository is private."""
