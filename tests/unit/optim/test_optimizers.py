"""Parameter groups and the clipping optimizer."""

import math

import pytest
import torch
from torch import nn

from neox.config.sections.optimizer_table import OPTIMIZERS
from neox.optim import CLASSES, LRSchedule, NormScope, parameter_groups
from neox.optim.adamw import AdamW
from neox.optim.clipping import pieces
from neox.parallel import mark_lr_factor
from tests.plans import small_plan


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def optimizer_of(model, max_norm, counts=lambda p: True):
    groups = parameter_groups(model.named_parameters(), 0.1)
    return AdamW(groups, max_norm=max_norm, scope=NormScope(None, counts), lr=0.1)


def test_pieces_are_views_of_everything_and_small():
    lists = [[torch.arange(7.0) + n, torch.zeros(2, 3) + n, torch.zeros(0), torch.ones(2) + n] for n in range(2)]
    seen = []
    for first, second in pieces(*lists, largest=4):
        assert sum(part.numel() for part in first) <= 4
        assert [p.shape for p in first] == [p.shape for p in second]
        seen.append(torch.cat(first))
        for part in second:
            part.fill_(-1.0)
    assert torch.equal(torch.cat(seen), torch.cat([tensor.reshape(-1) for tensor in lists[0]]))
    assert all((tensor == -1.0).all() for tensor in lists[1])


def test_matrices_decay_and_vectors_do_not():
    decayed, spared = parameter_groups(tiny().named_parameters(), 0.1)
    assert [p.dim() for p in decayed["params"]] == [2, 2]
    assert decayed["weight_decay"] == 0.1
    assert [p.dim() for p in spared["params"]] == [1, 1, 1]
    assert spared["weight_decay"] == 0.0


def test_groups_without_members_are_left_out():
    assert len(parameter_groups(nn.Embedding(5, 4).named_parameters(), 0.1)) == 1


def test_each_group_reports_its_own_learning_rate():
    model = tiny()
    mark_lr_factor(model[0].weight, 0.5)
    optimizer = AdamW(parameter_groups(model.named_parameters(), 0.1))
    schedule = LRSchedule(small_plan(), optimizer)
    schedule.seek(1)
    assert schedule.lr > 0
    assert schedule.get_lr() == [schedule.lr * group.get("lr_factor", 1.0) for group in optimizer.param_groups]
    assert len(set(schedule.get_lr())) == 2


def test_clips_like_torch():
    ours, reference = tiny(), tiny()
    for model in (ours, reference):
        model(torch.arange(5)).square().sum().mul(100).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    theirs = torch.optim.AdamW(parameter_groups(reference.named_parameters(), 0.1), lr=0.1, fused=True)
    mine = optimizer_of(ours, 1.0)
    theirs.step()
    mine.step()
    assert mine._global_grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert norm > 1
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_uncounted_parameters_are_clipped_but_not_counted():
    model = tiny()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = optimizer_of(model, 0.0, counts=lambda p: p.dim() == 2)
    optimizer.step()
    assert optimizer._global_grad_norm == pytest.approx(math.sqrt(5 * 4 + 4 * 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_changes_nothing(bad):
    model = tiny()
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, bad)
    optimizer = optimizer_of(model, 1.0)
    optimizer.step()
    assert optimizer.overflow
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not optimizer.overflow


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whether_rows_without_a_gradient_stay_is_known(name):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40, 16))
    before = weight.detach().clone()
    kind = OPTIMIZERS[name]
    numbers = {"min_8bit_size": 0} if "min_8bit_size" in kind.params.model_fields else {}
    params = kind.params.model_validate(numbers)
    optimizer = CLASSES[name]([{"params": [weight], "weight_decay": 0.0}], lr=0.01, **params.options())
    for _ in range(3):
        weight.grad = torch.zeros_like(weight)
        weight.grad[30:] = torch.randn(10, 16)
        optimizer.step()
    assert torch.equal(weight[:30], before[:30]) == kind.leaves_untouched
    assert not torch.equal(weight[30:], before[30:])
