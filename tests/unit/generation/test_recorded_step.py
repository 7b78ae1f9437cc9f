"""Decoding by steps of fixed shapes: what a CUDA graph needs, shown on a CPU, and the results of growing shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neox.errors import NeoXError
from neox.generation.beam_search import beam_search
from neox.generation.request import SamplingParams
from neox.generation.runner import CachedDecoding, ModelRunner
from tests.errors import raises_naming
from tests.gpu.engine_checks import recorded_steps_give_the_usual_logits
from tests.plans import NETWORKS, RECORDED_NETWORKS, SMALL
from tests.unit.generation.random_model import CPU, runner
from tests.unit.generation.test_packed import NoText

# Operations that read a tensor on the host, or whose result's shape depends on values, or that copy from the host.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal.default", "lift_fresh")


class Recorder(TorchDispatchMode):
    """Every operation with the shapes, types and host values of its arguments, and the addresses of lasting tensors."""

    def __init__(self, lasting: set[int]) -> None:
        super().__init__()
        self.lasting = lasting
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func), *map(self._seen, tree_leaves((args, kwargs or {})))))
        return func(*args, **(kwargs or {}))

    def _seen(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        address = value.untyped_storage().data_ptr()
        return tuple(value.shape), value.stride(), value.dtype, address if address in self.lasting else None


def begin(model: ModelRunner, lengths: Sequence[int], steps: int) -> CachedDecoding:
    """Return a batch that has read its prompts and one token more."""
    decoding = model.begin(lengths, max(lengths) + steps)
    assert isinstance(decoding, CachedDecoding)
    for width in (max(lengths), 1):
        decoding.feed(torch.ones(len(lengths), width, dtype=torch.long))
    return decoding


def recorded(name: str, **settings: Any) -> ModelRunner:
    keys = {**SMALL, "init_method_std": 0.2, **NETWORKS[name]}
    model = runner(parallel_residual=False, **settings, **keys)
    model.recorded = True
    return model


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("lengths", [(3, 6, 5), pytest.param((4, 4), marks=pytest.mark.slow)], ids=["padded", "equal"])
@pytest.mark.parametrize("name", RECORDED_NETWORKS)
def test_logits_are_those_of_growing_shapes(name: str, lengths: tuple[int, ...]) -> None:
    recorded_steps_give_the_usual_logits(CPU, name, lengths=lengths)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["llama", "alibi", "rpe", "windows"])
def test_half_precision(name: str, dtype: str) -> None:
    recorded_steps_give_the_usual_logits(CPU, name, dtype)


@pytest.mark.parametrize("lengths", [(3, 6, 5), pytest.param((4,), marks=pytest.mark.slow)], ids=["padded", "one"])
@pytest.mark.parametrize("name", RECORDED_NETWORKS)
def test_steps_are_the_same_operations_on_the_same_memory(name: str, lengths: tuple[int, ...]) -> None:
    model = recorded(name)
    decoding = begin(model, lengths, steps=6)
    step = decoding._step
    assert step is not None
    kept = [
        step.tokens,
        step.state.stores[0].pairs,
        step.state.slot,
        step.state.slots,
        *(() if step.state.start is None else [step.state.start]),
    ]
    kept += [parameter for layer in model.network.layers.values() for parameter in layer.parameters()]
    runs = []
    for token in range(4):
        with Recorder({tensor.untyped_storage().data_ptr() for tensor in kept}) as recorder:
            decoding.feed(torch.full((len(lengths), 1), token + 2))
        runs.append(recorder.calls)
    assert decoding._step is step
    assert any(step.state.stores[0].pairs.untyped_storage().data_ptr() in map(_address, call[1:]) for call in runs[0])
    for run in runs[1:]:
        assert run[1:] == runs[0][1:]  # the first makes the tokens
    waits = [call[0] for call in runs[0][1:] if any(name in call[0] for name in WAITS)]
    assert not waits


def _address(seen: Any) -> int | None:
    return seen[3] if isinstance(seen, tuple) and len(seen) == 4 else None


@pytest.mark.parametrize(
    "name",
    [name if name in ("rotary", "rpe") else pytest.param(name, marks=pytest.mark.slow) for name in RECORDED_NETWORKS],
)
def test_a_compiled_step_is_compiled_once(name: str) -> None:
    model, counter = recorded(name), CompileCounter()
    decoding, plain = (begin(model, (3, 5), steps=6) for _ in range(2))
    step = decoding._step
    assert step is not None
    torch._dynamo.reset()
    step.compute = torch.compile(step.compute, backend=counter, fullgraph=True)
    for token in range(2, 6):
        tokens = torch.full((2, 1), token)
        torch.testing.assert_close(decoding.feed(tokens), plain.feed(tokens), atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 1


def test_beams_are_those_of_growing_shapes() -> None:
    params = SamplingParams(max_new_tokens=8, num_beams=3)
    fixed = recorded("llama")
    found = beam_search(fixed, [5, 6, 7], params, NoText())
    fixed.recorded = False
    assert found.tokens == beam_search(fixed, [5, 6, 7], params, NoText()).tokens


def test_a_full_cache_is_refused() -> None:
    decoding = begin(recorded("none"), (16 - 1,), steps=1)
    with raises_naming(NeoXError, 16):
        decoding.feed(torch.ones(1, 1, dtype=torch.long))


def test_rows_longer_than_the_network_grow_as_usual() -> None:
    """Padding can make them so; patterns of blocks then depend on the length."""
    assert begin(recorded("none"), (12, 15), steps=5)._step is None
