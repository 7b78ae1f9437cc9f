"""Family of a target: networks of its shape with fewer parameters, and the batch and learning rate of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neox.architecture import LayerPlan
from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import RunPlan
from neox.plan.report.run_totals import run_totals
from tools.ladder.ladder_file import Ladder
from tools.ladder.schedule import scaled_schedule
from tools.sweep.sweep_file import SweepRun

_ABSOLUTE = ("kv_lora_rank", "q_lora_rank", "v_head_dim", "sliding_window_width", "no_rotary_layers")
"""Keys with numbers of the target's own that do not follow from its width and depth."""
_NEAR = 0.05
"""Relative difference of parameters up to which a network is what was asked for."""
_NEAR_BATCH = 0.1
"""Relative difference of samples up to which a batch is the rule's."""
_FARTHEST = 2.0
"""Ratio of parameters beyond which no network is near the size that was asked for."""
_SIZES_TO_TRY = 400
_NAMED_SIZES = 4
"""Possible sizes that an error names."""
_FEWEST_HEADS = 2
_SMALLEST_HEAD = 8
_ASPECT_WEIGHT = 0.5
"""Weight of a network's aspect (width over depth) next to its size: 10 % more parameters count as 20 % more width."""


@dataclass(frozen=True)
class Size:
    """A network of the family.

    Attributes:
        parameters: Parameters that each token is multiplied by: all but the embedding, whose rows are looked up.
        shape: Keys that make it.
        wanted: Parameters that the ladder file asks for; None if it has its `shapes`.
    """

    parameters: int
    shape: Mapping[str, Any]
    wanted: float | None = None


@dataclass(frozen=True)
class RunSize:
    """Place of a run in the ladder.

    Attributes:
        parameters: Parameters of its network, as for `Size`.
        tokens: Tokens that it trains.
        rate: Its learning rate.
        factor: The same as a multiple of the rule's.
    """

    parameters: int
    tokens: float
    rate: float
    factor: float

    @property
    def ratio(self) -> float:
        """Its tokens for each parameter."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class LadderRun:
    """A run of a ladder. Its plan says how many tokens it trains.

    Attributes:
        run: The run of the sweep.
        parameters: Parameters of its network, as for `Size`.
        ratio: Tokens for each parameter that it was asked to have.
        rate: Its learning rate.
        factor: The same as a multiple of the rule's.
    """

    run: SweepRun
    parameters: int
    ratio: float
    rate: float
    factor: float


class Family:
    """Networks of the shape of a target.

    Args:
        ladder: The ladder.
        target: The target's plan.
        networks: Keys and plan of each small network.

    Attributes:
        sizes: Networks of the small runs, ascending.
        parameters: Parameters of the target.
        tokens: Tokens of the target.
        rate: Learning rate of the target's configuration.

    Raises:
        ConfigError: The sizes are not those of a ladder, or the target has no learning rate to scale.
    """

    def __init__(self, ladder: Ladder, target: RunPlan, networks: Sequence[tuple[Mapping[str, Any], RunPlan]]) -> None:
        self._ladder = ladder
        self._target = target
        self.rate = float(target.config.value("optimizer.params.lr") or 0)
        if self.rate <= 0:
            raise ConfigError("the target's `optimizer.params.lr` is missing: the small runs scale it")
        self.parameters = multiplied_parameters(target.layers)
        self.tokens = float(run_totals(target).tokens or 0)
        self._exponent = ladder.exponent(use_mup=target.config.optimizer.use_mup)
        self.sizes: list[Size] = []
        wanted: Sequence[float | None] = ladder.sizes or [None] * len(networks)
        for (shape, plan), asked in zip(networks, wanted, strict=True):
            self.sizes.append(Size(multiplied_parameters(plan.layers), shape, asked))
        self.sizes.sort(key=lambda size: size.parameters)
        # All small runs have the same ranks and samples: those of the first stand for all.
        small = networks[0][1]
        self._ranks = small.grid.data_size
        self._sample_tokens = _mean_sample_tokens(small)
        counts = [size.parameters for size in self.sizes]
        if len({*counts}) < len(counts):
            raise ConfigError(f"several networks have the same number of parameters ({counts}): give others")
        if counts[-1] >= self.parameters:
            raise ConfigError(
                f"the largest size, {counts[-1]:,}, is not below the target's {self.parameters:,} parameters"
            )

    def size_notes(self) -> Iterator[str]:
        """Yield the sizes whose network has more or fewer parameters than the ladder file asks for."""
        for size in self.sizes:
            if size.wanted is not None and abs(size.parameters / size.wanted - 1) > _NEAR:
                network = f"num_layers {size.shape['num_layers']}, hidden_size {size.shape['hidden_size']}"
                yield f"{short(size.wanted)} of `sizes` is {short(size.parameters)}, the nearest network ({network})"

    def batch_notes(self) -> Iterator[str]:
        """Yield the sizes whose batch is not the one that the rule gives, because it is a multiple of the ranks."""
        found = []
        for size in self.sizes:
            asked = self._asked_samples(size.parameters)
            batch = self.batch(size.parameters)
            if abs(batch / asked - 1) > _NEAR_BATCH:
                found.append(f"{batch} instead of {asked:.3g} ({short(size.parameters)})")
        if not found:
            return
        rule = "the rule"
        if self._ladder.batch_size is not None:
            rule = "`batch_size`"
        if self._ranks == 1:
            yield f"samples of a step are whole: {', '.join(found)} by {rule}"
        else:
            yield (
                f"samples of a step are multiples of the {self._ranks} data-parallel ranks of a small run: "
                f"{', '.join(found)} by {rule}; fewer ranks for each run (`slots_per_run`) come nearer to it"
            )

    def rule_rate(self, parameters: float) -> float:
        """Return the learning rate that the rule gives for a number of parameters."""
        return self.rate * (parameters / self.parameters) ** self._exponent

    def batch(self, parameters: float) -> int:
        """Return the samples of a step: a multiple of the ranks that grows with the parameters, as the target's."""
        return self._ranks * max(1, round(self._asked_samples(parameters) / self._ranks))

    def _asked_samples(self, parameters: float) -> float:
        """Return the samples of a step that the ladder file asks for, before they are divided among ranks."""
        if self._ladder.batch_size is not None:
            return self._ladder.batch_size
        share: float = (parameters / self.parameters) ** self._ladder.batch_exponent
        return self._target.batch.train_batch_size * share

    def run(self, size: Size, ratio: float, factor: float) -> LadderRun:
        """Return a run of a size.

        Args:
            size: Its network.
            ratio: Tokens for each parameter.
            factor: Learning rate as a multiple of the rule's.
        """
        batch = self.batch(size.parameters)
        step_tokens = batch * self._sample_tokens
        steps = max(1, math.ceil(ratio * size.parameters / step_tokens))
        rate = float(f"{self.rule_rate(size.parameters) * factor:.4g}")
        micro = largest_divisor(batch // self._ranks, self._target.batch.train_micro_batch_size_per_gpu)
        # Each key here is one of `ladder_file`'s OWN_KEYS, which `set` may not change, or ADJUSTED_KEYS, which it may.
        values: dict[str, Any] = {
            **network_values(size.shape, self._target),
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": None,
            "train_iters": steps,
            "num_train_epochs": None,
            "exit_interval": None,
            "eval_interval": steps,
            "checkpoint_scale": "linear",
            "checkpoint_factor": max(1, steps // 4),
            "save_best": None,  # of one evaluation there is no best
            "hf_export": None,
            "optimizer.params.lr": rate,
            **scaled_schedule(self._target, steps),
        }
        smallest = self._target.config.schedule.min_lr
        if smallest:
            values["min_lr"] = float(f"{smallest * rate / self.rate:.4g}")
        # `eval_iters` counts batches, and theirs are smaller. In whole batches, every run evaluates as many samples as
        # the target; with `eval_order: fixed` the same ones, but for the last batch.
        samples = self._target.config.training.evaluation_samples(self._target.batch.train_batch_size)
        if samples:
            values["eval_iters"] = max(1, round(samples / batch))
        name = f"{short(size.parameters)},tokens={short(steps * step_tokens)},lr={rate:.4g}"
        run = SweepRun(name, {**values, **self._ladder.settings})
        return LadderRun(run, size.parameters, ratio, rate, factor)


def network_values(shape: Mapping[str, Any], target: RunPlan) -> dict[str, Any]:
    """Return the keys of a small network, trained with the target's number of steps, of a sample on each rank."""
    return {
        **shape,
        "pipe_parallel_size": 1,
        "model_parallel_size": 1,
        "planned_num_gpus": None,
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        **scaled_schedule(target, target.config.training.train_iters or 1),
    }


def shapes_of(ladder: Ladder, target: RunPlan) -> list[Mapping[str, Any]]:
    """Return the keys of each small network.

    Raises:
        ConfigError: The target has keys that do not follow from a size, or two networks are the same.
    """
    if ladder.shapes:
        for (number, shape), (other, others) in itertools.combinations(enumerate(ladder.shapes, start=1), 2):
            if shape == others:
                raise ConfigError(f"numbers {number} and {other} of `shapes` are the same network: {dict(shape)}")
        return list(ladder.shapes)
    given = [key for key in _ABSOLUTE if target.config.given(key)]
    if given:
        raise ConfigError(f"{', '.join(given)} of the target do not follow from a size: give `shapes`, not `sizes`")
    nearest = []
    for wanted in ladder.sizes:
        found = _nearest_network(target, wanted)
        nearest.append(found)
        if not 1 / _FARTHEST < found.parameters / wanted < _FARTHEST:
            raise ConfigError(
                f"{short(wanted)} of `sizes` is no network of the target's shape{_possible(target, wanted)}"
            )
    for (smaller, below), (larger, above) in itertools.pairwise(zip(ladder.sizes, nearest, strict=True)):
        if below.shape == above.shape:  # sizes are ascending, so equal ones are neighbours
            raise ConfigError(
                f"{short(smaller)} and {short(larger)} of `sizes` become the same network, which has whole layers and "
                f"heads of the target's width{_possible(target, larger)}"
            )
    return [found.shape for found in nearest]


def _possible(target: RunPlan, wanted: float) -> str:
    """Return the parameters of the smallest network of a target, and of those near a wanted one, in words."""
    count = multiplied_parameters(target.layers)
    possible: dict[float, None] = {}
    for share in range(_SIZES_TO_TRY + 1):
        possible[_nearest_network(target, count ** (share / _SIZES_TO_TRY)).parameters] = None
    smallest = min(possible)
    near = sorted(sorted(possible, key=lambda size: abs(math.log(size / wanted)))[:_NAMED_SIZES])
    return (
        f": the smallest one has about {short(smallest)} parameters, the nearest ones {', '.join(map(short, near))}. "
        "Give such `sizes`, or `shapes`"
    )


def multiplied_parameters(layers: LayerPlan) -> int:
    """Return the parameters that each token is multiplied by: the blocks, the norms and the head, tied or not."""
    count = sum(layer.active_numel for layer in layers if layer.index > 0)
    if not layers.head.parameters:
        count += layers.word_embeddings.numel
    return count


def _mean_sample_tokens(plan: RunPlan) -> float:
    """Return the mean tokens of a sample over a run, whose stages may have lengths of their own."""
    steps = plan.config.training.train_iters or 0
    return (run_totals(plan).tokens or 0) / plan.batch_schedule.samples(steps)


@dataclass(frozen=True)
class _Nearest:
    """A network near a number of parameters.

    Attributes:
        parameters: Its parameters without the embedding, by the matrices alone: about those of its plan.
        shape: Keys that make it.
    """

    parameters: float
    shape: dict[str, Any]


def shape_of(target: RunPlan, wanted: float) -> dict[str, Any]:
    """Return the keys of the network nearest to a number of parameters and to the target's aspect.

    Args:
        target: The target's plan.
        wanted: Parameters, without the embedding.
    """
    return _nearest_network(target, wanted).shape


def _nearest_network(target: RunPlan, wanted: float) -> _Nearest:
    """Return the network nearest to a number of parameters and to the target's aspect.

    Depth and width shrink together, as far as whole layers and heads allow. Heads keep their width, or half of it and
    so on if fewer than two would be left; the ratios of heads that share keys, and of the MLP's width, stay.

    Args:
        target: The target's plan.
        wanted: Parameters, without the embedding.
    """
    config = target.config
    depth = config.model.num_layers or 1
    width = config.model.hidden_size or 1
    heads = config.model.num_attention_heads or 1
    head_parameters = target.padded_vocab_size * width
    block_parameters = multiplied_parameters(target.layers) - head_parameters
    best: tuple[float, float, int, int, int] | None = None
    for layers, head_size, count in _candidates(depth, width, heads):
        scale = count * head_size / width
        parameters = block_parameters * layers / depth * scale**2 + head_parameters * scale
        aspect = scale * depth / layers
        distance = abs(math.log(parameters / wanted)) + _ASPECT_WEIGHT * abs(math.log(aspect))
        if best is None or distance < best[0]:
            best = (distance, parameters, layers, head_size, count)
    assert best is not None
    _, parameters, layers, head_size, count = best
    shape: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": count * head_size,
        "num_attention_heads": count,
        "attention_config": _attention(config),
    }
    if config.model.num_kv_heads:
        shape["num_kv_heads"] = max(1, count * config.model.num_kv_heads // heads)
    if config.model.head_dim is not None:
        shape["head_dim"] = max(_SMALLEST_HEAD, config.model.head_dim * head_size * heads // width)
    for key in ("intermediate_size", "mlp_width"):
        given = config.value(key)
        if config.given(key) and given is not None:
            shape[key] = round(given * count * head_size / width)
    return _Nearest(parameters, {key: value for key, value in shape.items() if value is not None})


def _candidates(depth: int, width: int, heads: int) -> Iterator[tuple[int, int, int]]:
    """Yield numbers of layers, widths of a head, and numbers of heads that a small network may have."""
    head_size = width // heads
    sizes = [head_size]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= _SMALLEST_HEAD:
        sizes.append(sizes[-1] // 2)
    for layers in range(1, depth + 1):
        for size in sizes:
            ideal = width * layers / depth / size
            if ideal < _FEWEST_HEADS and size != sizes[-1]:
                continue
            nearest = max(_FEWEST_HEADS, round(ideal))
            for count in range(max(_FEWEST_HEADS, nearest - 2), nearest + 3):
                yield layers, size, count
            break  # wider heads, which are the target's, come first


def _attention(config: NeoXConfig) -> list[Any] | None:
    """Return `attention_config` for any number of layers.

    Raises:
        ConfigError: It has several patterns, so that no rule gives those of fewer layers.
    """
    given: Sequence[Any] | None = config.model.attention_config
    if given is None:
        return None
    if len(given) == 1 and isinstance(given[0], Sequence) and not isinstance(given[0], str):
        return [[list(given[0][0]), "all"]]
    kinds = {*map(str, given)}
    if len(kinds) == 1:
        return [[[str(given[0])], "all"]]
    raise ConfigError("the target's attention_config has several patterns: give `shapes`, not `sizes`")


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    for divisor in range(min(number, most), 0, -1):
        if number % divisor == 0:
            return divisor
    return 1


def short(number: float) -> str:
    """Return a number with a unit: `1.3B`, `70M`, `2.5k`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
