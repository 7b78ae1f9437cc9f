"""Trainings on an accelerator that is not CUDA's: the stand-in of `tests/stand_in`, under DeepSpeed's NPU accelerator.

Its memory is the CPU's, so that losses must be those of CPU ranks, and a tensor that is left on the CPU raises.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox.plan import RunPlan, encode_payload
from tests.distributed.spawn import free_port, run_ranks
from tests.distributed.test_preferences import curves, write_documents, write_preferences
from tests.distributed.training_runs import VOCAB, tiny_plan
from tests.stand_in.ranks import ROOT, run_on_npus, variables_of_rank

STEPS = 3
LENGTH = 32
LORA = {"r": 4, "alpha": 8, "target": ["query_key_value", "dense"]}
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_ffn_hidden_size": 24}
WINDOWS = {"attention_config": [[["sliding_window"], "all"]], "sliding_window_width": 5}
NETWORKS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "lora": {"lora": LORA},
    "windows": WINDOWS,
    "packed": {"reset_attention_mask": True},
    "dpo": {"train_impl": "dpo", "dpo_label_smoothing": 0.1},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "stages": {"pp": 2, "zero": 1},
    "tensor ranks": {"mp": 2},
    "sequence parallel": {"mp": 2, "sequence_parallel": True},
    "context ranks": {"context_parallel_size": 2},
    "recomputed on the CPU": {"checkpoint_activations": True, "checkpoint_in_cpu": True},
    "offload": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "fp32 statistics": {"log_stability_every": 1, "log_param_norm": True, "ema_decay": 0.9, "check_replicas_every": 1},
}
REFUSED = {("dpo", "context ranks"), ("packed", "context ranks"), ("lora", "fp32 statistics")}


def data_keys(directory: Path, network: str) -> dict[str, Any]:
    """Write the documents of a training, and return the keys that read them."""
    directory.mkdir(exist_ok=True)
    shared: dict[str, Any] = {
        "seq_length": LENGTH,
        "max_position_embeddings": LENGTH,
        "num_workers": 0,
        "train_iters": STEPS,
        "eval_interval": 100,
        "eval_iters": 1,
        "train_batch_size": 4,
        "num_layers": 2,
    }
    if network == "dpo":
        return {**shared, **write_preferences(directory)["pairs"]}
    random = np.random.default_rng(3)
    documents = [random.integers(0, VOCAB, random.integers(5, 40)).tolist() for _ in range(60)]
    path = write_documents(directory / "text", documents)
    return {**shared, "train_data_paths": [path], "valid_data_paths": [path]}


def plan_of(directory: Path, network: str, layout: str) -> RunPlan:
    keys = {**data_keys(directory / network, network), **NETWORKS[network], **LAYOUTS[layout]}
    micro = 4 if layout in ("tensor ranks", "sequence parallel", "context ranks") else 2
    if layout == "stages":
        micro = 1
    return tiny_plan(2, train_micro_batch_size_per_gpu=micro, **keys)


def compare(directory: Path, cases: list[tuple[str, str]]) -> None:
    """Compare the trained loss of each case's steps and evaluation, and gradient norms, with those of CPU ranks."""
    plans = [plan_of(directory, *case) for case in cases]
    compare_with_cpu(cases, plans, run_on_npus(2, curves, plans)[0])


def compare_with_cpu(cases: list[tuple[str, str]], plans: list[RunPlan], found: list[list[dict[str, float]]]) -> None:
    """Compare curves of the stand-in with those of CPU ranks."""
    expected = run_ranks(2, curves, plans)[0]
    for case, found_steps, steps in zip(cases, found, expected, strict=True):
        assert len(steps) == STEPS + 1
        for scores, wanted in zip(found_steps, steps, strict=True):
            trained = next(iter(wanted))
            assert scores[trained] == pytest.approx(wanted[trained], rel=2e-6), case
            if "norm" in wanted:  # of a step, not of the evaluation
                assert scores["norm"] == pytest.approx(wanted["norm"], rel=1e-4), case


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_every_network_in_every_layout(tmp_path: Path, layout: str) -> None:
    compare(tmp_path, [(network, layout) for network in NETWORKS if (network, layout) not in REFUSED])


def mixed_devices() -> list[str]:
    """Return the messages of operations between the CPU and the device."""
    import torch
    import torch_npu  # noqa: F401

    there, here = torch.ones(3, device="npu"), torch.ones(3)
    messages = []
    for operation in (
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: here.index_select(0, there.long()),
    ):
        with pytest.raises(RuntimeError) as error:
            operation()
        messages.append(str(error.value))
    return messages


@pytest.mark.slow
def test_an_operation_of_tensors_of_both_devices_raises() -> None:
    assert len(run_on_npus(1, mixed_devices)[0]) == 3


def train_script(directory: Path, plan: RunPlan, *, on_npus: bool) -> list[float]:
    """Run the ranks of train.py to their end, and return the losses in metrics.jsonl."""
    port = free_port()
    processes = []
    for rank in range(plan.grid.world_size):
        variables = variables_of_rank(rank, plan.grid.world_size, port)
        if not on_npus:
            variables |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "train.py"), "--payload", encode_payload(plan)]
        output = (directory / f"rank{rank}.log").open("a")
        processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd=directory))
    codes = [process.wait(300) for process in processes]
    assert codes == [0] * len(codes), (directory / "rank0.log").read_text()[-6000:]
    rows = map(json.loads, Path(plan.config.logging.log_dir or "", "metrics.jsonl").read_text().splitlines())
    return [row["train/lm_loss"] for row in rows if "train/lm_loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3", "stages"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_script_saves_and_resumes_as_on_a_cpu(tmp_path: Path, layout: str, asynchronous: bool) -> None:
    losses = {}
    for on_npus in (False, True):
        directory = tmp_path / str(on_npus)
        directory.mkdir()
        for steps in (2, STEPS):
            keys = {**data_keys(tmp_path / "data", "dense"), **LAYOUTS[layout], "train_iters": STEPS}
            files = {name: str(directory / "run") for name in ("save", "load", "log_dir")}
            saves = {
                "checkpoint_factor": 1,
                "async_save": asynchronous,
                "exit_interval": steps,
                "tokenizer_type": "CharLevelTokenizer",
            }
            micro = 1 if layout == "stages" else 2
            plan = tiny_plan(2, train_micro_batch_size_per_gpu=micro, **keys, **files, **saves)
            losses[on_npus] = train_script(directory, plan, on_npus=on_npus)
    assert len(losses[True]) == STEPS
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)


def generated(plan: RunPlan, checkpoint: Path) -> list[list[int]]:
    """Generate with a cache and by the whole sequence, on one device."""
    from neox.generation.completion import generate_all
    from neox.generation.load import load_model
    from neox.generation.request import SamplingParams
    from neox.generation.startup import start_ranks
    from neox.tokenizer import build_tokenizer

    grid, device, path = start_ranks(plan, lambda: checkpoint)
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    answers = []
    for settings in ({}, {"temperature": 0.8, "top_k": 20, "seed": 3}, {"num_beams": 3}):
        for recompute in (False, True):
            model = load_model(plan, path, grid, device, recompute=recompute)
            params = SamplingParams(max_new_tokens=6, **settings)
            answers += [
                c.tokens for c in generate_all(model, ["\x01\x02", "\x05"], params, tokenizer, grid, batch_size=2)
            ]
    return answers


def saved(plan: RunPlan, directory: Path) -> None:
    """Write a checkpoint of initial weights."""
    from neox.engine import initialize_distributed, initialize_engine, save_checkpoint

    engine = initialize_engine(plan, *initialize_distributed(plan))
    save_checkpoint(engine, directory)


@pytest.mark.slow
def test_generation_is_that_of_a_cpu(tmp_path: Path) -> None:
    plan = tiny_plan(1, attention_config=[[["global", "sliding_window"], "all"]], sliding_window_width=5)
    run_ranks(1, saved, plan, tmp_path)
    found = run_on_npus(1, generated, plan, tmp_path / "global_step0")[0]
    assert found == run_ranks(1, generated, plan, tmp_path / "global_step0")[0]
