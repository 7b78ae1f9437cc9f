"""Rules of the optimizer: names, numbers, and where those that need whole parameters work."""

from __future__ import annotations

import pytest

from neox.config import NeoXConfig
from neox.config.sections.optimizer_table import OPTIMIZERS, REFUSED, find_optimizer, goes_on, optimizer_of_states
from neox.plan import resolve
from neox.plan.rules import notes_without_effect
from tests.plans import SIZES, problem_keys, problems_of

DECAY = {"optimizer": {"params": {"weight_decay": 0.1}}}
ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16_STAGES = {"precision": "bf16", "pipe_parallel_size": 2}
NEW_TOKENS = {"added_tokens": ["a", "b"], "train_only_added_tokens": True}
ORIGINAL_MUON = {"type": "Muon", "params": {"adjust_lr_fn": "original"}}
MUP = {"use_mup": True, "mup_base_hidden_size": 32}
# The key that a problem points to, others that it must name, and the keys that cause it.
REFUSALS = [
    ("optimizer.type", (), {"optimizer": {"type": "OneBitAdam"}}),
    ("optimizer.type", (), {"optimizer": {"type": "lyon"}}),
    ("optimizer.params.betas", (), {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}),
    ("optimizer.params.weight_decay", ("weight_decay",), {**DECAY, "weight_decay": 0.01}),
    ("optimizer.params.adam_w_mode", (), {"optimizer": {"params": {"adam_w_mode": False}}}),
    ("optimizer.params.momentun", (), {"optimizer": {"type": "sgd", "params": {"momentun": 0.9}}}),
    ("optimizer.params.momentum", (), {"optimizer": {"type": "sgd", "params": {"momentum": 1.5}}}),
    ("optimizer.params.nesterov", (), {"optimizer": {"type": "sgd", "params": {"nesterov": True}}}),
    ("optimizer.params.weight_decay", (), {"optimizer": {"type": "sm3", "params": {"weight_decay": 0.1}}}),
    ("optimizer.params.eps", (), {"optimizer": {"type": "Adafactor", "params": {"eps": [None, -1]}}}),
    ("optimizer.type", ("zero_optimization.stage",), {"optimizer": {"type": "SM3"}, **ZERO_1}),
    ("optimizer.type", ("zero_optimization.offload_optimizer",), {"optimizer": {"type": "CPUAdam"}, **ZERO_1}),
    ("optimizer.type", ("lora",), {"optimizer": {"type": "Muon"}, "lora": {"r": 4, "alpha": 8, "target": ["dense"]}}),
    ("optimizer.type", ("soft_prompt_tuning",), {"optimizer": {"type": "Muon"}, "soft_prompt_tuning": {}}),
    ("optimizer.type", ("train_only_added_tokens",), {"optimizer": {"type": "madgrad_wd"}, **NEW_TOKENS}),
    ("optimizer.type", ("train_only_added_tokens",), {"optimizer": {"type": "Muon"}, **NEW_TOKENS}),
    ("train_only_added_tokens", ("added_tokens",), {"train_only_added_tokens": True}),
    ("train_only_added_tokens", ("parameter_groups",), {"parameter_groups": [{"match": "*"}], **NEW_TOKENS}),
    ("added_tokens", ("tokenizer_type",), {"added_tokens": ["a"], "tokenizer_type": "CharLevelTokenizer"}),
    ("optimizer.type", ("model_parallel_size",), {"optimizer": {"type": "Adafactor"}, "model_parallel_size": 2}),
    ("optimizer.type", ("pipe_parallel_size",), {"optimizer": {"type": "Adafactor"}, **BF16_STAGES}),
    ("optimizer.params.adjust_lr_fn", ("use_mup",), {"optimizer": ORIGINAL_MUON, **MUP}),
]


@pytest.mark.parametrize(("first", "others", "change"), REFUSALS, ids=str)
def test_what_does_not_work_is_refused(first, others, change):
    found = problem_keys(4, **{**SIZES, **change})
    assert [keys for keys in found if keys[0] == first and set(others) <= set(keys)] == found != []


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.elementwise or kind.gathers])
def test_those_that_take_parts_work_under_every_stage(name):
    for stage in range(4):
        keys = {"optimizer": {"type": OPTIMIZERS[name].names[0]}, "zero_optimization": {"stage": stage}}
        resolve(NeoXConfig.from_flat({**SIZES, **keys}), 4, 100)


def test_weight_decay_without_effect_is_noted():
    config = NeoXConfig.from_flat({**SIZES, "optimizer": {"type": "sm3"}, "weight_decay": 0.1})
    assert [note.keys for note in notes_without_effect(config)] == [("weight_decay", "optimizer.type")]


@pytest.mark.parametrize(
    ("name", "cycle", "noted"), [("sgd", True, True), ("sgd", False, False), ("Lion", True, False)]
)
def test_betas_that_a_schedule_cannot_cycle_are_noted(name, cycle, noted):
    numbers = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_momentum": cycle}
    keys = {"optimizer": {"type": name}, "scheduler": {"type": "OneCycle", "params": numbers}}
    notes = notes_without_effect(NeoXConfig.from_flat({**SIZES, **keys}))
    assert ("scheduler.params.cycle_momentum" in {note.keys[0] for note in notes}) is noted


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
    (problem,) = problems_of(**SIZES, optimizer={"type": name})
    assert problem.keys == ("optimizer.type",)
    assert "Adam" in problem.message.replace(name, "")


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
