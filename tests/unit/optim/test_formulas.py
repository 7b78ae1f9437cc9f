"""Every optimizer's step against its paper's formula or a plain torch loop, and its states against the table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.held_storages import HeldStorages
from neox.config.sections.optimizer_kind import SCALES, VALUES
from neox.config.sections.optimizer_table import OPTIMIZERS
from neox.optim import CLASSES, LRSchedule, NormScope, build_optimizer
from neox.optim.groups import is_hidden
from neox.parallel import mark_hidden
from tests.plans import small_plan

STEPS = 4


def example() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A small model, and gradients of some steps by parameter name."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    for p in model.parameters():
        nn.init.normal_(p, generator=generator)
    mark_hidden(model[0].weight, True)
    steps = [
        {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()} for _ in range(STEPS)
    ]
    return model, steps


def built(model: nn.Module, name: str, *, clip: float = 0.0, **params):
    """The optimizer of a plan with these numbers, as `neox.engine` builds it."""
    optimizer = {"type": name, "params": {"lr": 0.01, **params}}
    plan = small_plan(1, optimizer=optimizer, weight_decay=0.1, gradient_clipping=clip)
    found = build_optimizer(plan, model.named_parameters(), NormScope(None, lambda p: True))
    for group in found.param_groups:
        group["lr"] = 0.01 * group.get("lr_factor", 1.0)
    return found


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps, clip: float = 0.0) -> dict[str, torch.Tensor]:
    for gradients in steps:
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def groups_of(model: nn.Module) -> list[dict]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


TORCH = {
    "adam": ({"betas": [0.8, 0.95]}, lambda g: torch.optim.AdamW(g, lr=0.01, betas=(0.8, 0.95))),
    "sgd": ({}, lambda g: torch.optim.SGD(g, lr=0.01)),
    "adafactor": ({"d": 2.0}, lambda g: torch.optim.Adafactor(g, lr=0.01, d=2.0)),
    "sgd with momentum": (
        {"momentum": 0.9, "nesterov": True},
        lambda g: torch.optim.SGD(g, lr=0.01, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", TORCH)
def test_those_of_torch_are_torchs(name, clip):
    params, theirs = TORCH[name]
    (ours, steps), (reference, _) = example(), example()
    moved = run(ours, built(ours, name.split()[0], clip=clip, **params), steps)
    expected = run(reference, theirs(groups_of(reference)), steps, clip)
    for key in expected:
        torch.testing.assert_close(moved[key], expected[key], rtol=2e-6, atol=2e-7)


def test_lion_is_the_papers_program():
    (ours, steps), (reference, _) = example(), example()
    moved = run(ours, built(ours, "Lion", betas=[0.8, 0.9]), steps)
    for name, p in reference.named_parameters():
        p = p.detach().double()
        momentum = torch.zeros_like(p)
        for gradients in steps:
            gradient = gradients[name].double()
            direction = torch.sign(0.8 * momentum + 0.2 * gradient)
            p = p - 0.01 * (direction + (0.1 if p.dim() > 1 else 0.0) * p)
            momentum = 0.9 * momentum + 0.1 * gradient
        torch.testing.assert_close(moved[name].double(), p, rtol=1e-6, atol=1e-7)


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    (ours, steps), (reference, _) = example(), example()
    moved = run(ours, built(ours, "Muon", clip=0.5, betas=[0.8, 0.95]), steps)
    matrices, others = groups_of(reference)
    muon = torch.optim.Muon([matrices], lr=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([others], lr=0.01, betas=(0.8, 0.95))
    for gradients in steps:
        for name, p in reference.named_parameters():
            p.grad = gradients[name].clone()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        muon.step()
        adamw.step()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(moved[name], p.detach(), rtol=1e-3, atol=1e-4)  # Muon multiplies in bf16


def test_sm3_of_a_vector_is_adagrad_and_of_a_matrix_bounds_its_sums():
    """Algorithm SM3-II of the paper, element by element."""
    (ours, steps), (reference, _) = example(), example()
    moved = run(ours, built(ours, "sm3", momentum=0.9), steps)
    for name, p in reference.named_parameters():
        weights, average = p.detach().double(), torch.zeros_like(p, dtype=torch.float64)
        rows, columns = torch.zeros(p.shape[0]).double(), torch.zeros(p.shape[-1]).double()
        for gradients in steps:
            g = gradients[name].double()
            if p.dim() == 1:
                rows = bound = rows + g**2
            else:
                bound = torch.minimum(rows[:, None], columns[None, :]) + g**2
                rows, columns = bound.max(1).values, bound.max(0).values
            average = 0.9 * average + 0.1 * g / bound.sqrt()
            weights = weights - 0.01 * average
        torch.testing.assert_close(moved[name].double(), weights, rtol=1e-6, atol=1e-7)


def test_madgrad_is_the_papers_algorithm():
    (ours, steps), (reference, _) = example(), example()
    moved = run(ours, built(ours, "MADGRAD_WD"), steps)
    for name, p in reference.named_parameters():
        x, lr = p.detach().double(), 0.01 + 1e-6
        x0, s, v = x, torch.zeros_like(x), torch.zeros_like(x)
        for k, gradients in enumerate(steps):
            g, weight = gradients[name].double(), lr * (k + 1) ** 0.5
            s, v = s + weight * g, v + weight * g**2
            x = 0.9 * x * (1 - lr * (0.1 if p.dim() > 1 else 0.0)) + 0.1 * (x0 - s / (v ** (1 / 3) + 1e-6))
        torch.testing.assert_close(moved[name].double(), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("bits", "exact"), [("Adam8bit", "Adam"), ("Lion8bit", "Lion")])
def test_states_of_8_bits_are_rounded_by_blocks(bits, exact):
    """The first step is exact, as is every step of a small tensor; a code is off by 2 % of its block's scale."""
    generator = torch.Generator().manual_seed(1)
    start, steps = torch.randn(3, 200, generator=generator), torch.randn(3, 3, 200, generator=generator)
    models = [nn.Linear(200, 3, bias=False) for _ in range(3)]
    chosen = [(bits, {"min_8bit_size": 0}), (bits, {"min_8bit_size": 601}), (exact, {})]
    optimizers = [built(model, name, **numbers) for model, (name, numbers) in zip(models, chosen, strict=True)]
    for number, gradient in enumerate(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            if number == 0:
                model.weight.data.copy_(start)
            model.weight.grad = gradient.clone()
            optimizer.step()
        coded, small, wanted = (model.weight.detach() for model in models)
        torch.testing.assert_close(small, wanted, rtol=2e-6, atol=1e-6)
        if number == 0:
            torch.testing.assert_close(coded, wanted, rtol=2e-6, atol=1e-6)
    coded, wanted = (
        optimizer.state[model.weight] for model, optimizer in zip(models[::2], optimizers[::2], strict=True)
    )
    assert coded["exp_avg"].dtype == torch.uint8
    scales = coded["exp_avg" + SCALES].repeat_interleave(256)[:600].view(3, 200)
    off = (coded["exp_avg" + VALUES][coded["exp_avg"].int()] * scales - wanted["exp_avg"]).abs() / scales
    assert off.max() < 0.02 * len(steps)


@pytest.mark.parametrize("name", ["Adam8bit", "Lion8bit"])
def test_decoded_states_of_8_bits_are_coded_the_same_again(name):
    """A run goes on from the numbers of a saved state, wherever it is not read as it is, such as with offload."""
    generator = torch.Generator().manual_seed(2)
    model = nn.Linear(150, 7, bias=False)
    optimizer = built(model, name, min_8bit_size=0)
    for _ in range(3):
        model.weight.grad = torch.randn(7, 150, generator=generator)
        model.weight.grad[:2] = 0.0  # the first block, where every code means 0
        optimizer.step()
    before = dict(optimizer.state[model.weight])
    names = [key.removesuffix(SCALES) for key in before if key.endswith(SCALES)]
    assert (before["exp_avg"].view(-1)[256:] == 0).any(), "no block has a negative extreme"
    numbers = {
        key: before[key + VALUES][before[key].int()] * before[key + SCALES].repeat_interleave(256)[:1050].view(7, 150)
        for key in names
    }
    optimizer.keep(model.weight, numbers)
    for key in names:
        assert torch.equal(optimizer.state[model.weight][key].view(-1)[256:], before[key].view(-1)[256:])
        torch.testing.assert_close(optimizer.state[model.weight][key + SCALES], before[key + SCALES])


def test_classes_have_the_tables_keys():
    assert CLASSES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_cycles_the_betas_that_the_table_names_and_no_others(name):
    model, _ = example()
    plan = small_plan(1, optimizer={"type": OPTIMIZERS[name].names[0]}, train_iters=STEPS, **SCHEDULES["OneCycle"])
    optimizer = build_optimizer(plan, model.named_parameters())
    before = [dict(group) for group in optimizer.param_groups]
    LRSchedule(plan, optimizer).seek(1)
    changed = set()
    for old, new in zip(before, optimizer.param_groups, strict=True):
        changed |= {key for key in new if key != "params" and new[key] != old[key]}
    cycled = OPTIMIZERS[name].cycled_betas
    assert changed == {"lr", cycled} - {""}
    if cycled:
        assert len(getattr(plan.config.optimizer.optimizer.params, cycled)) == 2


# Numbers with which every state exists.
ALL_STATES = {
    "sgd": {"momentum": 0.9},
    "sm3": {"momentum": 0.9},
    "adam8bit": {"min_8bit_size": 5},  # of the weights alone
    "lion8bit": {"min_8bit_size": 5},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_the_tables(name):
    model, steps = example()
    optimizer = built(model, OPTIMIZERS[name].names[0], **ALL_STATES.get(name, {}))
    run(model, optimizer, steps)
    for p in model.parameters():
        extra = ("step", SCALES, VALUES)
        kept = {key: tuple(value.shape) for key, value in optimizer.state[p].items() if not key.endswith(extra)}
        wanted = {s.name: s.shape(tuple(p.shape), hidden=is_hidden(p)) for s in OPTIMIZERS[name].states}
        assert kept == {key: shape for key, shape in wanted.items() if shape is not None}
        assert ("step" in optimizer.state[p]) == OPTIMIZERS[name].counts_steps


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_makes_the_tables_temporary_tensors(name):
    """As large as all parameters together; beside them only such as one parameter."""
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(20)))
    for p in model.parameters():
        mark_hidden(p, True)
    optimizer = built(model, OPTIMIZERS[name].names[0], **ALL_STATES.get(name, {}))
    for _ in range(2):  # the first one makes the states
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        here = [[p.data, p.grad, *optimizer.state[p].values()] for p in model.parameters()]
        with HeldStorages() as held:
            for tensor in (tensor for tensors in here for tensor in tensors if isinstance(tensor, torch.Tensor)):
                tensor.add_(0)
            before = held.total
            optimizer.step()
    assert (held.peak - before) / (4 * 20 * 32**2) == pytest.approx(OPTIMIZERS[name].temporaries, abs=0.4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_state_goes_on(name):
    (whole, steps), (resumed, _) = example(), example()
    expected = run(whole, built(whole, OPTIMIZERS[name].names[0], **ALL_STATES.get(name, {})), steps)
    first = built(resumed, OPTIMIZERS[name].names[0], **ALL_STATES.get(name, {}))
    run(resumed, first, steps[:2])
    second = built(resumed, OPTIMIZERS[name].names[0], **ALL_STATES.get(name, {}))
    second.load_state_dict(first.state_dict())
    moved = run(resumed, second, steps[2:])
    for key in expected:
        assert torch.equal(moved[key], expected[key]), key


@pytest.mark.parametrize(("name", "hidden", "others"), [("Adam", 0.25, 1.0), ("SGD", 1.0, 4.0), ("Muon", 0.5, 1.0)])
def test_learning_rates_under_mup(name, hidden, others):
    from neox.model import build_layer
    from neox.parallel import ParallelGrid

    mup = {"use_mup": True, "mup_base_hidden_size": 8, "weight_decay": 0.1}
    plan = small_plan(1, optimizer={"type": name}, **mup)
    layer = build_layer(plan, 2, ParallelGrid.single(), device="cpu", dtype=torch.float32)
    optimizer = build_optimizer(plan, layer.named_parameters())
    found = {p.dim(): group for group in optimizer.param_groups for p in group["params"]}
    assert found[2].get("lr_factor", 1.0) == hidden
    assert found[1].get("lr_factor", 1.0) == others
    assert found[2]["weight_decay"] * hidden == pytest.approx(0.1)
    assert found[1]["weight_decay"] == 0.0


_CYCLE = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2}
SCHEDULES = {
    **{style: {"lr_decay_style": style} for style in ("constant", "linear", "cosine", "exponential")},
    "WSD": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2},
    "LRRangeTest": {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.01}}},
    "OneCycle": {"scheduler": {"type": "OneCycle", "params": _CYCLE}},
    **{
        name: {"scheduler": {"type": name, "params": {"warmup_num_steps": 2}}}
        for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_schedule_goes_on_exactly(name):
    """Saved after two of four steps: the schedule's position and the optimizer's state."""
    for schedule, keys in SCHEDULES.items():
        settings = {"type": OPTIMIZERS[name].names[0], "params": {"lr": 0.01, **ALL_STATES.get(name, {})}}
        plan = small_plan(1, optimizer=settings, train_iters=STEPS, **keys)

        def start(model, plan=plan):
            optimizer = build_optimizer(plan, model.named_parameters(), NormScope(None, lambda p: True))
            return optimizer, LRSchedule(plan, optimizer)

        def train(model, optimizer, position, steps):
            for gradients in steps:
                run(model, optimizer, [gradients])
                position.step()

        (whole, steps), (resumed, _) = example(), example()
        train(whole, *start(whole), steps)
        optimizer, position = start(resumed)
        train(resumed, optimizer, position, steps[:2])
        further, seek = start(resumed)
        further.load_state_dict(optimizer.state_dict())
        seek.load_state_dict(position.state_dict())
        train(resumed, further, seek, steps[2:])
        for (key, p), q in zip(whole.named_parameters(), resumed.parameters(), strict=True):
            assert torch.equal(p, q), (schedule, key)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_adamw_without_a_fused_kernel_updates_alike(monkeypatch, betas, clip):
    params = {"betas": list(betas), "eps": 1e-6}
    results = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr("neox.optim.adamw.has_fast_path", lambda name, device: False)
        model, steps = example()
        optimizer = built(model, "AdamW", clip=clip, **params)
        weights = run(model, optimizer, steps)
        results.append((weights, {key: value for p in model.parameters() for key, value in optimizer.state[p].items()}))
    (fused, fused_states), (plain, plain_states) = results
    assert fused_states.keys() == plain_states.keys()
    for name in fused:
        torch.testing.assert_close(plain[name], fused[name], rtol=2e-6, atol=1e-8)
    for name in fused_states:
        torch.testing.assert_close(plain_states[name], fused_states[name], rtol=2e-6, atol=1e-9)
