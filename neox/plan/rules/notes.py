"""Notes on settings that change nothing, or less than they are meant to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.architecture import ACTIVATIONS
from neox.config.gpt_neox_dates import CHANGED_DEFAULTS, VERSION, keys_since, latest_date, used_defaults
from neox.config.keys import ALIASES, NEOX_KEYS
from neox.config.neox_config import NeoXConfig
from neox.config.sections.optimizer_kind import DecayingParams
from neox.features.on_paper import PAPERS
from neox.plan.feature import NO_SAVES
from neox.plan.network.attention_config import asked_kinds, attention_impls, described_kinds, only_recurrent
from neox.plan.network.mlp_width import MLP_SIZES, mlp_width
from neox.plan.rules.fields import idle_notes
from neox.plan.rules.preferences import dropout_notes
from neox.plan.rules.schedule import SCHEDULE_KEYS
from neox.problems import Note


def notes_without_effect(config: NeoXConfig) -> list[Note]:
    """Return a note for each given key that changes nothing here, or less than it is meant to."""
    return [
        *_unsupported_notes(config),
        *_renamed_notes(config),
        *idle_notes(config),
        *_optimizer_notes(config),
        *_schedule_notes(config),
        *_decay_notes(config),
        *_save_notes(config),
        *_recovery_notes(config),
        *_attention_notes(config),
        *_rotary_notes(config),
        *_heads_notes(config),
        *_width_notes(config),
        *_date_notes(config),
        *_parallel_notes(config),
        *_evaluation_notes(config),
        *dropout_notes(config),
        *_replacement_notes(config),
        *_feature_notes(config),
    ]


def _unsupported_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield given keys of gpt-neox and DeepSpeed that are `dormant` or have `no effect`."""
    for name, key in config.unsupported():
        if key.status == "refused":
            continue
        reason = key.reason
        if key.status == "dormant":
            reason = f"it is {key.reason}, which is off"
        yield Note((name,), f"{config.describe_setting(name)} changes nothing: {reason}")


def _renamed_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield given keys of ours that have another name by now."""
    for name, alias in ALIASES.items():
        if alias.renamed_in is not None and config.given(name):
            since = f"since version {alias.renamed_in}; the next version refuses the old name"
            yield Note((name,), f"`{name}` is called `{alias.target}` {since}")


def _evaluation_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield evaluation keys that are given although the run has no data for evaluations, and data that is not read."""
    data = config.data
    if data.data_path is not None and isinstance(data.valid_data_paths, tuple):
        reason = "has no effect: with data_path its own part (`split`) and sets that have names are evaluated"
        yield Note(("valid_data_paths",), f"{config.describe_setting('valid_data_paths')} {reason}")
    if data.train_data_paths is None or data.valid_data_paths or config.training.eval_iters == 0:
        return
    if config.preferences.on_preferences:
        return
    for key in ("eval_iters", "eval_interval", "eval_at_start", "eval_ema"):
        if config.given(key) and config.value(key):
            reason = "changes nothing: without valid_data_paths nothing is evaluated"
            yield Note((key, "valid_data_paths"), f"{config.describe_setting(key)} {reason}")


def _optimizer_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield weight decay, and a schedule of betas, that the optimizer does not have."""
    params = config.optimizer.optimizer.params
    kind = config.describe_setting("optimizer.type")
    if config.given("weight_decay") and not isinstance(params, DecayingParams):
        decay = config.describe_setting("weight_decay")
        message = f"{decay} changes nothing with {kind}, which has none, as in gpt-neox"
        yield Note(("weight_decay", "optimizer.type"), message)
    scheduler = config.schedule.scheduler
    cycles = scheduler is not None and scheduler.type == "OneCycle" and scheduler.params.cycle_momentum
    if cycles and not config.optimizer.optimizer.kind.cycled_betas:
        key = "scheduler.params.cycle_momentum"
        momentum = config.describe_setting(key)
        message = (
            f"{momentum} changes nothing with {kind}, which has no betas to cycle; only its learning rate is cycled"
        )
        yield Note((key, "optimizer.type"), message)


def _decay_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield a decay of the learning rate that ends before the run does."""
    schedule = config.schedule
    train_iters = config.training.train_iters
    if schedule.scheduler is not None or schedule.lr_decay_style == "constant":
        return
    if train_iters is None or schedule.lr_decay_iters is None or schedule.lr_decay_iters >= train_iters:
        return
    message = (
        f"{config.describe_setting('lr_decay_iters')} is shorter than {config.describe_setting('train_iters')}: the "
        f"last {train_iters - schedule.lr_decay_iters:,} steps have the lowest learning rate, {schedule.min_lr:g}"
    )
    yield Note(("lr_decay_iters", "train_iters"), message)


def _schedule_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield the keys of the learning rate that `scheduler` or lr_warmup_iters replaces."""
    given = [key for key in SCHEDULE_KEYS if config.given(key)]
    if config.schedule.scheduler is None:
        is_kept = config.source("lr_warmup_iters").decided  # another note says so
        if config.schedule.lr_warmup_iters is not None and config.given("warmup") and not is_kept:
            steps = config.describe_setting("lr_warmup_iters")
            message = f"{config.describe_setting('warmup')} changes nothing: {steps} gives the warm-up"
            yield Note(("warmup", "lr_warmup_iters"), message)
        return
    if not given:
        return
    keys = ", ".join(map(config.describe_setting, given))
    verb = "changes" if len(given) == 1 else "change"
    yield Note((*given, "scheduler"), f"{keys} {verb} nothing: `scheduler` sets the learning rate")


def _save_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield keys of checkpoints without effect."""
    keys = config.checkpoint
    last = config.training.train_iters
    if keys.save is None and (keys.checkpoint_factor is not None or keys.extra_save_iters):
        message = "no checkpoint is written: `save` is not set, though checkpoint_factor or extra_save_iters is"
        yield Note(("save", "checkpoint_factor", "extra_save_iters"), message)
    if last is None:
        return
    late = [iteration for iteration in keys.extra_save_iters or () if iteration > last]
    if late:
        shown = config.describe_setting("extra_save_iters", late)
        yield Note(("extra_save_iters",), f"{shown} come after the last iteration, {last}")


def _recovery_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield the keys of restarts and rollbacks if no checkpoint is saved between the first and the last step."""
    last = config.training.train_iters
    keys = config.checkpoint
    if keys.save is None or last is None:
        return
    if any(0 < step < last for step in keys.save_iterations(last)):
        return
    if config.healing.max_restarts:
        restarts = config.describe_setting("max_restarts")
        message = f"{restarts} repeats the whole run after each failure, because {NO_SAVES}"
        yield Note(("max_restarts", "checkpoint_factor"), message)
    for paper in PAPERS:
        yield from paper.notes_without_saves(config)


def _feature_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield the notes of features."""
    for paper in PAPERS:
        yield from paper.notes(config)


def _replacement_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield a note for each pair of files about the keys that the later file replaces."""
    keys_of_files: dict[tuple[str, str], list[str]] = {}
    for key, source in sorted(config.sources().items()):
        if source.replaces is not None and not source.decided and config.given(key):
            keys_of_files.setdefault((source.file, source.replaces.file), []).append(key)
    for (later, earlier), keys in keys_of_files.items():
        listed = ", ".join(f"`{key}`" for key in keys)
        yield Note(tuple(keys), f"{later} replaces {listed} of {earlier}")
        for key in keys:
            dropped = config.source(key).dropped
            if dropped:
                settings = ", ".join(f"`{setting}`" for setting in dropped)
                advice = f"repeat them, or set single ones (`--set {key}.NAME=VALUE`)"
                yield Note((key,), f"{later} replaces all of `{key}`, which drops {settings} of {earlier}; {advice}")


def _attention_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield that `attention_config` describes more blocks than there are, or leaves nothing to recompute."""
    layers = config.model.num_layers or 0
    described = len(described_kinds(config.model.attention_config, layers))
    if described > layers:
        key = "attention_config"
        yield Note((key,), f"{config.describe_setting(key)} describes {described} layers: the first {layers} are used")
    training = config.training
    recomputes_scores = training.checkpoint_activations and training.normalized_granularity == "core_attn"
    if recomputes_scores and config.model.pos_emb != "rpe" and set(attention_impls(config)) == {"flash"}:
        key = "recompute_granularity"
        why = "flash attention, which every layer has, keeps no scores to release"
        yield Note((key,), f"{config.describe_setting(key)} changes nothing: {why}")


def _rotary_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield rotary positions that no block applies."""
    kinds = asked_kinds(config)
    has_attention = any(kind.attention is not None for kind in kinds.values())
    if kinds and not has_attention and config.given("pos_emb") and config.model.pos_emb == "rotary":
        reason = f"changes nothing: blocks {' and '.join(kinds)} have no queries and keys to rotate"
        yield Note(("pos_emb", "attention_config"), f"{config.describe_setting('pos_emb')} {reason}")


def _heads_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield heads of attention in a network without any, which gpt-neox's files of Mamba have to give."""
    key = "num_attention_heads"
    kinds = asked_kinds(config)
    if only_recurrent(config) and config.given(key) and not any(key in kind.uses for kind in kinds.values()):
        reason = f"changes nothing: blocks {' and '.join(kinds)} have no attention"
        yield Note((key, "attention_config"), f"{config.describe_setting(key)} {reason}")


def _width_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield that `intermediate_size` of a gated MLP is not the width that other systems call so."""
    model = config.model
    key = "intermediate_size"
    size = model.intermediate_size
    if size is None or model.mlp_width or model.hidden_size is None:
        return
    if ACTIVATIONS[model.activation].width_factor != 2:
        return
    width = mlp_width(
        model.hidden_size, model.activation, size, model.expansion_factor, model.mlp_multiple_of, model.mlp_width
    )
    meaning = f"is gpt-neox's width, of which each half of a gated MLP has a third: {width}"
    way_out = f"`mlp_width: {size}` means what Hugging Face and litgpt call intermediate_size"
    yield Note((key, "activation"), f"{config.describe_setting(key)} {meaning}; {way_out}")


def _date_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield what is read in one of several ways because nothing tells which gpt-neox the file is of."""
    given = config.to_flat()
    model = config.model
    if VERSION in given:
        return
    latest = latest_date(given)
    if model.norm == "rmsnorm_v2.0" and latest is not None:
        message = (
            f"`norm: rmsnorm` adds its epsilon outside of the root, as gpt-neox did on {latest}; a key of then is given"
        )
        yield Note(("norm", VERSION), message)
    is_gpt_neox = all(key in NEOX_KEYS for key in given)
    if model.norm == "rmsnorm" and config.checkpoint.load is not None and is_gpt_neox and latest is None:
        message = (
            f"{config.describe_setting('norm')} adds its epsilon inside the root, as gpt-neox since 9 May 2025; for a "
            f"checkpoint of an older gpt-neox give its date ({VERSION}), or norm: rmsnorm_v2.0"
        )
        yield Note(("norm", VERSION), message)
    if model.activation == "geglu" and model.hidden_size and not any(map(config.given, MLP_SIZES)):
        message = (
            f"the MLP is 8/3 x hidden_size wide, as `activation: geglu` in gpt-neox v2.0; it was 2 x hidden_size from "
            f"April 2023 and 4/3 x hidden_size from September 2024: give {VERSION} or mlp_width"
        )
        yield Note(("activation", VERSION), message)
    if is_gpt_neox:
        yield from _default_notes(config, given)


def _default_notes(config: NeoXConfig, given: Mapping[str, Any]) -> Iterator[Note]:
    """Yield defaults of v2.0 in a file whose keys came after the default was changed."""
    changed = []
    younger = ""
    for key, default in used_defaults(given).items():
        later = next(keys_since(given, default.since), None)
        if later is not None and not any(map(config.given, default.names)):
            younger = later
            changed.append(f"{key} ({config.value(key)}; then {default.value})")
    if changed:
        message = (
            f"`{younger}` is younger than gpt-neox's change of the defaults of {', '.join(changed)}; absent keys have "
            f"v2.0's: give them, or {VERSION}"
        )
        yield Note((*CHANGED_DEFAULTS, VERSION), message)


def _parallel_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield that there are no tensor or context ranks to divide tokens over."""
    keys = config.parallelism
    if config.given("context_parallel_kind") and keys.context_parallel_size == 1:
        key = "context_parallel_kind"
        degree = config.describe_setting("context_parallel_size")
        yield Note((key, "context_parallel_size"), f"{config.describe_setting(key)} changes nothing with {degree}")
    if keys.sequence_parallel and keys.model_parallel_size == 1:
        key = "sequence_parallel"
        degree = config.describe_setting("model_parallel_size")
        yield Note((key, "model_parallel_size"), f"{config.describe_setting(key)} changes nothing with {degree}")
