"""Which features work together, asked of the rules: every pair is merged and planned as a user's configuration is.

    python -m tests.combinations       writes docs/combinations.md

A feature stands here for the fewest keys that turn it on. Two with different values of one key are alternatives. A pair
is refused if the planner refuses it, for the reason that a user would read. Pairs that a test trains are found by
`python -m tests.pairs_in_tests`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neox.config import NeoXConfig
from neox.config.neox_config import yaml_text
from neox.errors import ConfigError
from neox.plan.resolve import resolve
from neox.plan.run_plan import RunPlan

PAGE = Path("docs/combinations.md")

TESTED = Path("tests/pairs_in_tests.tsv")
"""Pairs that tests train, with a test of each; written by `python -m tests.pairs_in_tests`."""

VOCABULARY = 60
"""Ids of the tokenizer of all plans."""

NETWORK: Mapping[str, Any] = MappingProxyType(
    {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "pos_emb": "rotary",
        "norm": "rmsnorm",
        "use_bias_in_attn_linear": False,
        "make_vocab_size_divisible_by": 16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.005}},
        "train_iters": 10,
        "save": "save",
        "checkpoint_factor": 5,
    }
)
"""A small network and its training, which every feature changes."""

_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
_PAIRS = {"pos_train_data_paths": ["chosen"], "neg_train_data_paths": ["rejected"]}
_JUDGED = {"train_data_paths": ["answers"], "train_label_data_paths": ["labels"], "train_reward_data_paths": ["judged"]}
_EXPERTS = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "seq_aux_loss",
}


@dataclass(frozen=True)
class FeatureKeys:
    """The fewest keys that turn a feature on.

    Attributes:
        name: What users call it.
        keys: Its keys.
        needs: Keys that it needs at some value, with one that will do. Those of the other feature of a pair win.
        data_ranks: Number of data ranks with which it does something.
    """

    name: str
    keys: Mapping[str, Any]
    needs: Mapping[str, Any] = field(default_factory=dict)
    data_ranks: int = 1


def _blocks(name: str, kind: str, **keys: Any) -> FeatureKeys:
    """Return the feature of a kind of block."""
    return FeatureKeys(name, {"attention_config": [kind] * 4, **keys})


def _zero(stage: int) -> FeatureKeys:
    return FeatureKeys(f"ZeRO {stage}", {"zero_optimization": {"stage": stage}}, data_ranks=2)


def _lora(name: str, *targets: str) -> FeatureKeys:
    return FeatureKeys(f"LoRA of {name}", {"lora": {"r": 4, "target": list(targets)}})


FEATURES = (
    # How a model is divided.
    _zero(1),
    _zero(2),
    _zero(3),
    FeatureKeys("pipeline stages", {"pipe_parallel_size": 2}),
    FeatureKeys("interleaved stages", {"pipeline_schedule": "interleaved"}, {"pipe_parallel_size": 2}),
    FeatureKeys("tensor ranks", {"model_parallel_size": 2}),
    FeatureKeys("sequence parallelism", {"sequence_parallel": True}, {"model_parallel_size": 2}),
    FeatureKeys("context ranks", {"context_parallel_size": 2}),
    FeatureKeys("context ranks, by heads", {"context_parallel_kind": "ulysses"}, {"context_parallel_size": 2}),
    FeatureKeys("experts", _EXPERTS),
    FeatureKeys("divided experts", {"expert_model_parallel_size": 2}, _EXPERTS, data_ranks=2),
    # Number formats, optimizers, memory.
    FeatureKeys("fp16", {"precision": "fp16"}),
    FeatureKeys("bf16", {"precision": "bfloat16"}),
    FeatureKeys("fp8", {"fp8": "tensorwise"}, {"precision": "bfloat16"}),
    FeatureKeys("fp8, by rows", {"fp8": "rowwise"}, {"precision": "bfloat16"}),
    FeatureKeys(
        "bf16 states",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {"precision": "bfloat16", "zero_optimization": {"stage": 1}},
        data_ranks=2,
    ),
    FeatureKeys("Muon", {"optimizer": {"type": "Muon", "params": {"lr": 0.005}}}),
    FeatureKeys("8-bit Adam", {"optimizer": {"type": "Adam8bit", "params": {"lr": 0.005}}}),
    FeatureKeys(
        "offloaded states",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 1}},
        data_ranks=2,
    ),
    FeatureKeys("full recomputation", {"checkpoint_activations": True}),
    FeatureKeys("selective recomputation", {"recompute_granularity": "selective"}, {"checkpoint_activations": True}),
    FeatureKeys("tiles of MLPs", {"mlp_tile_size": 8}),
    FeatureKeys("compiled layers", {"compile_layers": True}),
    FeatureKeys("determinism", {"deterministic": True}),
    # What takes part in a training.
    FeatureKeys("EMA", {"ema_decay": 0.9}),
    FeatureKeys("asynchronous saves", {"async_save": True}),
    FeatureKeys("rollback after spikes", {"loss_spike_action": "rollback"}),
    # What is learned, and of which data.
    _lora("attention", "query_key_value", "dense"),
    _lora("MLPs", "dense_h_to_4h", "dense_4h_to_h"),
    FeatureKeys("soft prompt", {"soft_prompt_tuning": {"enabled": True, "num_tokens": 4}}),
    FeatureKeys("added tokens alone", {"train_only_added_tokens": True, "added_tokens": ["<call>"]}),
    FeatureKeys("DPO", {"train_impl": "dpo", **_PAIRS}),
    FeatureKeys("KTO", {"train_impl": "kto", **_JUDGED}),
    FeatureKeys("reward model", {"train_impl": "rm", **_PAIRS}),
    FeatureKeys("masked language model", {"objective": "masked_lm"}),
    FeatureKeys("distillation", {"teacher_logits": "teacher"}),
    FeatureKeys("multi-token prediction", {"mtp_num_layers": 1}),
    FeatureKeys("packed documents", {"reset_attention_mask": True}),
    FeatureKeys("fill in the middle", {"fim_rate": 0.5}),
    # Kinds of blocks; two of them alternate.
    _blocks("windows", "sliding_window", sliding_window_width=8),
    _blocks("latent attention", "latent", **_LATENT),
    _blocks("Mamba-2", "mamba2_mlp", mamba_head_dim=8, mamba_state_dim=16),
    _blocks("gMLP", "gmlp"),
    FeatureKeys("muP", {"use_mup": True, "mup_base_hidden_size": 32}),
)

IMPOSSIBLE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("two formats of the same weights", ("fp16",), ("bf16 states",)),
    ("each trains nothing else", ("LoRA of attention", "LoRA of MLPs", "soft prompt"), ("added tokens alone",)),
    ("each trains nothing else", ("LoRA of attention", "LoRA of MLPs"), ("soft prompt",)),
    ("Muon is for matrices of blocks, and none is trained", ("Muon",), ("soft prompt", "added tokens alone")),
    ("a recurrence sees earlier tokens only", ("Mamba-2",), ("masked language model",)),
    ("its loss is the probability of a continuation", ("DPO", "KTO"), ("masked language model",)),
    ("it prepares texts for prediction from left to right", ("fill in the middle",), ("masked language model",)),
    ("it has no next tokens", ("multi-token prediction",), ("masked language model",)),
    ("it scores answers, and predicts no tokens", ("multi-token prediction",), ("reward model",)),
    ("an answer in another order is not the answer", ("DPO", "KTO", "reward model"), ("fill in the middle",)),
    ("it scores answers, and predicts no tokens", ("reward model",), ("distillation",)),
    ("a gate of gMLP is over all tokens", ("tiles of MLPs",), ("gMLP",)),
    ("gMLP has neither attention nor an MLP", ("LoRA of attention", "LoRA of MLPs", "experts"), ("gMLP",)),
    ("gMLP has neither attention nor an MLP", ("divided experts", "selective recomputation"), ("gMLP",)),
    ("Mamba-2 has no attention", ("LoRA of attention", "selective recomputation"), ("Mamba-2",)),
)
"""Why no implementation could offer a pair; and of which of some features with which of others that is said."""


class Verdict(Enum):
    """What becomes of a pair. The value is its sign in the table."""

    TESTED = "+"
    WORKS = "o"
    REFUSED = "x"
    IMPOSSIBLE = "-"
    ALTERNATIVES = "="


@dataclass(frozen=True)
class Pair:
    """Two features and what the rules say.

    Attributes:
        features: The features.
        verdict: What becomes of them together.
        reason: Why not, or the test; empty if they work.
        plan: The plan, if they work.
    """

    features: tuple[FeatureKeys, FeatureKeys]
    verdict: Verdict
    reason: str = ""
    plan: RunPlan | None = None


def pair_of(one: FeatureKeys, other: FeatureKeys) -> Pair:
    """Plan a training with two features."""
    features = (one, other)
    if are_alternatives(one.keys, other.keys):
        return Pair(features, Verdict.ALTERNATIVES)
    try:
        plan = plan_of(features)
    except ConfigError as error:
        if reason := _impossibility({one.name, other.name}):
            return Pair(features, Verdict.IMPOSSIBLE, reason)
        return Pair(features, Verdict.REFUSED, "; ".join(problem.message for problem in error.problems))
    return Pair(features, Verdict.WORKS, plan=plan)


def all_pairs() -> list[Pair]:
    """Return the verdict on every pair, in the order of the features."""
    return [pair_of(one, other) for one, other in combinations(FEATURES, 2)]


def read_tested(file: Path) -> dict[frozenset[str], str]:
    """Return the tests in a list of pairs: names of two features and a test in each line, separated by tabs."""
    tests = {}
    for line in file.read_text().splitlines():
        one, other, test = line.split("\t")
        tests[frozenset((one, other))] = test
    return tests


def plan_of(features: Iterable[FeatureKeys]) -> RunPlan:
    """Plan a training with some features.

    Raises:
        ConfigError: They do not work together.
    """
    keys: dict[str, Any] = dict(NETWORK)
    for feature in features:
        keys = _over(keys, feature.needs)
    for feature in features:
        keys = _over(keys, feature.keys)
    kinds = [feature.keys["attention_config"] for feature in features if "attention_config" in feature.keys]
    if len(kinds) == 2:
        keys["attention_config"] = [kinds[number % 2][number] for number in range(4)]
    ranks = max(feature.data_ranks for feature in features)
    for degree in ("pipe_parallel_size", "model_parallel_size", "context_parallel_size"):
        ranks *= keys.get(degree, 1)
    return resolve(NeoXConfig.from_flat(keys), ranks, VOCABULARY)


def _impossibility(names: set[str]) -> str:
    """Return why nothing could offer two features together; empty if something could."""
    for reason, some, others in IMPOSSIBLE:
        for pair in product(some, others):
            if set(pair) == names:
                return reason
    return ""


def are_alternatives(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether keys have different values for one key. Kinds of blocks have not: they alternate."""
    for key in one.keys() & other.keys():
        if key == "attention_config":
            continue
        if isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            if are_alternatives(one[key], other[key]):
                return True
        elif one[key] != other[key]:
            return True
    return False


def _over(keys: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with others, which win, laid over them; blocks are laid over one another."""
    result = dict(keys)
    for key, value in more.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = _over(below, value)
        result[key] = value
    return result


_HEAD = """\
# Which features work together

Generated by `python -m tests.combinations` from the rules of the planner; do not edit.

Every pair of the features below is put into one configuration of a small network, and planned as `deepy.py --dry-run`
plans it. A sign says what becomes of the pair:

| sign | pairs | meaning |
|---|---|---|
"""
_MEANINGS = {
    Verdict.TESTED: "works, and a test of `tests/distributed` trains a network with both; it is named below",
    Verdict.WORKS: "works by the rules; no test of `tests/distributed` trains both together",
    Verdict.REFUSED: "refused by name; the reason is below",
    Verdict.IMPOSSIBLE: "refused, and impossible in itself",
    Verdict.ALTERNATIVES: "alternatives: two values of one key",
}


def page(pairs: Sequence[Pair], tests: Mapping[frozenset[str], str]) -> str:
    """Return the Markdown page of all pairs.

    Args:
        pairs: The pairs.
        tests: Test of each pair that is trained, by the names of its features.
    """
    pairs = [_with_test(pair, tests) for pair in pairs]
    counts = Counter(pair.verdict for pair in pairs)
    lines = [_HEAD.rstrip()]
    lines += [f"| `{verdict.value}` | {counts[verdict]} | {meaning} |" for verdict, meaning in _MEANINGS.items()]
    lines += ["", f"Together {len(pairs)} pairs of {len(FEATURES)} features.", "", "```", *_matrix(pairs), "```", ""]
    lines += ["## Refused", "", "With the words of the planner, which also say what to do.", ""]
    lines += [*_reasons(pairs, Verdict.REFUSED), ""]
    lines += ["## Impossible", "", *_reasons(pairs, Verdict.IMPOSSIBLE), ""]
    lines += [
        "## Tested where",
        "",
        "A test of each pair, found in the plans that the tests train (`python -m tests.pairs_in_tests`).",
        "",
    ]
    lines += [*_reasons(pairs, Verdict.TESTED), ""]
    lines += [
        "## The features",
        "",
        "Keys in parentheses are needed at some value, and yield to the other feature.",
        "",
    ]
    lines += ["| feature | keys |", "|---|---|"]
    for feature in FEATURES:
        keys = _in_yaml(feature.keys)
        if feature.needs:
            keys += f" ({_in_yaml(feature.needs)})"
        lines.append(f"| {feature.name} | {keys} |")
    return "\n".join(lines) + "\n"


def _with_test(pair: Pair, tests: Mapping[frozenset[str], str]) -> Pair:
    """Return a pair with the test that trains it, if it works and there is one."""
    test = tests.get(frozenset(feature.name for feature in pair.features))
    if pair.verdict is not Verdict.WORKS or test is None:
        return pair
    return Pair(pair.features, Verdict.TESTED, f"`{test}`", pair.plan)


def _matrix(pairs: Iterable[Pair]) -> Iterator[str]:
    """Yield the lines of a triangle: a row for each feature, and a column for each of those before it.

          1  2  3
    1 a   .
    2 b   +  .
    3 c   +  x  .
    """
    signs = {frozenset(feature.name for feature in pair.features): pair.verdict.value for pair in pairs}
    width = max(len(feature.name) for feature in FEATURES)
    yield " " * (width + 3) + "".join(f"{number:3}" for number in range(1, len(FEATURES) + 1))
    for row, feature in enumerate(FEATURES):
        cells = [signs[frozenset((feature.name, other.name))] for other in FEATURES[:row]]
        yield f"{row + 1:2} {feature.name:{width}}" + "".join(f"{cell:>3}" for cell in (*cells, "."))


def _reasons(pairs: Iterable[Pair], verdict: Verdict) -> Iterator[str]:
    """Yield an item for each reason, with the pairs that it is of."""
    by_reason: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.verdict is verdict:
            by_reason.setdefault(pair.reason, []).append(" with ".join(feature.name for feature in pair.features))
    for reason, names in by_reason.items():
        yield f"- **{'; '.join(names)}**: {reason}"


def _in_yaml(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}: {yaml_text(value)}`" for key, value in keys.items())


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(all_pairs(), read_tested(TESTED)))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
