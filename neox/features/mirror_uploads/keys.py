"""Keys of the mirror of checkpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from neox.config.sections.base import Section
from neox.config.sections.conditions import OnlyWith
from neox.config.sections.numbers import PositiveInt
from neox.storage import why_not_writable


class MirrorKeys(Section):
    """Keys of the mirror of checkpoints."""

    checkpoint_mirror: Annotated[str | None, OnlyWith("save")] = None
    """Address in object storage (`s3://bucket/run`, `gs://...`) to which committed checkpoints are copied while
    training continues. keep_last_n_checkpoints holds there too. If it holds a newer checkpoint of this run than `save`,
    the run resumes from that; those of another run are refused without `overwrite`."""

    checkpoint_mirror_part_bytes: Annotated[PositiveInt, OnlyWith("checkpoint_mirror")] = 104857600
    """Size of the parts of an upload."""

    @field_validator("checkpoint_mirror")
    @classmethod
    def _is_writable(cls, value: str | None) -> str | None:
        """Refuse an address that checkpoints cannot be written to."""
        if value is None:
            return None
        reason = why_not_writable(value)
        if reason is not None:
            raise PydanticCustomError("mirror", "{reason}", {"reason": reason})
        return value
