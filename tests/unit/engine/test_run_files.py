"""Which chat template and which settings of generation the checkpoints of a run carry."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from neox.checkpoint import write_chat_template, write_generation_settings
from neox.data import IndexedDatasetBuilder, Sidecar, write_sidecar
from neox.engine.checkpoints.run_files import settings_to_save, template_to_save
from neox.tokenizer.chat import ChatTemplate
from tests.plans import small_plan


def dataset(prefix: Path, template: ChatTemplate | None) -> str:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([1, 2, 3])
    settings: dict[str, Any] = {}
    if template is not None:
        settings["chat"] = {"template": asdict(template)}
    write_sidecar(prefix, Sidecar("CharLevelTokenizer", "0", 512, 0, False, 1, 3, 3, settings=settings))
    return str(prefix)


def test_the_key_wins_then_the_data_then_the_loaded_checkpoint(tmp_path: Path) -> None:
    text = dataset(tmp_path / "text", None)
    chats = dataset(tmp_path / "chats", ChatTemplate("of the data", {"eos_token": "x"}))
    loaded = tmp_path / "global_step1"
    loaded.mkdir()
    on_text = small_plan(train_data_paths=[text])
    assert template_to_save(on_text, None) is None
    assert template_to_save(on_text, loaded) is None
    write_chat_template(loaded, ChatTemplate("loaded", {}))
    assert template_to_save(on_text, loaded) == ChatTemplate("loaded", {})
    on_both = small_plan(train_data_paths=[text, chats])
    assert template_to_save(on_both, loaded) == ChatTemplate("of the data", {"eos_token": "x"})
    file = tmp_path / "given.jinja"
    file.write_text("given")
    keys = {"tokenizer_type": "CharLevelTokenizer", "chat_template": str(file)}
    assert template_to_save(small_plan(train_data_paths=[chats], **keys), loaded) == ChatTemplate("given", {})


def test_a_run_keeps_the_end_ids_of_the_loaded_checkpoint(tmp_path: Path) -> None:
    loaded = tmp_path / "global_step0"
    loaded.mkdir()
    plan = small_plan(tokenizer_type="CharLevelTokenizer")
    assert settings_to_save(plan, None) == settings_to_save(plan, loaded) == {}
    settings = {"eos_token_id": [7, 8], "temperature": 0.5}
    write_generation_settings(loaded, settings)
    assert settings_to_save(plan, loaded) == settings
    assert settings_to_save(small_plan(tokenizer_type="HFTokenizer", vocab_file="missing.json"), loaded) == settings
