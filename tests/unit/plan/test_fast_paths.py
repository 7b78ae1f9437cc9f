"""Which fast paths a run takes on each kind of device, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from neox.devices import DEVICES, FAST_PATHS, DeviceFamily
from neox.engine.device import other_paths
from neox.errors import ConfigError
from neox.model import Block, build_layer
from neox.parallel import ParallelGrid
from neox.plan import decode_payload, encode_payload, format_plan, gpu_device, plan_as_dict
from neox.plan.devices.fast_paths import path_choices
from tests.plans import NETWORKS, SMALL, plan_of

WINDOWS: dict[str, Any] = {"attention_config": ["sliding_window", "global"], "sliding_window_width": 5}
WIDE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
EXPERTS: dict[str, Any] = {"moe_num_experts": 4, "moe_top_k": 2}
FLASH: dict[str, Any] = {"attention_config": ["flash", "flash"]}
DOCUMENTS: dict[str, Any] = {"reset_attention_mask": True}


def choices(family: DeviceFamily, training: bool = True, **keys: Any) -> dict[str, str]:
    """Return why each fast path that the run has a use for is not taken; empty text if it is."""
    found = path_choices(plan_of(**SMALL | keys), family, training=training)
    return {choice.name: choice.reason for choice in found}


@pytest.mark.parametrize("family", get_args(DeviceFamily))
def test_a_path_is_taken_where_the_table_has_it(family: DeviceFamily) -> None:
    keys = {**WIDE, **WINDOWS, **EXPERTS, "precision": "bf16"}
    for name, reason in choices(family, **keys).items():
        assert (reason == "") == (name in DEVICES[family].fast_paths), (name, reason)


@pytest.mark.parametrize(
    ("keys", "name", "key"),
    [
        ({**WIDE, **WINDOWS, "attention_dropout": 0.1}, "flex_attention", "attention_dropout"),
        ({**WINDOWS}, "flex_attention", "8 wide"),
        ({**WIDE, **WINDOWS, "pos_emb": "alibi"}, "flex_attention", "alibi"),
        ({**EXPERTS}, "grouped_product", "fp32"),
        ({"deterministic": True}, "compiled_layers", "deterministic"),
    ],
)
def test_what_the_run_itself_rules_out_is_named(keys: dict[str, Any], name: str, key: str) -> None:
    assert key in choices("cuda", **keys)[name]


def test_only_what_the_run_has_a_use_for_is_listed() -> None:
    assert set(choices("cuda")) == {"triton", "compiled_layers", "fused_update"}
    assert "fused_update" not in choices("cuda", optimizer={"type": "Lion", "params": {"lr": 0.1}})
    assert set(choices("cuda", training=False, cuda_graphs=True)) == {"attention_kernels", "recorded_steps"}
    assert choices("cuda", training=False, cuda_graphs=True, **EXPERTS)["recorded_steps"]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("network", ["rotary", "alibi", "gemma", "latent", "local", "bigbird", "gmlp"])
def test_flex_attention_is_that_of_the_modules(network: str, dropout: float, documents: bool) -> None:
    keys = {**SMALL, **WIDE, "attention_config": ["flash", "flash"], **NETWORKS[network], "attention_dropout": dropout}
    if "sparsity_config" in keys:
        keys["seq_length"] = 16
    try:
        plan = plan_of(**keys | {"reset_attention_mask": documents})
    except ConfigError:
        pytest.skip("documents cannot be kept apart in this network")
    grid = ParallelGrid.single()
    starts = torch.zeros(1, 16, dtype=torch.long) if documents else None
    taken = 0
    for index, layer in enumerate(plan.layers):
        if layer.kind != "block":
            continue
        block = build_layer(plan, index, grid, device=torch.device("meta"), dtype=torch.float32)
        assert isinstance(block, Block)
        attention = getattr(block, "attention", None)
        if hasattr(attention, "takes_block_masks") and attention.takes_block_masks:
            taken += attention.visible_pairs(16, torch.device("cpu"), starts) is not None
    flex = [choice for choice in path_choices(plan, "cuda") if choice.name == "flex_attention" and choice.is_taken]
    assert sum(int(choice.use.split(" in ")[1].split()[0]) for choice in flex) == taken


@pytest.mark.parametrize(
    ("kind", "fp8"), [("h100", True), ("a100-80", False), ("mi300x", False), ("ascend910b", False), ("max1550", False)]
)
def test_fp8_is_planned_for_devices_that_have_it(kind: str, fp8: bool) -> None:
    keys = {**SMALL, **WIDE, "precision": "bf16", "fp8": "tensorwise", "gpu_type": kind}
    if fp8:
        assert plan_of(**keys).config.training.fp8
    else:
        with pytest.raises(ConfigError) as error:
            plan_of(**keys)
        assert {key for problem in error.value.problems for key in problem.keys} == {"fp8"}


@pytest.mark.parametrize(("kind", "planned"), [("h100", True), ("h200", True), ("b200", False), ("mi300x", False)])
def test_experts_in_fp8_are_planned_for_devices_that_have_their_kernel(kind: str, planned: bool) -> None:
    keys = {**SMALL, **WIDE, "precision": "bf16", "fp8": "rowwise", "gpu_type": kind, "moe_num_experts": 4}
    if planned:
        plan = plan_of(**keys)
        taken = {choice.name: choice.is_taken for choice in path_choices(plan, "cuda")}
        assert taken["scaled_grouped_product"]
        assert "grouped_product" not in taken
    else:
        with pytest.raises(ConfigError) as error:
            plan_of(**keys)
        assert "fp8" in {key for problem in error.value.problems for key in problem.keys}


def test_the_report_names_what_is_taken_and_what_is_not() -> None:
    plan = plan_of(**SMALL | WIDE | WINDOWS, gpu_type="ascend910b")
    rows = {row["name"]: row for row in plan_as_dict(plan)["kernels"]}
    assert rows["fused_update"]["is_taken"] is False
    assert rows["flex_attention"]["instead"] == FAST_PATHS["flex_attention"].elsewhere
    (line,) = (line for line in format_plan(plan, gpu_device(plan)).splitlines() if line.startswith("kernels"))
    assert "flex_attention" in line


def test_a_rank_says_what_it_finds_otherwise() -> None:
    cpu = torch.device("cpu")
    plan = plan_of(**SMALL | WIDE | WINDOWS)
    assert other_paths(plan, cpu) == []  # nobody planned
    planned = decode_payload(encode_payload(replace(plan, device_family="cpu")))
    assert other_paths(planned, cpu) == []
    lines = other_paths(replace(plan, device_family="cuda"), cpu)
    assert {line.split(" ")[0] for line in lines} == {"triton", "flex_attention", "compiled_layers"}
    (line,) = other_paths(replace(plan, device_family="npu"), cpu)
    assert line.startswith("fused_update")
    ruled_out = plan_of(**SMALL | WIDE | WINDOWS | {"attention_dropout": 0.1, "deterministic": True})
    assert {line.split(" ")[0] for line in other_paths(replace(ruled_out, device_family="cuda"), cpu)} == {"triton"}


@pytest.mark.parametrize(
    ("network", "keys", "taken", "not_taken"),
    [
        ("mamba2", {"precision": "bf16"}, {"convolution_kernel", "mamba_kernels"}, set()),
        ("mamba2", {"precision": "fp32"}, {"convolution_kernel"}, {"mamba_kernels"}),
        ("mamba2", {"deterministic": True}, set(), {"convolution_kernel", "mamba_kernels"}),
        ("mamba", {}, {"convolution_kernel", "mamba_kernels"}, set()),
        ("mamba", {"reset_attention_mask": True}, {"convolution_kernel"}, {"mamba_kernels"}),
        ("gated_delta", {"precision": "bf16"}, {"convolution_kernel", "linear_attention_kernels"}, set()),
        ("gated_delta", {"precision": "fp32"}, {"convolution_kernel"}, {"linear_attention_kernels"}),
        ("rwkv", {"precision": "bf16"}, {"linear_attention_kernels"}, set()),
    ],
)
def test_kernels_of_recurrent_blocks(network: str, keys: dict[str, Any], taken: set[str], not_taken: set[str]) -> None:
    plan = plan_of(**{**SMALL, **NETWORKS[network], **keys})
    packages = {name for name, path in FAST_PATHS.items() if path.package}
    for family in ("cuda", "cpu"):
        choices = [choice for choice in path_choices(plan, family) if choice.name in packages]
        assert {choice.name for choice in choices} == taken | not_taken
        assert {choice.name for choice in choices if choice.is_taken} == (taken if family == "cuda" else set())
        assert {choice.name for choice in choices if choice.is_ruled_out} == not_taken
    # A rank of this machine, which has none of the packages, on the device that was planned.
    for choice in path_choices(plan, "cuda"):
        if choice.name in taken:
            assert FAST_PATHS[choice.name].package in choice.use
            assert ("memory" in choice.use) is (choice.name != "convolution_kernel")
