"""Degrees of parallelism and how layers are cut into pipeline stages."""

from __future__ import annotations

from pydantic import Field

from neox.config.sections.base import Section


class ParallelismConfig(Section):
    """How many ranks share one copy of the model, and how."""

    pipe_parallel_size: int = Field(0, ge=0)
    """Pipeline stages. 0 and 1 both mean one stage (no pipeline)."""

    model_parallel_size: int = Field(1, ge=1)
    """Tensor-parallel ranks that share every layer."""

    pipe_partition_method: str = "type:transformer|mlp"
    """How layers are divided into stages: `uniform` (equal layer counts), `parameters` (equal parameter counts) or
    `type:REGEX` (equal counts of layers whose class name matches, ignoring case; blocks are `TransformerLayer`)."""
