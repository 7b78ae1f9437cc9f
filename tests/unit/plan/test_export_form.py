"""What the plan says of a network that no Hugging Face model has."""

from __future__ import annotations

from typing import Any

from neox.config import NeoXConfig
from neox.plan import architecture_of
from neox.plan.network.export_form import export_note
from tests.plans import SMALL


def note(**keys: Any) -> str | None:
    config = NeoXConfig.from_flat({**SMALL, **keys})
    return export_note(config, architecture_of(config))


def test_a_network_without_a_hugging_face_form_is_noted_with_the_closest_one() -> None:
    assert note() is None
    said = note(norm="rmsnorm")  # GPT-NeoX's network, but for its norm
    assert said is not None
    assert "`norm: rmsnorm`" in said
