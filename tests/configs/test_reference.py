"""The generated reference page and JSON schema are up to date: `python -m neox.config.reference` rewrites them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from neox.config import reference
from neox.config.keys import ALIASES, NEOX_KEYS, UNSUPPORTED
from neox.config.neox_config import known_keys, section_classes

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
    for key in known_keys():
        assert key in properties
        assert key.replace("_", "-") in properties


def test_every_field_is_documented():
    for name, cls in section_classes().items():
        assert cls.__doc__, name
        for path, block in [("", cls), *reference.blocks_of(cls)]:
            missing = block.model_fields.keys() - reference.field_documents(block).keys()
            assert not missing, f"{name}.{path} has fields without a text under them"


# Keys whose default is not gpt-neox's, and why.
OTHER_DEFAULTS = {
    "gradient_accumulation_steps": "derived from the batch where it is absent",
    "distributed_backend": "nccl on the GPUs that gpt-neox knows, and elsewhere what serves the accelerator",
    "log_interval": "later gpt-neox's",
    "dataset_impl": "what train_impl needs",
    "mlp_multiple_of": "1, but where it is absent `geglu` is as wide as in v2.0",
    "master_port": "a free one",
    "optimizer": "a typed block",
    "zero_optimization": "a typed block",
}


DATE = r"\d{4}-\d\d-\d\d"


def test_the_table_of_keys_agrees_with_sections_and_aliases():
    sections = section_classes()
    fields = {key: (name, info) for name, cls in sections.items() for key, info in cls.model_fields.items()}
    for key, row in NEOX_KEYS.items():
        assert re.fullmatch(rf"(v2.0|before v2.0|ports|Megatron-LM|DeepSpeed|{DATE})( to {DATE})?", row.since), key
        assert row.section in sections, key
        assert (key in fields, key in ALIASES) == (row.status == "works", row.status == "alias"), key
        assert bool(row.reason) == (key in UNSUPPORTED), key
        if key in fields:
            section, info = fields[key]
            assert row.section == section, key
            default = info.get_default(call_default_factory=True)
            assert (default == row.default) != (key in OTHER_DEFAULTS), key
    assert set(ALIASES) <= set(NEOX_KEYS)
    lasting = [row for row in NEOX_KEYS.values() if row.since != "DeepSpeed" and row.removed is None]
    assert len(lasting) == 329, "gpt-neox's 323, one from before v2.0, two of its ports, three of Megatron-LM"
