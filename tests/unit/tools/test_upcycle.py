"""tools/upcycle.py: a mixture of copies of a dense network's MLPs computes what the dense network does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from neox.checkpoint import CheckpointReader, identity_state, open_checkpoint, why_incomplete
from neox.config import NeoXConfig
from neox.convert.verification import load_reference_model
from tests.plans import NETWORKS, SMALL, plan_of
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint

DENSE: dict[str, Any] = {**SMALL, **NETWORKS["llama"]}
MIXTURE: dict[str, Any] = {
    **DENSE,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_norm_topk_prob": True,
    "moe_ffn_hidden_size": 44,
}
KINDS: dict[str, dict[str, Any]] = {
    "all blocks": {},
    "every other block": {"moe_expert_interval": 2},
    "sigmoid": {"moe_router_type": "sigmoid", "moe_router_enable_expert_bias": True},
    "all experts": {"moe_norm_topk_prob": False, "moe_top_k": 4},
}


def dense_checkpoint(directory: Path, tp_size: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    plan = plan_of(tp_size, 90, **DENSE, model_parallel_size=tp_size)
    weights = seeded_weights(plan.layers, dtype=dtype)
    path = directory / "global_step3"
    return write_checkpoint(path, plan.layers, weights, tp_size=tp_size, client_state=identity_state(plan))


def config_file(directory: Path, **keys: Any) -> Path:
    path = directory / "moe.yml"
    path.write_text(yaml.safe_dump({**MIXTURE, **keys}))
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_are_those_of_the_dense_network(tmp_path: Path, run, kind: str, tp_size: int):
    dense = open_checkpoint(dense_checkpoint(tmp_path / "dense", tp_size))
    file = config_file(tmp_path, **KINDS[kind])
    given = ("--input_dir", tmp_path / "dense", "--output_dir", tmp_path / "moe", "--config_file", file)
    done = run("upcycle.py", *given)
    assert done.returncode == 0, done.stderr
    result = tmp_path / "moe" / "global_step3"
    assert not why_incomplete(result)
    mixture = open_checkpoint(result)
    assert mixture.tp_size == tp_size
    assert mixture.args["moe_num_experts"] == 4
    tokens = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    config = NeoXConfig.from_flat({**MIXTURE, **KINDS[kind]})
    with torch.inference_mode():
        expected = load_reference_model(dense, NeoXConfig.from_flat(DENSE))(tokens)
        found = load_reference_model(mixture, config)(tokens)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    for expert in range(4):
        own = mixture.expert(2, "mlp.experts.dense_h_to_4h.weight", expert)
        assert torch.equal(own, dense.full(2, "mlp.dense_h_to_4h.weight"))
    router = mixture.full(2, "mlp.router.weight")
    assert router.std() > 0.01
    assert run("upcycle.py", *given, "--seed", "7").returncode == 0
    assert not torch.equal(CheckpointReader(result, mixture.layers).full(2, "mlp.router.weight"), router)


def test_weights_keep_their_precision(tmp_path: Path, run):
    dense_checkpoint(tmp_path / "dense", dtype=torch.bfloat16)
    file = config_file(tmp_path, moe_router_type="sigmoid", moe_router_enable_expert_bias=True)
    done = run("upcycle.py", "--input_dir", tmp_path / "dense", "--output_dir", tmp_path / "moe", "--config_file", file)
    assert done.returncode == 0, done.stderr
    mixture = open_checkpoint(tmp_path / "moe" / "global_step3")
    for name in mixture.names(2):
        wanted = torch.float32 if name == "mlp.router.selection_bias" else torch.bfloat16
        assert mixture.parts(2, name)[0].dtype == wanted, name


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "weights that do not add up to 1": ("moe_norm_topk_prob", {"moe_norm_topk_prob": False}),
    "a factor": ("moe_router_topk_scaling_factor", {"moe_router_topk_scaling_factor": 2.5}),
    "dropped tokens": ("moe_expert_capacity_factor", {"moe_expert_capacity_factor": 1.0}),
    "another width": ("moe_ffn_hidden_size", {"moe_ffn_hidden_size": 22}),
    "a shared expert": ("moe_shared_expert_intermediate_size", {"moe_shared_expert_intermediate_size": 8}),
    "another network": ("num_kv_heads", {"num_kv_heads": 4}),
    "no experts": (
        "moe_num_experts",
        dict.fromkeys(("moe_num_experts", "moe_top_k")) | {"moe_router_type": None, "moe_norm_topk_prob": None},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_network_is_refused(tmp_path: Path, run, case: str):
    dense_checkpoint(tmp_path / "dense")
    key, changes = REFUSED[case]
    keys = {name: value for name, value in {**MIXTURE, **changes}.items() if value is not None}
    if case == "no experts":
        del keys["moe_ffn_hidden_size"]
    file = tmp_path / "moe.yml"
    file.write_text(yaml.safe_dump(keys))
    done = run("upcycle.py", "--input_dir", tmp_path / "dense", "--output_dir", tmp_path / "moe", "--config_file", file)
    assert done.returncode != 0
    assert key in done.stderr
    assert not (tmp_path / "moe" / "latest").exists()


def test_a_router_whose_weights_do_not_add_up_is_accepted_if_asked_for(tmp_path: Path, run):
    dense_checkpoint(tmp_path / "dense")
    given = ("--input_dir", tmp_path / "dense", "--output_dir", tmp_path / "moe")
    file = config_file(tmp_path, moe_norm_topk_prob=False)
    assert run("upcycle.py", *given, "--config_file", file, "--changes-outputs").returncode == 0
    mixture = open_checkpoint(tmp_path / "moe" / "global_step3")
    assert mixture.args["moe_norm_topk_prob"] is False
    assert mixture.layers is not None
    shown = run("inspect_checkpoint.py", tmp_path / "moe" / "global_step3")
    assert f"{mixture.layers.numel:,} parameters ({mixture.layers.active_numel:,} active)" in shown.stdout


def test_a_mixture_is_refused(tmp_path: Path, run):
    dense_checkpoint(tmp_path / "dense")
    file = config_file(tmp_path)
    given = ("--output_dir", tmp_path / "moe", "--config_file", file)
    assert run("upcycle.py", "--input_dir", tmp_path / "dense", *given).returncode == 0
    again = run("upcycle.py", "--input_dir", tmp_path / "moe", "--output_dir", tmp_path / "more", "--config_file", file)
    assert again.returncode != 0
    assert "dense" in again.stderr
