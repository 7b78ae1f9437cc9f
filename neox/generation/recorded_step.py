"""Decoding steps that repeat the same kernels on the same memory; on a GPU they are one recorded graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from neox.model import CacheStep, KVCache
from neox.ops import has_fast_path


class RecordedStep:
    """The steps of one batch after its prompt.

    On a GPU the first one runs as usual, which loads its kernels. The second one is recorded as a CUDA graph, which it
    and all later ones replay. Elsewhere all run as usual, by the same functions.
    """

    def __init__(self, compute: Callable[[Tensor, CacheStep], Tensor], cache: KVCache) -> None:
        """Continue behind what the cache holds now.

        Args:
            compute: Function of tokens [B, 1] and the step that returns logits [B, V]. No value on the host may differ
                from step to step.
            cache: Keys and values of the batch.
        """
        self.compute = compute
        self.cache = cache
        self.state = CacheStep(cache)
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.long, device=cache.device)
        self._loaded = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, 1] and return the logits [B, V], which later steps do not change.

        Raises:
            NeoXError: The cache is full.
        """
        self.cache.check_room(1)
        self.cache.advance(1)
        self.tokens.copy_(tokens)
        if not self._loaded or not has_fast_path("recorded_steps", self.tokens.device):
            self._loaded = True
            return self._run()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads of a server may use the device meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = self._run()
            self._graph = graph
        assert self._logits is not None
        self._graph.replay()
        return self._logits.clone()

    def continues(self, cache: KVCache) -> bool:
        """Return whether the next step can be one of these: whether the cache has the same memory and padding."""
        return self.state.belongs_to(cache)

    def _run(self) -> Tensor:
        return self.compute(self.tokens, self.state)
