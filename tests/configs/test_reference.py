"""The generated reference page and JSON schema are up to date: `python -m neox.config.reference` rewrites them."""

from __future__ import annotations

import json
from pathlib import Path

from neox.config import NeoXConfig, reference
from neox.config.aliases import ALIASES
from neox.config.flat import key_sections, known_keys, section_classes
from neox.config.unsupported import UNSUPPORTED

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date():
    assert (ROOT / reference.PAGE).read_text() == reference.page(), "run `python -m neox.config.reference`"


def test_schema_is_up_to_date():
    """Keys and descriptions; the rest of the schema is pydantic's and may change with its version."""
    written = json.loads((ROOT / reference.SCHEMA).read_text())["properties"]
    fresh = reference.schema()["properties"]
    descriptions = [{key: value.get("description") for key, value in some.items()} for some in (written, fresh)]
    assert descriptions[0] == descriptions[1], "run `python -m neox.config.reference`"


def test_schema_has_both_spellings_of_every_key():
    properties = reference.schema()["properties"]
    for key in known_keys(NeoXConfig):
        assert key in properties
        assert key.replace("_", "-") in properties


def test_every_field_is_documented():
    for name, cls in section_classes(NeoXConfig).items():
        assert cls.__doc__, name
        for path, block in [("", cls), *reference.blocks_of(cls)]:
            for key, info in block.model_fields.items():
                assert info.description, f"{name}.{path}.{key} needs a docstring under it"


def test_since_is_told_for_every_key():
    """A key that is neither gpt-neox's nor listed as this project's own belongs in reference.OWN."""
    names = set((ROOT / "tests/unit/config/gpt_neox_arguments.txt").read_text().split())
    assert set(key_sections(NeoXConfig)) - names == reference.OWN
    assert names >= reference.LATER
    assert names >= set(UNSUPPORTED)
    assert names >= set(ALIASES) - {"save_interval"}


def test_no_key_lives_twice():
    sections, aliases, unsupported = set(key_sections(NeoXConfig)), set(ALIASES), set(UNSUPPORTED)
    assert not sections & aliases
    assert not sections & unsupported
    assert not aliases & unsupported
