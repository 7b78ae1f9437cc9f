"""Groups of parameters by name: which parameters each takes, what they change, and what is refused."""

from __future__ import annotations

import pytest

from neox.config.loader import load_config
from neox.errors import ConfigError
from neox.plan import resolve
from neox.plan.network.parameter_groups import group_lines, group_members
from neox.plan.report.as_json import plan_as_dict
from tests.plans import SMALL, problem_keys, small_plan

BIASES = {"match": "attention.*bias", "lr_factor": 0.1, "weight_decay": 0}
LORA = {"lora": {"r": 2, "alpha": 4}}


def specs_of(plan):
    return {(layer.index, spec.name): spec for layer in plan.layers for spec in layer.parameters}


def test_the_first_group_that_matches_takes_a_parameter():
    groups = [BIASES, {"match": "3.*", "weight_decay": 0.5}, {"match": "*bias", "frozen": True}]
    plan = small_plan(parameter_groups=groups)
    for (layer, name), spec in specs_of(plan).items():
        found = (spec.lr_factor, spec.weight_decay, spec.trained)
        if name.startswith("attention.") and name.endswith("bias"):
            assert found == (0.1, 0.0, True), (layer, name)
        elif layer == 3:
            assert found == (1.0, 0.5, True), (layer, name)
        else:
            assert found == (1.0, None, not name.endswith("bias")), (layer, name)


def test_the_plan_counts_what_each_group_takes():
    groups = [BIASES, {"match": "*bias", "frozen": True}, {"match": "*"}]
    plan = small_plan(parameter_groups=groups)
    members = group_members(plan.layers, plan.config.optimizer.parameter_groups)
    biases = [spec for (_, name), spec in specs_of(plan).items() if name.endswith("bias")]
    assert members[0].taken == 4  # two blocks with two biases of attention each
    assert members[0].elements == 2 * (3 * 32 + 32)
    assert members[0].taken + members[1].taken == len(biases)
    assert sum(group.elements for group in members) == plan.layers.numel
    lines = list(group_lines(plan.layers, plan.config))
    assert len(lines) == 4
    assert lines == plan_as_dict(plan)["parameter_groups"]


def test_frozen_parameters_have_no_gradients_and_states_in_the_memory_plan():
    trained = small_plan()
    frozen = small_plan(parameter_groups=[{"match": "mlp.*", "frozen": True}])
    share = frozen.layers.trained_numel / trained.layers.numel
    assert share < 1
    assert frozen.memory.weights == trained.memory.weights
    assert frozen.memory.gradients == pytest.approx(share * trained.memory.gradients, rel=1e-3)
    assert frozen.memory.optimizer == pytest.approx(share * trained.memory.optimizer, rel=1e-3)


REFUSALS = [
    (("parameter_groups.1",), {"parameter_groups": [BIASES, {"match": "attn.*bias"}]}),
    (("parameter_groups.1",), {"parameter_groups": [{"match": "*"}, {"match": "attention.*"}]}),
    (("parameter_groups.0",), {"parameter_groups": [{"match": "*bias", "frozen": True, "lr_factor": 2}]}),
    (("parameter_groups.0",), {"parameter_groups": [{"match": "*bias", "frozen": True, "weight_decay": 0.1}]}),
    (("parameter_groups.0", "lora"), {"parameter_groups": [BIASES], **LORA}),
    (
        ("parameter_groups.0", "optimizer.type"),
        {"parameter_groups": [{"match": "*", "weight_decay": 0.1}], "optimizer": {"type": "SM3"}},
    ),
    (("parameter_groups",), {"parameter_groups": [{"match": "*", "frozen": True}]}),
    (
        ("optimizer.type", "parameter_groups"),
        {"parameter_groups": [{"match": "[23].*", "frozen": True}], "optimizer": {"type": "Muon"}},
    ),
]


@pytest.mark.parametrize(("keys", "change"), REFUSALS)
def test_groups_without_effect_are_refused(keys, change):
    assert problem_keys(1, **{**SMALL, **change}) == [keys]


def test_a_stage_without_trained_parameters_is_refused():
    keys = {"pipe_parallel_size": 2, "parameter_groups": [{"match": "[02].*", "frozen": True}]}
    found = problem_keys(2, **{**SMALL, **keys})
    assert found == [("pipe_partition_method", "parameter_groups", "pipe_parallel_size")]


def test_a_refusal_names_the_line_of_the_group(tmp_path):
    file = tmp_path / "run.yml"
    settings = [f"{key}: {value}" for key, value in SMALL.items() if key != "optimizer"]
    groups = ["parameter_groups:", "  - match: '*norm*'", "  - match: nothing", "    frozen: true"]
    file.write_text("\n".join([*settings, *groups]))
    loaded = load_config([file])
    assert not loaded.problems
    with pytest.raises(ConfigError) as refused:
        resolve(loaded.config, 1, 100)
    (problem,) = refused.value.problems
    assert (problem.source.file, problem.source.line) == (str(file), len(settings) + 3)


def test_adapters_have_names_too():
    plan = small_plan(parameter_groups=[{"match": "*lora_B", "lr_factor": 16}], **LORA)
    factors = {name: spec.lr_factor for (_, name), spec in specs_of(plan).items() if spec.trained}
    assert {name.rpartition("_")[2]: factor for name, factor in factors.items()} == {"A": 1.0, "B": 16.0}


@pytest.mark.parametrize(
    ("targets", "says"),
    [(["densee"], "did you mean `dense`?"), (["q_proj"], "`query_key_value` here"), (["in_proj"], "its linear layers")],
)
def test_targets_of_lora_that_the_network_lacks_are_refused(targets: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small_plan(lora={"r": 2, "alpha": 4, "target": targets})
    assert says.lower() in str(caught.value).lower()


def test_a_target_of_other_networks_next_to_one_of_this_is_noted() -> None:
    plan = small_plan(lora={"r": 2, "alpha": 4, "target": ["dense", "in_proj"]})
    assert any("no block of this network has in_proj" in note for note in plan.notes)
