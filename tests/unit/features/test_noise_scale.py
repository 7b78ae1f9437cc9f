"""The gradient noise scale against its definition."""

import math

import pytest
import torch

from neox.features.noise_scale.run import NoiseScale
from neox.optim import NormScope
from neox.optim.adamw import AdamW

SIZE, STEPS, BATCH = 1000, 4, 8


@pytest.fixture
def measured():
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = AdamW([{"params": [parameter]}], scope=NormScope(None, lambda p: True), lr=1e-3, max_norm=0.1)
    scale = NoiseScale(optimizer, batch=BATCH, steps=STEPS, on_cpu=True)
    optimizer.register_step_pre_hook(lambda *_: scale.before_update(None))
    return parameter, optimizer, scale


def step(parameter, optimizer, gradient):
    parameter.grad = gradient.clone()
    optimizer.step()


def test_it_is_the_variance_of_samples_over_the_squared_mean_gradient(measured):
    """Gradients of samples with mean 1 and variance 5 an element: noise scale 5."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(40 * STEPS):
        noise = torch.randn(SIZE, generator=generator) * math.sqrt(5 / BATCH)
        step(*measured[:2], 1 + noise)
    assert measured[2].value == pytest.approx(5, rel=0.1)


def test_gradients_without_noise_and_those_that_are_not_finite(measured):
    for number in range(STEPS + 1):
        assert measured[2].value is None
        step(*measured[:2], torch.full((SIZE,), math.nan if number == 1 else 2.0))
    assert measured[2].value == pytest.approx(0, abs=1e-4)
