"""What every section of a configuration is: frozen, closed to unknown keys, documented under each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Keys that belong together; nothing changes after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)
