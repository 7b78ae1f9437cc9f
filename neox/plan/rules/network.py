"""Rules of the network: shapes that divide, and choices that exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from neox.architecture import (
    ACTIVATIONS,
    ATTENTION,
    GATED_KINDS,
    rope_scaling_problem,
    settings_of,
    sparsity_of,
    sparsity_problem,
)
from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError
from neox.plan.architecture_keys import rotated_dimensions, size_of_head
from neox.plan.attention_config import FLASH, SLIDING_WINDOW, attention_kinds
from neox.plan.mlp_width import mlp_width
from neox.plan.rules.encoder import encoder_problems
from neox.plan.stages import partition_problem
from neox.problems import Problem

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


def network_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about the network that are broken."""
    model = config.model
    for key in REQUIRED:
        if getattr(model, key) is None:
            yield config.problem_about(f"`{key}` is missing: every model needs it", key)
    if model.bias_gelu_fusion and not model.activation.startswith("gelu"):
        yield config.problem(
            "bias_gelu_fusion", f"is for activation gelu, not {model.activation}; remove it", "activation"
        )
    if model.rope_scaling and (problem := rope_scaling_problem(model.rope_scaling)):
        yield config.problem("rope_scaling", problem)
    yield from _heads(config)
    yield from _mlp(config)
    yield from _divided_inputs(config)
    yield from _divided_tokens(config)
    yield from _combinations(config)
    yield from _lengths(config)
    yield from _stages(config)
    yield from _attention(config)
    yield from _soft_prompt(config)
    yield from encoder_problems(config)


def _heads(config: NeoXConfig) -> Iterator[Problem]:
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if heads is None:
        return
    if heads % config.parallelism.model_parallel_size:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        tp = "model_parallel_size"
        degree = config.describe_setting(tp)
        yield config.problem(
            "num_attention_heads", f"cannot be divided over {degree}; use a degree among {divisors}", tp
        )
    if model.num_kv_heads and heads % model.num_kv_heads:
        queries = config.describe_setting("num_attention_heads")
        yield config.problem("num_kv_heads", f"does not divide {queries}; use a divisor of that", "num_attention_heads")
    elif model.num_kv_heads and model.num_kv_heads % config.parallelism.model_parallel_size:
        degree = config.describe_setting("model_parallel_size")
        rule = f"cannot be divided over {degree}; use at most that many tensor ranks"
        yield config.problem("num_kv_heads", rule, "model_parallel_size")
    if hidden is None:
        return
    if hidden % heads and model.head_dim is None:
        lower, upper = hidden // heads * heads, -(-hidden // heads) * heads
        nearest = " or ".join(str(n) for n in (lower, upper) if n)
        yield config.problem(
            "hidden_size",
            f"is not a multiple of {config.describe_setting('num_attention_heads')}; the nearest multiples are "
            f"{nearest}; or give head_dim",
            "num_attention_heads",
            "head_dim",
        )
    elif model.pos_emb == "rotary":
        rotated = rotated_dimensions(model.pos_emb, model.rotary_pct, hidden, heads, model.head_dim)
        if rotated < 2 or rotated % 2:
            yield config.problem(
                "rotary_pct",
                f"rotates {rotated} of the {size_of_head(hidden, heads, model.head_dim)} dimensions of a head; it must "
                "be an even number of at least 2",
                "hidden_size",
                "num_attention_heads",
                "head_dim",
                "pos_emb",
            )


_WIDTH_KEYS = ("mlp_width", "intermediate_size", "expansion_factor", "mlp_multiple_of", "hidden_size", "activation")


def _mlp(config: NeoXConfig) -> Iterator[Problem]:
    model, degree = config.model, config.parallelism.model_parallel_size
    sizes = [key for key in ("intermediate_size", "expansion_factor") if getattr(model, key) is not None]
    if len(sizes) == 2:
        yield config.problem(
            sizes[1], f"and {config.describe_setting(sizes[0])} exclude each other; keep one", sizes[0]
        )
    if model.mlp_width is not None and (sizes or model.mlp_multiple_of is not None):
        key = [*sizes, "mlp_multiple_of"][0]
        other = config.describe_setting(key)
        yield config.problem("mlp_width", f"is the width itself and excludes {other}; keep one", key)
    if model.hidden_size is None or model.activation not in ACTIVATIONS:
        return
    factor = model.expansion_factor
    width = mlp_width(
        model.hidden_size, model.activation, model.intermediate_size, factor, model.mlp_multiple_of, model.mlp_width
    )
    if width % degree or not width:
        ranks = config.describe_setting("model_parallel_size")
        message = (
            f"the MLP's inner width is {width} (activation {model.activation}), which cannot be divided over {ranks}"
        )
        yield Problem((*_WIDTH_KEYS, "model_parallel_size"), f"{message}; give mlp_width")


def _divided_inputs(config: NeoXConfig) -> Iterator[Problem]:
    hidden, degree = config.model.hidden_size or 0, config.parallelism.model_parallel_size
    if config.training.partition_activations and hidden % degree:
        ranks = config.describe_setting("model_parallel_size")
        sizes = ("hidden_size", "model_parallel_size")
        yield config.problem(
            "partition_activations", f"divides vectors of {hidden} numbers over {ranks}; remove it", *sizes
        )


def _divided_tokens(config: NeoXConfig) -> Iterator[Problem]:
    key, degree = "sequence_parallel", config.parallelism.model_parallel_size
    if not config.parallelism.sequence_parallel or degree == 1:
        return
    ranks, length = config.describe_setting("model_parallel_size"), config.model.seq_length or 0
    if length % degree:
        nearest = " or ".join(str(n) for n in (length // degree * degree, -(-length // degree) * degree) if n)
        rule = f"cannot be divided over {ranks} ({key}); use {nearest}, or remove that"
        yield config.problem("seq_length", rule, "model_parallel_size", key)
    curriculum = config.schedule.curriculum_learning
    if curriculum is not None and curriculum.enabled:
        steps = curriculum.schedule_config
        by_steps = (curriculum.max_difficulty, steps.difficulty_step)
        lengths = steps.difficulty if curriculum.schedule_type == "fixed_discrete" else by_steps
        if uneven := [number for number in lengths if number and number % degree]:
            rule = f"needs lengths that divide over {ranks}; curriculum_learning has {uneven[0]}"
            yield config.problem(key, rule, "model_parallel_size", "curriculum_learning")
    if config.training.partition_activations:
        rule = f"has nothing to divide: {key} divides inputs; keep one of them"
        yield config.problem("partition_activations", rule, key)
    if config.model.soft_prompt_tuning is not None and config.model.soft_prompt_tuning.enabled:
        rule = "does not work with soft_prompt_tuning, whose vectors every rank holds; remove one"
        yield config.problem(key, rule, "soft_prompt_tuning")


def _combinations(config: NeoXConfig) -> Iterator[Problem]:
    """Yield choices that exclude each other."""
    model = config.model
    if model.norm_placement != "input" and model.gpt_j_residual:
        residual = config.describe_setting("gpt_j_residual")
        yield config.problem("norm_placement", f"does not exist with {residual}; remove one", "gpt_j_residual")
    if model.use_qk_layernorm and model.qk_norm != "none":
        other = config.describe_setting("qk_norm")
        yield config.problem("use_qk_layernorm", f"and {other} are two norms; keep one", "qk_norm")
    if model.use_qk_layernorm and model.norm.removeprefix("te_") not in ("layernorm", "rmsnorm"):
        norm = config.describe_setting("norm")
        rule = f"does not exist with {norm}; use norm layernorm or rmsnorm"
        yield config.problem("use_qk_layernorm", rule, "norm")


def _lengths(config: NeoXConfig) -> Iterator[Problem]:
    model = config.model
    if model.seq_length and model.max_position_embeddings and model.seq_length > model.max_position_embeddings:
        longest = config.describe_setting("max_position_embeddings")
        yield config.problem("seq_length", f"is longer than {longest}; raise the second", "max_position_embeddings")
    elif model.seq_length and model.pos_emb == "learned" and model.opt_pos_emb_offset:
        needed, rows = model.seq_length + model.opt_pos_emb_offset, model.max_position_embeddings or model.seq_length
        if needed > rows:
            yield config.problem(
                "opt_pos_emb_offset",
                f"and {config.describe_setting('seq_length')} need a table of {needed} rows; set "
                f"max_position_embeddings to at least {needed} (it is {rows})",
                "seq_length",
                "max_position_embeddings",
                "pos_emb",
            )
    if model.pos_emb == "rpe" and model.rpe_max_distance <= model.rpe_num_buckets // 2:
        exact = f"half of {config.describe_setting('rpe_num_buckets')}, which hold one distance each"
        yield config.problem("rpe_max_distance", f"must be above {exact}", "rpe_num_buckets", "pos_emb")
    if model.pos_emb == "sinusoidal" and (model.hidden_size or 0) % 2:
        yield config.problem("hidden_size", "is odd; `pos_emb: sinusoidal` needs as many sines as cosines", "pos_emb")


def _stages(config: NeoXConfig) -> Iterator[Problem]:
    layers, stages = config.model.num_layers, config.parallelism.pipe_parallel_size
    if layers is not None and stages > layers:
        depth = config.describe_setting("num_layers")
        yield config.problem("pipe_parallel_size", f"is more stages than {depth}; use at most {layers}", "num_layers")
    if problem := partition_problem(config.parallelism.pipe_partition_method):
        yield config.problem("pipe_partition_method", problem)
    asked = config.value("is_pipe_parallel")
    if asked is not None and bool(asked) != (stages >= 2) and not (asked and stages == 1):
        degree = config.describe_setting("pipe_parallel_size")
        rule = f"contradicts {degree}, from which it follows; remove it"
        yield config.problem("is_pipe_parallel", rule, "pipe_parallel_size")


def _attention(config: NeoXConfig) -> Iterator[Problem]:
    key = "attention_config"
    given = config.model.attention_config
    layers = config.model.num_layers
    if given is None or layers is None:
        return
    width = config.model.sliding_window_width
    try:
        kinds = attention_kinds(given, layers)
    except ConfigError as error:
        for problem in error.problems:
            yield config.problem_about(problem.message, key, "num_layers")
        return
    available = (*ATTENTION, *GATED_KINDS, FLASH)
    if unknown := sorted(set(kinds) - set(available)):
        known = " or ".join(available)
        yield config.problem_about(f"`{key}` asks for {', '.join(unknown)}: not implemented, use {known}", key)
    if SLIDING_WINDOW in kinds and width is None:
        message = f"`{key}` asks for {SLIDING_WINDOW}: give sliding_window_width"
        yield config.problem_about(message, key, "sliding_window_width")
    if width is not None and not {FLASH, SLIDING_WINDOW} & set(kinds):
        yield config.problem("sliding_window_width", f"applies to no block: none is {FLASH} or {SLIDING_WINDOW}", key)
    if len(kinds) != layers:
        wanted = f'[[["{kinds[0] if kinds else "global"}"], {layers}]]'
        message = f"`{key}` describes {len(kinds)} layers, but {config.describe_setting('num_layers')}; write {wanted}"
        yield config.problem_about(message, key, "num_layers")
    yield from _sparsity(config, set(kinds))
    if gated := sorted(set(kinds) & set(GATED_KINDS)):
        yield from _gates(config, " and ".join(gated))


def _gates(config: NeoXConfig, kinds: str) -> Iterator[Problem]:
    model = config.model
    if model.max_position_embeddings not in (None, model.seq_length):
        yield config.problem(
            "max_position_embeddings",
            f"must be {config.describe_setting('seq_length')}, over which {kinds} gate",
            "seq_length",
            "attention_config",
        )
    if ACTIVATIONS[model.activation].width_factor != 1:
        yield config.problem(
            "activation",
            f"halves its input, which {kinds} do themselves; use gelu or another plain one",
            "attention_config",
        )
    if config.optimizer.use_mup:
        yield config.problem("use_mup", f"does not work with attention kind {kinds}", "attention_config")


def _sparsity(config: NeoXConfig, kinds: set[str]) -> Iterator[Problem]:
    given = config.model.sparsity_config
    sparsity = sparsity_of(kinds, given.model_dump() if given else {})
    for kind in sorted({key.partition(".")[0] for key, _ in sparsity}):
        settings = settings_of(kind, sparsity)
        if problem := sparsity_problem(kind, settings):
            message = f"`sparsity_config` for {kind}: {problem}"
            yield config.problem_about(message, "sparsity_config", "attention_config")
        if (length := config.model.seq_length) and length % settings["block"]:
            rule = f"is not a multiple of sparsity_config.block, {settings['block']}"
            yield config.problem("seq_length", rule, "sparsity_config.block", "attention_config")


def _soft_prompt(config: NeoXConfig) -> Iterator[Problem]:
    prompt, key = config.model.soft_prompt_tuning, "soft_prompt_tuning"
    if prompt is None or not prompt.enabled:
        return
    if (stages := config.parallelism.pipe_parallel_size) > 1:
        message = f"`{key}` leaves most of {stages} pipeline stages nothing to train; use pipe_parallel_size 1"
        yield config.problem_about(message, key, "pipe_parallel_size")
    with suppress(ConfigError):  # reported with the attention
        kinds = attention_kinds(config.model.attention_config, config.model.num_layers or 0)
        if gated := sorted(set(kinds) & set(GATED_KINDS)):
            message = f"`{key}` does not work with {' and '.join(gated)}, which gate over seq_length positions"
            yield config.problem_about(message, key, "attention_config")
    if config.training.lora is not None:
        yield config.problem("lora", f"and {key} each train nothing else; remove one", key)
    if config.data.reset_attention_mask:
        yield config.problem(
            "reset_attention_mask", f"does not work with {key}: each document would need the prompt; remove one", key
        )
