"""Keys of older gpt-neox that stand for several keys here, and keys that load with a note."""

from __future__ import annotations

from types import MappingProxyType

import pytest

import neox
from neox.config import NeoXConfig, flat, neox_config
from neox.config.keys import ALIASES, NEOX_KEYS, Alias
from neox.errors import ConfigError
from neox.plan import resolve
from neox.plan.rules import notes
from tests.errors import raises_naming

TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16, "train_iters": 2}
SIZES = {**TINY, "max_position_embeddings": 16, "train_micro_batch_size_per_gpu": 1, "lr_decay_style": "constant"}


@pytest.mark.parametrize(("given", "used"), [("silu", "swiglu"), ("gelu", "geglu"), (None, "geglu"), ("relu", "reglu")])
def test_the_llama_mlp_is_gated_and_wide(given: str | None, used: str) -> None:
    config = NeoXConfig.from_flat({**SIZES, "hidden_size": 4096, "mlp_type": "llama", "activation": given})
    assert (config.model.activation, config.model.mlp_width, config.model.use_bias_in_mlp) == (used, 11008, False)
    again = NeoXConfig.from_flat(config.to_flat())
    assert again.model == config.model


def test_a_checkpoint_of_before_keeps_its_biases_and_norm() -> None:
    """Until November 2026 `mlp_type: llama` was written to config.yml with its width, and left the rest as it was."""
    stored = {**SIZES, "mlp_type": "llama", "activation": "swiglu", "mlp_width": 256, "norm": "rmsnorm"}
    for keys, bias in (({}, True), ({"use_bias_in_mlp": False}, False)):
        model = NeoXConfig.from_flat({**stored, **keys}).model
        assert (model.norm, model.use_bias_in_mlp, model.mlp_width) == ("rmsnorm", bias, 256)


def test_what_contradicts_the_llama_mlp_is_named() -> None:
    others = (("mlp_multiple_of", 128), ("activation", "softsign"), ("use_bias_in_mlp", True))
    for key, value in others:
        with raises_naming(ConfigError, "mlp_type", f"{key}"):
            NeoXConfig.from_flat({**SIZES, "mlp_type": "llama", key: value})
    with raises_naming(ConfigError, "mlp_width", "intermediate_size"):
        NeoXConfig.from_flat({**SIZES, "mlp_type": "llama", "mlp_width": 100, "intermediate_size": 128})


def test_bitsandbytes_replaces_adam() -> None:
    adam = {"type": "Adam", "params": {"lr": 0.01}}
    config = NeoXConfig.from_flat({**SIZES, "use_bnb_optimizer": True, "optimizer": adam})
    assert config.optimizer.optimizer.name == "adam8bit"
    assert config.optimizer.optimizer.params.lr == 0.01
    assert (
        NeoXConfig.from_flat({**SIZES, "use_bnb_optimizer": False, "optimizer": adam}).optimizer.optimizer.name
        == "adam"
    )
    with raises_naming(ConfigError, "use_bnb_optimizer", "Lion"):
        NeoXConfig.from_flat({**SIZES, "use_bnb_optimizer": True, "optimizer": {"type": "Lion"}})


def test_keys_that_gpt_neox_overwrites_load_and_few_are_refused() -> None:
    for key, value in (("do_train", True), ("num_unique_layers", 2), ("git_hash", "abc"), ("rank", 3)):
        config = NeoXConfig.from_flat({**SIZES, key: value})
        assert resolve(config, 1, 60).architecture == resolve(NeoXConfig.from_flat(SIZES), 1, 60).architecture
    assert (
        sum(row.status == "refused" and row.since != "DeepSpeed" and row.removed is None for row in NEOX_KEYS.values())
        <= 30
    )


@pytest.mark.parametrize(
    ("version", "read"), [("0.2.9", True), ("0.3.0.dev0", True), ("0.3.7", True), ("0.4.0.dev0", False)]
)
def test_an_old_name_of_ours_is_read_in_one_minor_version(
    version: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = MappingProxyType({**ALIASES, "old_name": Alias("seed", renamed_in="0.3")})
    for module in (neox_config, flat, notes):
        monkeypatch.setattr(module, "ALIASES", table)
    monkeypatch.setattr(neox, "__version__", version)
    if not read:
        with raises_naming(ConfigError, "old_name", "seed", "0.3"):
            NeoXConfig.from_flat({**SIZES, "old_name": 5})
        return
    config = NeoXConfig.from_flat({**SIZES, "old_name": 5})
    assert config.training.seed == 5
    (note,) = [note for note in notes.notes_without_effect(config) if note.keys == ("old_name",)]
    assert "seed" in note.message
