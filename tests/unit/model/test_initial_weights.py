"""Initial weights: NeoX's distributions, and the same full tensors under every layout."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch

from neox.architecture import ByChannel, Constant, FromKey, Normal, ParameterSpec, Uniform
from neox.checkpoint.weights.shards import merge
from neox.model import GPT, build_layer, initial_weights, initialize
from neox.model.initial_weights import Stream, draw
from neox.parallel import ParallelGrid, Topology
from tests.errors import raises_naming
from tests.plans import NETWORKS, networks_for, small_plan


def drawn(method: str, shape: tuple[int, int] = (300, 200)) -> torch.Tensor:
    return draw(method, shape, Stream(0), std=0.02, layers=8, hidden=200)


@pytest.mark.parametrize(
    ("method", "deviation"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / math.sqrt(16)),
        ("small_init", math.sqrt(2 / (5 * 200))),
        ("wang_init", 2 / 8 / math.sqrt(200)),
        ("xavier_normal", math.sqrt(2 / 500)),
        ("xavier_uniform", math.sqrt(2 / 500)),
    ],
)
def test_deviations(method: str, deviation: float):
    weight = drawn(method)
    assert weight.std().item() == pytest.approx(deviation, rel=0.01)
    assert abs(weight.mean().item()) < deviation / 50
    assert (weight.abs().max() <= math.sqrt(3) * deviation * 1.0001) == (method == "xavier_uniform")


@pytest.mark.parametrize(("method", "gain"), [("orthogonal", math.sqrt(2)), ("scaled_orthogonal", math.sqrt(2 / 8))])
def test_orthogonal(method: str, gain: float):
    weight = drawn(method)
    torch.testing.assert_close(weight.T @ weight, torch.eye(200) * gain**2, atol=1e-5, rtol=0)


def test_unknown_method_is_an_error():
    with raises_naming(ValueError, "normal"):
        drawn("zeros")


def test_methods_go_where_neox_sends_them():
    model = GPT(small_plan(init_method="orthogonal", output_layer_init_method="scaled_normal"), ParallelGrid.single())
    for name, weight in model.named_parameters():
        if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
            assert weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)
        elif weight.dim() == 2:
            assert torch.linalg.svdvals(weight.detach()) == pytest.approx(math.sqrt(2), rel=1e-4)
        else:
            assert torch.equal(
                weight, torch.ones(32) if "norm" in name and "weight" in name else torch.zeros_like(weight)
            )


@pytest.mark.parametrize(("tp_size", "network"), [(n, network) for n in (2, 4) for network in networks_for(n)])
def test_tensor_ranks_hold_slices_of_the_same_tensors(tp_size: int, network: str):
    keys = NETWORKS[network]
    whole = dict(GPT(small_plan(**keys), ParallelGrid.single()).named_parameters())
    plan = small_plan(tp_size, model_parallel_size=tp_size, **keys)
    for entry in plan.layers:
        parts = []
        for rank in range(tp_size):
            grid = replace(ParallelGrid.single(), topology=Topology(1, 1, tp_size), rank=rank)
            parts.append(dict(build_layer(plan, entry.index, grid).named_parameters()))
        for spec in entry.parameters:
            full = whole[f"sequential.{entry.index}.{spec.name}"]
            if spec.partition_dim is None:
                assert all(torch.equal(part[spec.name], full) for part in parts)
            else:
                assert torch.equal(merge(spec, [part[spec.name] for part in parts]), full)


def test_seed_changes_weights_and_torchs_own_stream_does_not():
    torch.manual_seed(1)
    one = build_layer(small_plan(), 2, ParallelGrid.single()).mlp.dense_h_to_4h.weight
    torch.manual_seed(2)
    same = build_layer(small_plan(), 2, ParallelGrid.single()).mlp.dense_h_to_4h.weight
    other = build_layer(small_plan(seed=99), 2, ParallelGrid.single()).mlp.dense_h_to_4h.weight
    next_layer = build_layer(small_plan(), 3, ParallelGrid.single()).mlp.dense_h_to_4h.weight
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, next_layer)


def test_meta_layers_can_be_filled_later():
    plan, grid = small_plan(), ParallelGrid.single()
    expected = GPT(plan, grid).state_dict()
    model = GPT(plan, grid, device="meta").to_empty(device="cpu")
    for index, layer in enumerate(model.sequential):
        initialize(layer, plan, index, grid)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_marks_of_split_parameters_survive_the_meta_device():
    plan = small_plan(2, model_parallel_size=2)
    grid = replace(ParallelGrid.single(), topology=Topology(1, 1, 2))
    layer = build_layer(plan, 2, grid, device="meta").to_empty(device="cpu")
    initialize(layer, plan, 2, grid)
    for spec in plan.layers[2].parameters:
        assert layer.get_parameter(spec.name).model_parallel == (spec.partition_dim is not None)


def test_bf16_parameters_are_the_rounded_fp32_ones_and_the_rotary_buffer_stays_fp32():
    plan, grid = small_plan(), ParallelGrid.single()
    exact = GPT(plan, grid).state_dict()
    for name, tensor in GPT(plan, grid, dtype=torch.bfloat16).state_dict().items():
        dtype = torch.float32 if name.endswith("inv_freq") else torch.bfloat16
        assert torch.equal(tensor, exact[name].to(dtype))


def test_formulas_of_channels_know_their_block():
    plan = small_plan(num_layers=3)
    weights = initial_weights(plan.config, plan.architecture)
    init = ByChannel(lambda channel, channels, block, blocks: channel + 10 * channels + 100 * block + 1000 * blocks)
    full = weights.full(ParameterSpec("weight", (2, 3), init=init), plan.layers[2 + 1])
    assert full.tolist() == [[3160, 3161, 3162], [3163, 3164, 3165]]


def test_weights_of_big_networks_depend_on_no_thread_and_no_device(monkeypatch):
    """A mixed run of two kinds of GPUs must start from one network, whatever draws it and how many threads do."""
    monkeypatch.setattr(sys.modules[Stream.__module__], "_PIECE", 100)
    monkeypatch.setattr("neox.model.build.DRAWN_IN_PIECES", 0)
    states = []
    threads = torch.get_num_threads()
    for count, device in ((1, "cpu"), (3, "cpu"), (3, "meta")):
        torch.set_num_threads(count)
        model = GPT(small_plan(), ParallelGrid.single(), device=device)
        if device == "meta":
            model = model.to_empty(device="cpu")
            for index, layer in enumerate(model.sequential):
                initialize(layer, small_plan(), index, ParallelGrid.single())
        states.append(model.state_dict())
    torch.set_num_threads(threads)
    for name, weight in states[0].items():
        assert all(torch.equal(state[name], weight) for state in states[1:]), name
        if name.endswith("mlp.dense_h_to_4h.weight"):
            pieces = weight.flatten().split(100)
            assert weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert not torch.equal(pieces[0], pieces[1])


def test_every_form_of_initial_values_is_drawn():
    plan = small_plan()
    weights = replace(initial_weights(plan.config, plan.architecture), prompt_range=0.25)
    deviations = {Constant(0.5): 0.0, Normal(0.3): 0.3, Uniform(-1.0, 2.0): 3 / math.sqrt(12)}
    deviations |= {FromKey.PROMPT_RANGE: 0.5 / math.sqrt(12), FromKey.METHOD: 0.02}
    for init, deviation in deviations.items():
        full = weights.full(ParameterSpec("weight", (300, 200), init=init), plan.layers[2])
        assert full.std().item() == pytest.approx(deviation, rel=0.02, abs=1e-6), init
        assert full.mean().item() == pytest.approx(0.5 if init in (Constant(0.5), Uniform(-1.0, 2.0)) else 0, abs=0.01)
