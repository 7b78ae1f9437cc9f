"""Derivation of a `RunPlan` from a configuration. Pure: no file, GPU or environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from neox.architecture import Architecture, LayerPlan, build_layer_plan
from neox.config.architecture import architecture_of, attention_impls, padded_vocabulary, with_adapters
from neox.config.deepspeed_json import deepspeed_json
from neox.config.flat import in_file_order
from neox.config.grid_and_batch import solve_batch, solve_grid
from neox.config.loader import Draft
from neox.config.memory import fullest_stage, memory_setting
from neox.config.neox_config import NeoXConfig
from neox.config.plan import BatchPlan, Precision, RunPlan, StagePlan, Topology
from neox.config.precision import UNKNOWN_HOSTS, Capabilities, choose_precision, settle_precision
from neox.config.stages import partition_layers
from neox.config.validation import notes_without_effect, static_problems
from neox.errors import ConfigError

# Where one of these has an unknown value, so has the number of ranks, the degrees or the vocabulary.
_DECIDING = frozenset(
    {
        *("pipe_parallel_size", "model_parallel_size", "global_num_gpus", "num_gpus", "num_nodes", "hostfile"),
        *("include", "exclude", "launcher", "tokenizer_type", "vocab_file", "merge_file", "padded_vocab_size"),
    }
)


def further_problems(draft: Draft, world_size: int, vocab_size: int) -> list[str]:
    """Return the rules that the valid keys of a draft break, apart from what one of its bad keys may have caused."""
    if draft.doubtful & _DECIDING:
        return draft.certain(static_problems(draft.config))
    try:
        resolve(draft.config, world_size, vocab_size)
    except ConfigError as error:
        return draft.certain(error.problems)
    return []


def resolve(
    config: NeoXConfig, world_size: int, vocab_size: int, capabilities: Capabilities = UNKNOWN_HOSTS
) -> RunPlan:
    """Derive the plan of a run.

    Args:
        config: What the user asked for.
        world_size: Number of ranks.
        vocab_size: Number of ids the tokenizer can produce.
        capabilities: What the hosts can do, which decides `precision: auto`.

    Returns:
        The plan; its configuration names the precision that was decided.

    Raises:
        ConfigError: Every rule that the configuration breaks.
    """
    config, precision_notes = settle_precision(config, capabilities)
    problems = static_problems(config)
    grid = solve_grid(config, world_size, problems)
    batch = solve_batch(config, grid.dp_size if grid else None, problems)
    precision = choose_precision(config, [])  # a contradiction is among the problems above
    problems += _vocabulary_problems(config, vocab_size)
    if problems or grid is None or batch is None or precision is None:
        raise ConfigError(in_file_order(problems))
    return derive_plan(config, architecture_of(config), grid, batch, precision, vocab_size, precision_notes)


def derive_plan(
    config: NeoXConfig,
    architecture: Architecture,
    grid: Topology,
    batch: BatchPlan,
    precision: Precision,
    vocab_size: int,
    notes: Sequence[str] = (),
) -> RunPlan:
    """Complete a plan from what `resolve` has decided, without checks; ranks do it, too.

    Args:
        config: The configuration, in which `precision` is decided.
        architecture: The network.
        grid: Degrees of parallelism.
        batch: The batch triple.
        precision: The number format.
        vocab_size: Ids of the tokenizer, before padding.
        notes: Notes for people, to which further ones are added.

    Raises:
        ConfigError: A pipeline stage would hold no parameters.
    """
    padded = padded_vocabulary(config, vocab_size, grid.tp_size)
    layers = build_layer_plan(architecture, padded, head_parallelism=config.model.output_layer_parallelism)
    if config.training.lora is not None:
        layers = with_adapters(layers, config)
        notes = (*notes, *_adapter_notes(layers, config))
    stages = _stages(config, layers, grid)
    attention = attention_impls(config)
    bounds = [0, *(stage.last for stage in stages)]
    json, translated = deepspeed_json(config, grid, batch, precision)
    return RunPlan(
        config=config,
        grid=grid,
        batch=batch,
        precision=precision,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        layers=layers,
        stages=stages,
        memory=fullest_stage(layers, bounds, memory_setting(config, grid, batch, precision, attention)),
        save_iterations=config.checkpoint.save_iterations(config.training.train_iters),
        deepspeed=json,
        notes=(*notes, *translated, *notes_without_effect(config)),
        attention=attention,
    )


def _adapter_notes(layers: LayerPlan, config: NeoXConfig) -> list[str]:
    """Return what `lora` trains. Raises ConfigError if no layer has an adapter."""
    trained, total = layers.trained_numel, layers.numel
    if layers.architecture.soft_prompt_tokens:
        raise ConfigError(config.problem("lora", "and `soft_prompt_tuning` each train nothing else; give one of them"))
    if not trained:
        raise ConfigError(config.problem("lora", "has targets that no block of this network has"))
    return [f"lora: {trained:,} of {total:,} parameters are trained ({100 * trained / total:.2g} %)"]


def _vocabulary_problems(config: NeoXConfig, vocab_size: int) -> Iterator[str]:
    key, explicit = "padded_vocab_size", config.tokenizer.padded_vocab_size
    if vocab_size < 1:
        yield f"a tokenizer of {vocab_size} ids: the vocabulary must hold at least one"
    if explicit is not None and explicit < vocab_size:
        yield config.problem(key, f"is smaller than the tokenizer's {vocab_size} ids; remove it")
    if explicit is not None and explicit % config.parallelism.model_parallel_size:
        yield config.problem(key, f"is not a multiple of {config.describe_setting('model_parallel_size')}; remove it")


def _stages(config: NeoXConfig, layers: LayerPlan, grid: Topology) -> tuple[StagePlan, ...]:
    bounds = partition_layers(layers, grid.pp_size, config.parallelism.pipe_partition_method, grid.tp_size)
    stages = []
    for first, last in pairwise(bounds):
        held = layers.layers[first:last]
        own = {layer.index for layer in held}
        copies = sum(layers[x.tied_to].numel for x in held if x.tied_to is not None and x.tied_to not in own)
        stages.append(StagePlan(first, last, sum(layer.numel for layer in held) + copies))
    empty = [i for i, stage in enumerate(stages) if stage.parameters == 0]
    if layers.lora is not None:
        kinds = [{layer.kind for layer in layers.layers[stage.first : stage.last]} for stage in stages]
        empty += [i for i, found in enumerate(kinds) if "block" not in found]
    if empty:
        method = config.describe_setting("pipe_partition_method")
        raise ConfigError(f"{method} leaves stage {empty[0]} without parameters to train; use type:transformer|mlp")
    return tuple(stages)
