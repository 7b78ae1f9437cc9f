"""Random streams and recomputation on one rank; over ranks in tests/distributed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neox.parallel import RNGTracker, derive_seed

CPU = torch.device("cpu")


def test_seeds_are_the_same_everywhere_and_depend_on_every_part():
    assert derive_seed(1234, "weights", 2, "mlp.dense_h_to_4h.weight") == 5258342773984539489
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert 0 <= derive_seed(0) < 2**63


def test_fork_leaves_the_default_stream_alone_and_continues_its_own():
    tracker = RNGTracker(enabled=True)
    tracker.seed(5)
    torch.manual_seed(9)
    expected = torch.rand(2, 3)
    torch.manual_seed(9)
    first = torch.rand(3)
    with tracker.fork(CPU):
        one = torch.rand(3)
    second = torch.rand(3)
    with tracker.fork(CPU):
        two = torch.rand(3)
    assert torch.equal(torch.stack([first, second]), expected)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(torch.stack([one, two]), torch.rand(2, 3, generator=generator))


def test_states_continue_where_they_were_saved():
    tracker = RNGTracker(enabled=True, seed=5)
    with tracker.fork(CPU):
        torch.rand(3)
    saved = tracker.get_states()
    with tracker.fork(CPU):
        expected = torch.rand(3)
    other = RNGTracker(enabled=True, seed=6)
    other.set_states(saved)
    with other.fork(CPU):
        assert torch.equal(torch.rand(3), expected)


def test_disabled_tracker_uses_the_default_stream():
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    with RNGTracker().fork(CPU):
        assert torch.equal(torch.rand(3), expected)


def test_recomputation_repeats_both_streams_and_disturbs_neither():
    tracker = RNGTracker(enabled=True)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x * x, 0.5)
        with tracker.fork(CPU):
            return F.dropout(x * x, 0.5)

    results = []
    for run in (lambda f, x: f(x), tracker.checkpoint):
        torch.manual_seed(1)
        tracker.seed(2)
        x = torch.linspace(1, 2, 64, requires_grad=True)
        run(noisy, run(noisy, x)).sum().backward()
        with tracker.fork(CPU):
            results.append((x.grad, torch.rand(2), tracker.get_states()["states"]["cpu"]))
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))
