"""Compiled layers train as the others do, in every engine; what cannot be compiled is refused by name."""

import shutil

import pytest

from neox.errors import ConfigError
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan, train_curves

pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="torch.compile needs a C++ compiler (Debian: g++)"
)


def compiled_curves(plans, steps):
    """The curves of `plans`, and how many graphs were compiled for each on this rank."""
    from torch._dynamo.utils import counters

    answers = []
    for plan in plans:
        counters.clear()
        curve = train_curves([plan], steps)[0]
        answers.append((curve, counters["stats"]["unique_graphs"]))
    return answers


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pp": 2}, id="stages"),
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"mp": 2}, id="tensor", marks=pytest.mark.slow),
    ],
)
def test_losses_agree(layout):
    world = 2 if layout else 1
    keys = {"num_layers": 2, "train_micro_batch_size_per_gpu": 2, "checkpoint_activations": True}
    plans = [tiny_plan(world, **layout, **keys, compile_layers=compiled) for compiled in (False, True)]
    (plain, none), (compiled, graphs) = run_ranks(world, compiled_curves, plans, 4, timeout=300)[0]
    assert none == 0
    assert graphs >= 1 if "mp" in layout else graphs == 1  # communication between tensor ranks is not compiled
    for (loss, norm), (loss_compiled, norm_compiled) in zip(plain, compiled, strict=True):
        assert loss_compiled == pytest.approx(loss, rel=1e-5)
        assert norm_compiled == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("keys", [{"zero": 3}, {"apply_query_key_layer_scaling": True}])
def test_what_cannot_be_compiled_is_refused_by_name(keys):
    with pytest.raises(ConfigError, match=r"compile_layers: true` does not work with `(zero_opt|apply_query)"):
        tiny_plan(1, compile_layers=True, **keys)
