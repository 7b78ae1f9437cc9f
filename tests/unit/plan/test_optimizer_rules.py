"""Rules of the optimizer: names, numbers, and where those that need whole parameters work."""

from __future__ import annotations

import pytest

from neox.config import NeoXConfig
from neox.config.sections.optimizer_table import OPTIMIZERS, REFUSED, find_optimizer, goes_on, optimizer_of_states
from neox.errors import ConfigError
from neox.plan import resolve
from tests.plans import SIZES

REFUSALS = [
    ({"optimizer": {"type": "OneBitAdam"}}, ("optimizer.type: 'OneBitAdam'", "no longer")),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, ("betas[1]: 1.0",)),
    (
        {"optimizer": {"params": {"weight_decay": 0.1}}, "weight_decay": 0.01},
        ("weight_decay: 0.1", "weight_decay: 0.01"),
    ),
    ({"optimizer": {"params": {"adam_w_mode": False}}}, ("decoupled",)),
    ({"optimizer": {"type": "lyon"}}, ("optimizer.type: 'lyon'", "did you mean Lion?")),
    ({"optimizer": {"type": "sgd", "params": {"momentun": 0.9}}}, ("no key `momentun`", "did you mean `momentum`?")),
    ({"optimizer": {"type": "sgd", "params": {"momentum": 1.5}}}, ("optimizer.params.momentum: 1.5", "less than 1")),
    ({"optimizer": {"type": "sgd", "params": {"nesterov": True}}}, ("nesterov: true", "momentum")),
    ({"optimizer": {"type": "sm3", "params": {"weight_decay": 0.1}}}, ("no key `weight_decay`",)),
    ({"optimizer": {"type": "Adafactor", "params": {"eps": [None, -1]}}}, ("optimizer.params.eps", "negative")),
    (
        {"optimizer": {"type": "SM3"}, "zero_optimization": {"stage": 1}},
        ("optimizer.type: SM3", "zero_optimization.stage: 1", "stage 0", "Adam or Lion"),
    ),
    (
        {"optimizer": {"type": "Muon"}, "lora": {"r": 4, "alpha": 8, "target": ["dense"]}},
        ("type: Muon", "`lora` freezes", "use Adam"),
    ),
    (
        {"optimizer": {"type": "Muon"}, "soft_prompt_tuning": {"enabled": True, "num_tokens": 3}},
        ("type: Muon", "`soft_prompt_tuning` freezes"),
    ),
    ({"optimizer": {"type": "muon"}, "model_parallel_size": 2}, ("type: muon", "model_parallel_size: 2")),
    (
        {"optimizer": {"type": "Adafactor"}, "precision": "bf16", "pipe_parallel_size": 2},
        ("type: Adafactor", "pipe_parallel_size: 2"),
    ),
]


@pytest.mark.parametrize(("change", "words"), REFUSALS, ids=str)
def test_what_does_not_work_is_refused(change, words):
    with pytest.raises(ConfigError) as refused:
        resolve(NeoXConfig.from_flat({**SIZES, **change}), 4, 100)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.elementwise or kind.gathers])
def test_those_that_take_parts_work_under_every_stage(name):
    for stage in range(4):
        keys = {"optimizer": {"type": OPTIMIZERS[name].names[0]}, "zero_optimization": {"stage": stage}}
        resolve(NeoXConfig.from_flat({**SIZES, **keys}), 4, 100)


def test_weight_decay_without_effect_is_noted():
    notes = resolve(NeoXConfig.from_flat({**SIZES, "optimizer": {"type": "sm3"}, "weight_decay": 0.1}), 1, 100).notes
    assert any("weight_decay: 0.1" in note and "changes nothing" in note for note in notes), notes


@pytest.mark.parametrize(
    ("name", "cycle", "noted"), [("sgd", True, True), ("sgd", False, False), ("Lion", True, False)]
)
def test_betas_that_a_schedule_cannot_cycle_are_noted(name, cycle, noted):
    numbers = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_momentum": cycle}
    keys = {"optimizer": {"type": name}, "scheduler": {"type": "OneCycle", "params": numbers}}
    notes = resolve(NeoXConfig.from_flat({**SIZES, **keys}), 1, 100).notes
    assert any("cycle_momentum" in note and "changes nothing" in note for note in notes) == noted, notes


@pytest.mark.parametrize(
    "name",
    [
        "Adam",
        "adamw",
        "FusedAdam",
        "CPU_ADAM",
        "sm3",
        "madgrad_wd",
        "SGD",
        "lion",
        "MUON",
        "adamw_bnb_8bit",
        "Lion8bit",
    ],
)
def test_names_are_understood_in_any_case(name):
    config = NeoXConfig.from_flat({**SIZES, "optimizer": {"type": name}})
    kind = config.optimizer.optimizer.kind
    assert find_optimizer(name) in OPTIMIZERS
    assert type(config.optimizer.optimizer.params) is kind.params


@pytest.mark.parametrize("name", REFUSED)
def test_known_ones_that_are_not_supported_say_what_to_use(name):
    with pytest.raises(ConfigError, match="Adam"):
        NeoXConfig.from_flat({**SIZES, "optimizer": {"type": name}})


def test_states_name_their_optimizer():
    for name, kind in OPTIMIZERS.items():
        assert optimizer_of_states({n for state in kind.states for n in state.stored} | {"step"}) == name
    assert optimizer_of_states(set()) == "adam"
    assert optimizer_of_states({"exp_avg", "another"}) is None


def test_an_optimizer_goes_on_with_states_of_other_bits():
    assert goes_on("adam", "adam8bit")
    assert goes_on("lion8bit", "lion")
    assert not goes_on("lion", "adam")
    assert not goes_on("adam8bit", "lion8bit")


def test_memory_follows_the_states():
    """Bytes of states per parameter, in fp32 without ZeRO."""
    kept = {}
    for name, kind in OPTIMIZERS.items():
        flat = {**SIZES, "hidden_size": 256, "optimizer": {"type": kind.names[0]}}
        plan = resolve(NeoXConfig.from_flat(flat), 1, 100)
        kept[name] = plan.memory.optimizer / plan.layers.numel
    assert {name: kept[name] for name in ("adam", "lion", "sgd", "madgrad")} == {
        "adam": 8,
        "lion": 4,
        "sgd": 0,
        "madgrad": 12,
    }
    assert 0 < kept["sm3"] < 0.1
    assert 0 < kept["adafactor"] < 0.1
    assert 4 < kept["muon"] < 5
    assert 2 < kept["adam8bit"] < 2.1
    assert 1 < kept["lion8bit"] < 1.1
