"""Entries of `config.json` and names of tensors that families with experts have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.families.config_entries import (
    ConfigEntries,
    Count,
    Derived,
    Fields,
    ModelSettings,
    Size,
    Switch,
    hidden_per_head,
    is_whole_number,
)
from neox.families.family import TensorSource

_BLOCK = "model.layers.{i}."

SOFTMAX_EXPERTS: Fields = MappingProxyType({"router": "topk"})
"""Fields of families whose router takes the softmax over all experts."""
_MLP_AS_WIDE_AS_EXPERTS = Derived("mlp_width", lambda known: known["expert_width"])
_ALL_BLOCKS_HAVE_EXPERTS = Derived("expert_blocks", lambda known: tuple(range(known["num_layers"])))


class HeadDimFollows(Derived):
    """The width of a head in families whose norms expect heads that are together as wide as the hidden states."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if there is another width."""
        heads = hf.get("num_attention_heads")
        hidden = hf.get("hidden_size")
        width = hf.get("head_dim")
        if width is None or not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
            return
        if width != hidden // heads:
            yield f"head_dim: {width}: should be hidden_size / num_attention_heads"


def with_equal_heads(entries: Iterable[ConfigEntries]) -> tuple[ConfigEntries, ...]:
    """Return entries in which the width of a head follows from the hidden size."""
    result: list[ConfigEntries] = []
    for entry in entries:
        holds_width = getattr(entry, "field", None) == "head_dim"
        result.append(HeadDimFollows("head_dim", hidden_per_head) if holds_width else entry)
    return tuple(result)


class ExpertSize(Size):
    """A size of a network with experts. For one without experts it is written as the least one."""

    least = 1

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entry."""
        return {self.key: max(self.least, getattr(network, self.field))}


class SeveralExperts(ExpertSize):
    """The number of experts, under one of transformers' two names. A mixture of one is a dense network here."""

    least = 2

    def kind(self) -> str:
        """Return a name of the right values."""
        return "a whole number of at least 2"

    def is_right(self, value: Any) -> bool:
        """Return whether a value has the right type and size."""
        return is_whole_number(value) and value >= self.least

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the entry is missing or wrong, or the two names contradict each other."""
        yield from super().problems(self._with_own_name(hf))
        number, other = hf.get("num_experts"), hf.get("num_local_experts")
        if number is not None and other is not None and number != other:
            yield f"num_experts: {number!r}: contradicts num_local_experts: {other!r}"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the number."""
        return super().read(self._with_own_name(hf), known)

    def _with_own_name(self, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return entries in which the number has the name that this family writes."""
        for name in ("num_experts", "num_local_experts"):
            if name in hf:
                return {self.key: hf[name]}
        return {}


class BlocksWithExperts(ConfigEntries):
    """`decoder_sparse_step`: every n-th block has experts, except for those in `mlp_only_layers`."""

    _STEP = Count("decoder_sparse_step", "step", 1)

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each of the two entries that is wrong."""
        yield from self._STEP.problems(hf)
        listed = hf.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(map(is_whole_number, listed)):
            yield f"mlp_only_layers: {listed!r}: should be a list of numbers of blocks"
        elif self._leaves_none(hf):
            yield "mlp_only_layers and decoder_sparse_step leave no block with experts"

    def _leaves_none(self, hf: Mapping[str, Any]) -> bool:
        layers = hf.get("num_hidden_layers")
        step = hf.get("decoder_sparse_step", 1)
        if not is_whole_number(layers) or not is_whole_number(step):
            return False  # other reasons are given for that
        return not self.read(hf, {"num_layers": layers})["expert_blocks"]

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the numbers of the blocks."""
        step = max(1, hf.get("decoder_sparse_step", 1))
        dense = hf.get("mlp_only_layers") or []
        blocks = []
        for number in range(known["num_layers"]):
            if (number + 1) % step == 0 and number not in dense:
                blocks.append(number)
        return {"expert_blocks": tuple(blocks)}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the two entries."""
        dense = []
        if network.expert_blocks:
            dense = [number for number in range(network.num_layers) if number not in network.expert_blocks]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def with_experts_instead_of_mlps(entries: Iterable[ConfigEntries]) -> tuple[ConfigEntries, ...]:
    """Return entries of a family that has experts in every block, and whose `intermediate_size` is their width."""
    result: list[ConfigEntries] = []
    for entry in entries:
        if getattr(entry, "field", None) == "mlp_width":
            result += [ExpertSize("intermediate_size", "expert_width"), _MLP_AS_WIDE_AS_EXPERTS]
        else:
            result.append(entry)
    return (*result, _ALL_BLOCKS_HAVE_EXPERTS)


def expert_tensors(module: str, *, up: str, gate: str, down: str) -> dict[str, TensorSource]:
    """Return the sources of a router and its experts.

    Args:
        module: Name of the module in a block, such as `mlp`.
        up: Name of the product that is multiplied by the gate.
        gate: Name of the product that the activation is applied to.
        down: Name of the last product.
    """
    prefix = f"{_BLOCK}{module}"
    expert = f"{prefix}.experts.{{e}}"
    return {
        "mlp.router": TensorSource((f"{prefix}.gate",)),
        "mlp.experts.dense_h_to_4h": TensorSource((f"{expert}.{up}", f"{expert}.{gate}"), layout="experts"),
        "mlp.experts.dense_4h_to_h": TensorSource((f"{expert}.{down}",), layout="experts"),
    }


def qwen_expert_entries(*, number: int, per_token: int, width: int, normalizes: bool) -> tuple[ConfigEntries, ...]:
    """Return the entries of Qwen's experts, with a model's defaults in transformers.

    Args:
        number: Number of experts.
        per_token: Number of experts of a token.
        width: Width of an expert.
        normalizes: Whether the weights of a token's experts add up to 1.
    """
    return (
        BlocksWithExperts(),
        SeveralExperts("num_experts", "num_experts", number),
        ExpertSize("num_experts_per_tok", "experts_per_token", per_token),
        ExpertSize("moe_intermediate_size", "expert_width", width),
        Switch("norm_topk_prob", "router_normalizes", default=normalizes),
    )


QWEN_EXPERTS = expert_tensors("mlp", up="up_proj", gate="gate_proj", down="down_proj")
"""Sources of a router and its experts by the names of Qwen's and OLMo's models."""
SHARED_EXPERT = {
    "mlp.shared_expert.dense_h_to_4h": TensorSource(
        (f"{_BLOCK}mlp.shared_expert.up_proj", f"{_BLOCK}mlp.shared_expert.gate_proj")
    ),
    "mlp.shared_expert.dense_4h_to_h": TensorSource((f"{_BLOCK}mlp.shared_expert.down_proj",)),
    "mlp.shared_expert_gate": TensorSource((f"{_BLOCK}mlp.shared_expert_gate",)),
}
"""Sources of Qwen2-MoE's shared expert."""
