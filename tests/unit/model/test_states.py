"""States of fixed size, which blocks keep in generation instead of the keys of each token."""

from __future__ import annotations

import torch

from neox.model import BlockState, CacheStep, KVCache
from neox.model.cache import CacheForm, LayerCache, StateForm
from tests.plans import small_plan

FORMS = (StateForm(((3, 2), (5,))), CacheForm(None, 4, 8))


def cache(batch: int = 2) -> KVCache:
    return KVCache(small_plan().architecture, FORMS, batch, max_length=16)


def state_of(kept: KVCache | CacheStep, tokens: int = 1) -> BlockState:
    state = kept.layers(tokens)[0]
    assert isinstance(state, BlockState)
    return state


def test_each_block_gets_what_it_keeps() -> None:
    first, second = cache().layers(4)
    assert isinstance(first, BlockState)
    assert [tensor.shape for tensor in first.tensors] == [(2, 3, 2), (2, 5)]
    assert all(tensor.dtype == torch.float32 and not tensor.any() for tensor in first.tensors)
    assert isinstance(second, LayerCache)


def test_a_state_stays_until_it_is_reset() -> None:
    kept = cache()
    state_of(kept, 4).tensors[1].fill_(3.0)
    kept.advance(4)
    assert (state_of(kept).tensors[1] == 3.0).all()
    kept.reset()
    assert not state_of(kept).tensors[1].any()


def test_padding_does_not_count() -> None:
    kept = cache()
    kept.reset(start=torch.tensor([0, 2]))
    assert state_of(kept, 3).is_text.tolist() == [[True, True, True], [False, False, True]]
    kept.advance(3)
    assert state_of(kept, 1).is_text.tolist() == [[True], [True]]
    assert state_of(cache()).is_text is None


def test_rows_are_kept_in_another_order() -> None:
    kept = cache()
    state_of(kept).tensors[1].copy_(torch.tensor([[1.0], [2.0]]).expand(2, 5))
    step = CacheStep(kept)
    kept.reorder(torch.tensor([1, 0]))
    assert state_of(kept).tensors[1][:, 0].tolist() == [2.0, 1.0]
    assert step.belongs_to(kept), "as many rows need no new memory"
    kept.reorder(torch.tensor([0, 0, 1]))
    assert state_of(kept).tensors[1][:, 0].tolist() == [2.0, 2.0, 1.0]
    assert not step.belongs_to(kept)


def test_steps_of_fixed_shapes_use_the_same_memory() -> None:
    kept = cache()
    kept.advance(3)
    step = CacheStep(kept)
    state_of(step).tensors[0].fill_(7.0)
    assert (state_of(kept).tensors[0] == 7.0).all()
    assert state_of(step).is_text is None
