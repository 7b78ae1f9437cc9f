"""Which pairs of features the trainings of `tests/distributed` hold, found by asking the tests for their plans.

    python -m tests.pairs_in_tests            writes tests/pairs_in_tests.tsv, which docs/combinations.md shows
    python -m tests.pairs_in_tests --check    compares the file with the tests; 1 if one no longer holds

Every test is called as pytest calls it, but `run_ranks` starts no process: it notes the plans that it is given, and
returns a value that equals everything. A pair is listed only if a test gives ranks a plan with both features and a
function that trains. A test may fail on such values after its first plans; then later ones are missing from the list.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

import pytest

from neox.config.neox_config import NeoXConfig
from neox.plan import RunPlan
from neox.plan.network.attention_config import asked_kinds
from tests.combinations import FEATURES, TESTED, all_pairs, read_tested
from tests.distributed import spawn

ROOT = Path(__file__).parents[1]

_SECONDS = 5
"""Time of a test, which makes plans and trains nothing."""
_OF_PROCESSES = (
    "background_saves",
    "checkpoint_faults",
    "failed_saves",
    "mirror_ranks",
    "own_runs",
    "resume_killed",
    "sharded_initialisation",
)
"""Tests of processes and files, which wait for them."""
ZERO = "zero_optimization.stage"


def _is(key: str, *values: Any) -> Callable[[RunPlan], bool]:
    return lambda plan: plan.config.value(key) in values


def _has(key: str) -> Callable[[RunPlan], bool]:
    return lambda plan: bool(plan.config.value(key))


def _zero(stage: int) -> Callable[[RunPlan], bool]:
    return lambda plan: plan.config.value(ZERO) == stage and plan.grid.dp_size > 1


def _adapts(*modules: str) -> Callable[[RunPlan], bool]:
    """Return whether a plan has adapters of one of these linear layers."""
    return lambda plan: (
        plan.config.training.lora is not None and not set(modules).isdisjoint(plan.config.training.lora.target)
    )


def _kind(*names: str) -> Callable[[RunPlan], bool]:
    return lambda plan: not set(names).isdisjoint(_kinds(plan.config))


def _kinds(config: NeoXConfig) -> set[str]:
    return set(asked_kinds(config))


TURNED_ON: Mapping[str, Callable[[RunPlan], bool]] = MappingProxyType(
    {
        "ZeRO 1": _zero(1),
        "ZeRO 2": _zero(2),
        "ZeRO 3": _zero(3),
        "pipeline stages": lambda plan: plan.grid.pp_size > 1,
        "interleaved stages": lambda plan: plan.grid.pp_size > 1 and _is("pipeline_schedule", "interleaved")(plan),
        "tensor ranks": lambda plan: plan.grid.tp_size > 1,
        "sequence parallelism": lambda plan: plan.grid.sequence_parallel,
        "context ranks": lambda plan: plan.grid.cp_size > 1 and plan.grid.cp_kind == "all_gather",
        "context ranks, by heads": lambda plan: plan.grid.cp_size > 1 and plan.grid.cp_kind == "ulysses",
        "experts": lambda plan: plan.architecture.num_experts > 1,
        "divided experts": lambda plan: plan.grid.ep_size > 1,
        "fp16": lambda plan: plan.precision == "fp16",
        "bf16": lambda plan: plan.precision == "bf16",
        "fp8": _is("fp8", "tensorwise"),
        "fp8, by rows": _is("fp8", "rowwise"),
        "bf16 states": lambda plan: plan.workload.bf16_states,
        "Muon": lambda plan: plan.config.optimizer.optimizer.name == "muon",
        "8-bit Adam": lambda plan: plan.config.optimizer.optimizer.name == "adam8bit",
        "offloaded states": lambda plan: plan.config.deepspeed.zero_optimization.offloads_optimizer,
        "full recomputation": lambda plan: (
            bool(plan.config.value("checkpoint_activations")) and not _is("recompute_granularity", "selective")(plan)
        ),
        "selective recomputation": _is("recompute_granularity", "selective"),
        "tiles of MLPs": _has("mlp_tile_size"),
        "compiled layers": _is("compile_layers", True),
        "determinism": _has("deterministic"),
        "EMA": _has("ema_decay"),
        "asynchronous saves": _has("async_save"),
        "rollback after spikes": _is("loss_spike_action", "rollback"),
        "LoRA of attention": _adapts("query_key_value", "key_value_up"),
        "LoRA of MLPs": _adapts("dense_h_to_4h"),
        "soft prompt": lambda plan: plan.architecture.soft_prompt_tokens > 0,
        "added tokens alone": _has("train_only_added_tokens"),
        "DPO": _is("train_impl", "dpo"),
        "KTO": _is("train_impl", "kto"),
        "reward model": _is("train_impl", "rm"),
        "masked language model": _is("objective", "masked_lm"),
        "distillation": _has("teacher_logits"),
        "multi-token prediction": lambda plan: plan.architecture.mtp_num_layers > 0,
        "packed documents": _has("reset_attention_mask"),
        "fill in the middle": _has("fim_rate"),
        "windows": lambda plan: (
            _kind("sliding_window")(plan) or (bool(plan.config.value("sliding_window_width")) and _kind("flash")(plan))
        ),
        "latent attention": _kind("latent"),
        "Mamba-2": _kind("mamba2", "mamba2_mlp"),
        "gMLP": _kind("gmlp"),
        "muP": _has("use_mup"),
    }
)
"""Whether a plan has a feature, by its name."""


class Anything:
    """A value that has every attribute, equals everything and is empty."""

    def _itself(self, *_: Any, **__: Any) -> Anything:
        return self

    def _yes(self, *_: Any) -> bool:
        return True

    __call__ = __getattr__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _itself
    __truediv__ = __rtruediv__ = __or__ = __and__ = __abs__ = __neg__ = _itself
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _yes
    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 1.0


def trains(function: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Return whether a function of the tests makes steps, by the names that it and those that it calls use."""
    code = getattr(function, "__code__", None)
    if code is None or function in seen or not function.__module__.startswith(("tests.", "benchmarks.")):
        return False
    names = set(_names_in(code))
    if names & {"train_batch", "fit", "pretrain"}:
        return True
    called = [function.__globals__[name] for name in names if name in function.__globals__]
    return any(trains(other, seen | {function}) for other in called)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes of a function's code, with those of functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def plans_in(value: Any) -> Iterator[RunPlan]:
    """Yield the plans in an argument of `run_ranks`."""
    if isinstance(value, RunPlan):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from plans_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from plans_in(item)


def _end(*_: Any) -> None:
    raise TimeoutError("waits for something that is not trained here")


class Recorder:
    """A pytest plugin that notes the pairs of features in the plans of each test.

    Attributes:
        found: Pair of names, in the order of the features -> the tests that train them together.
        slow: Tests with the mark `slow`.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[str]] = {}
        self.slow: set[str] = set()
        self._test = ""
        spawn.run_ranks = self._run_ranks
        pytest.approx = lambda *_, **__: Anything()  # type: ignore[assignment,return-value]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note which test runs, and let it end in time."""
        signal.signal(signal.SIGALRM, _end)
        signal.alarm(_SECONDS)
        self._test = item.nodeid
        if item.get_closest_marker("slow"):
            self.slow.add(item.nodeid)

    def pytest_runtest_teardown(self) -> None:
        """Stop the clock."""
        signal.alarm(0)

    def _run_ranks(self, world_size: int, function: Callable[..., Any], *args: Any, **_: Any) -> list[Any]:
        """Note the plans if they are trained; each rank answers with one value for each of them."""
        plans = list(plans_in(args))
        for plan in plans if trains(function) else []:
            on = [feature.name for feature in FEATURES if TURNED_ON[feature.name](plan)]
            for pair in combinations(on, 2):
                tests = self.found.setdefault(pair, [])
                if self._test not in tests:
                    tests.append(self._test)
        return [[Anything() for _ in plans] for _ in range(world_size)]

    def chosen(self) -> dict[tuple[str, str], str]:
        """Return one test for each pair that the planner allows: one that `make test` runs, if there is one."""
        works = {tuple(feature.name for feature in pair.features) for pair in all_pairs() if pair.plan is not None}
        chosen = {}
        for pair, tests in self.found.items():
            if pair in works:  # networks of two kinds of blocks can hold pairs that the table calls impossible
                chosen[pair] = min(tests, key=lambda test: (test in self.slow, test))
        return chosen


def recorded() -> Recorder:
    """Ask all tests."""
    recorder = Recorder()
    left_out = [f"--ignore={ROOT}/tests/distributed/test_{name}.py" for name in _OF_PROCESSES]
    pytest.main(
        [
            "-q",
            "--no-header",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "--disable-warnings",
            *left_out,
            str(ROOT / "tests/distributed"),
        ],
        plugins=[recorder],
    )
    return recorder


def main() -> int:
    """Write the list, or compare it. Return 1 if a test of the list does not train its pair."""
    recorder = recorded()
    if sys.argv[1:] == ["--check"]:
        tests_of = {frozenset(pair): tests for pair, tests in recorder.found.items()}
        wrong = 0
        for pair, test in read_tested(ROOT / TESTED).items():
            if test not in tests_of.get(pair, ()):
                print(f"{test} does not train {' with '.join(sorted(pair))}")
                wrong = 1
        return wrong
    chosen = recorder.chosen()
    order = [feature.name for feature in FEATURES]
    pairs = sorted(chosen, key=lambda pair: (order.index(pair[0]), order.index(pair[1])))
    lines = ["\t".join((*pair, chosen[pair])) for pair in pairs]
    (ROOT / TESTED).write_text("\n".join(lines) + "\n")
    print(f"wrote {TESTED}: {len(lines)} pairs")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
