"""Operations of a model as torch counts them, and a failure for operations that nobody counts.

torch's counter knows matrix products and convolutions; whatever else computes counts as 0 there, such as attention on a
CPU, products that are added in place, and every recurrence. Here an operation has a formula, or it is known to make no
products, or the count fails.

Some functions do more or less than the model asks for: attention skips pairs that do not see each other, or computes
them in vain, and a recurrence goes by chunks of tokens. They count as one operation, by a formula of what they compute
(`FUNCTIONS`), whatever happens inside.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from neox.ops import VisiblePairs

_aten = torch.ops.aten


def _added_product(total: Tensor, a: Tensor, b: Tensor, **_: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _attention_gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Twice those of the forward pass. Scores that a kernel computes again are no operations of the model."""
    return 2 * sdpa_flop_count(q.shape, k.shape, v.shape)


OPERATIONS: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        **flop_registry,
        _aten.addmm_: _added_product,
        _aten.baddbmm_: _added_product,
        _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_gradients,
    }
)
"""Operation -> its formula, of its arguments (and of its result `out_val`)."""

_NEW = """arange empty empty_like full full_like new_empty new_full new_zeros ones ones_like scalar_tensor zeros
    zeros_like"""
_MOVED = """_local_scalar_dense _to_copy _unsafe_view alias cat constant_pad_nd copy_ detach expand fill_ flip
    lift_fresh repeat repeat_interleave roll select_backward slice_backward stack tril triu triu_"""
_ROWS_BY_NUMBER = """embedding embedding_dense_backward gather index index_add index_copy index_put_ index_select
    nonzero scatter_ scatter_add scatter_add_ sort topk"""
_OVER_ROWS = """_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data cumsum native_layer_norm
    native_layer_norm_backward nll_loss_backward nll_loss_forward"""
_ELEMENTWISE = "floor_divide mish_backward promote_types softplus_backward"
PRODUCT_FREE = frozenset(" ".join((_NEW, _MOVED, _ROWS_BY_NUMBER, _OVER_ROWS, _ELEMENTWISE)).split())
"""Operations of torch that make no products of matrices. Those that torch itself calls elementwise, reductions or views
need no mention."""


def _attention(arguments: Mapping[str, Any]) -> int:
    """Scores and weighted values of all pairs, or of as many keys for each query as its window has."""
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    pairs: VisiblePairs | None = arguments["pairs"]
    keys = k.shape[1]
    if pairs is not None and pairs.reach is not None:
        keys = min(keys, pairs.reach)
    batch, queries, heads, width = q.shape
    return 2 * batch * queries * heads * (width + v.shape[-1]) * keys


def _convolution(arguments: Mapping[str, Any]) -> int:
    """A product of each channel's last inputs with its taps."""
    return 2 * arguments["x"].numel() * arguments["weight"].shape[-1]


def _selective_scan(arguments: Mapping[str, Any]) -> int:
    """Of each channel: what a token adds to its state, and what it reads."""
    return 2 * 2 * arguments["x"].numel() * arguments["b"].shape[-1]


def _delta_rule(arguments: Mapping[str, Any]) -> int:
    """Of each head of values: what its state holds for the key, what is written, and what the query reads."""
    return 3 * 2 * arguments["values"].numel() * arguments["keys"].shape[-1]


def _wkv(arguments: Mapping[str, Any]) -> int:
    """Of each head: what a token adds to its state, and what it reads."""
    return 2 * 2 * arguments["values"].numel() * arguments["keys"].shape[-1]


def _weighted_sum(arguments: Mapping[str, Any]) -> int:
    """Of each token's experts: elementwise, although `bmm` does it."""
    return 0


FUNCTIONS: Mapping[str, Callable[[Mapping[str, Any]], int]] = MappingProxyType(
    {
        "neox.model.attention.core_attention": _attention,
        "neox.model.experts.combine_rows": _weighted_sum,
        "neox.model.mixer.causal_convolution": _convolution,
        "neox.model.mamba.selective_scan": _selective_scan,
        "neox.model.mamba2.chunked_scan": _selective_scan,
        "neox.model.gated_delta.gated_delta_scan": _delta_rule,
        "neox.model.rwkv.wkv_scan": _wkv,
    }
)
"""Function, by where it is called -> its operations in a forward pass, of its arguments. A backward pass takes twice
these."""


class CountedOperations(TorchDispatchMode):
    """Sum of the operations in this context, forward and backward.

    Raises:
        AssertionError: From the pass, for an operation without a formula.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._inside = 0
        self._uncounted: set[str] = set()
        self._patches = ExitStack()

    def __enter__(self) -> CountedOperations:
        for name, formula in FUNCTIONS.items():
            module, _, function = name.rpartition(".")
            original = getattr(importlib.import_module(module), function)
            self._patches.enter_context(mock.patch(name, self._as_one(original, formula)))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()
        assert not self._uncounted, f"operations without a formula in {__name__}: {sorted(self._uncounted)}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            operation = func._overloadpacket
            if operation in OPERATIONS:
                self.total += OPERATIONS[operation](*args, **(kwargs or {}), out_val=result)
            elif not _is_product_free(func):
                self._uncounted.add(str(operation))
        return result

    @contextmanager
    def one_operation(self, count: int) -> Iterator[None]:
        """Count this much, and nothing that happens in the context."""
        self.total += count
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _as_one(self, original: Callable[..., Any], formula: Callable[[Mapping[str, Any]], int]) -> Callable[..., Any]:
        """Return a function that counts as one operation, and so does its backward pass."""
        signature = inspect.signature(original)

        def whole(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            flat, spec = tree_flatten((args, kwargs))

            def call(*flat: Any) -> Any:
                args, kwargs = tree_unflatten(list(flat), spec)
                return original(*args, **kwargs)

            return _Whole.apply(self, call, formula(bound.arguments), *flat)

        return whole


class _Whole(torch.autograd.Function):
    """A function as one operation of the graph: its backward pass runs it again with the graph inside."""

    @staticmethod
    def forward(ctx: Any, counted: CountedOperations, call: Callable[..., Any], count: int, *inputs: Any) -> Any:
        ctx.counted, ctx.call, ctx.count = counted, call, count
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.tensors = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[place] for place in ctx.tensors))
        with counted.one_operation(count):
            return call(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = list(ctx.others)
        for place, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            inputs[place] = tensor.detach().requires_grad_(tensor.is_floating_point())
        with ctx.counted.one_operation(2 * ctx.count), torch.enable_grad():
            outputs = ctx.call(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            wanted = [place for place in ctx.tensors if inputs[place].requires_grad]
            found = torch.autograd.grad(
                outputs, [inputs[place] for place in wanted], gradients, allow_unused=True, materialize_grads=True
            )
        result: list[Any] = [None] * len(inputs)
        for place, gradient in zip(wanted, found, strict=True):
            result[place] = gradient
        return (None, None, None, *result)


def _is_product_free(func: Any) -> bool:
    """Return whether an operation is known to make no products, or to communicate."""
    name = func._schema.name.removeprefix("aten::")
    if func.is_view or name in PRODUCT_FREE or func.namespace in ("c10d", "_c10d_functional"):
        return True
    out_of_place = getattr(_aten, name.removesuffix("_"), func._overloadpacket)
    tags = {tag for overload in out_of_place.overloads() for tag in getattr(out_of_place, overload).tags}
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags
