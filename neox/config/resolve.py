"""`resolve`: the only derivation, from what was asked for to what follows. Pure: no file, GPU or environment."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from neox.architecture import LayerPlan, build_layer_plan
from neox.config.architecture import architecture_of, attention_impls
from neox.config.deepspeed_json import deepspeed_json
from neox.config.flat import in_file_order
from neox.config.grid_and_batch import solve_batch, solve_grid
from neox.config.loader import Draft
from neox.config.memory import fullest_stage, memory_setting
from neox.config.plan import RunPlan, StagePlan, Topology
from neox.config.precision import UNKNOWN_HOSTS, Capabilities, choose_precision, settle_precision
from neox.config.sections import NeoXConfig
from neox.config.stages import partition_layers
from neox.config.validation import notes as idle_notes
from neox.config.validation import static_problems
from neox.config.wording import place, said
from neox.errors import ConfigError

# Where one of these is in doubt, so are the number of ranks, the degrees or the vocabulary.
_DECIDING = {
    *("pipe_parallel_size", "model_parallel_size", "global_num_gpus", "num_gpus", "num_nodes", "hostfile"),
    *("include", "exclude", "launcher", "tokenizer_type", "vocab_file", "merge_file", "padded_vocab_size"),
}


def further_problems(draft: Draft, world_size: int, vocab_size: int) -> list[str]:
    """Return the laws that a draft's sound keys break, beside its own problems: nothing that a bad key may cause."""
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
    """Derive the run's plan.

    Args:
        config: What was asked for.
        world_size: Number of ranks.
        vocab_size: Ids of the tokenizer, before padding.
        capabilities: What the hosts can do, which decides `precision: auto`.

    Returns:
        The plan; its configuration names the precision that was decided.

    Raises:
        ConfigError: The configuration breaks a rule; with every problem.
    """
    config, precision_notes = settle_precision(config, capabilities)
    problems = static_problems(config)
    grid = solve_grid(config, world_size, problems)
    batch = solve_batch(config, grid.dp_size if grid else None, problems)
    precision = choose_precision(config, [])  # a contradiction is among the rules' problems
    problems += _vocabulary_problems(config, vocab_size)
    if problems or grid is None or batch is None or precision is None:
        raise ConfigError(in_file_order(problems))
    padded = padded_vocabulary(config, vocab_size, grid.tp_size)
    layers = layer_plan(config, padded)
    stages = _stages(config, layers, grid)
    attention = attention_impls(config)
    bounds = [0, *(stage.last for stage in stages)]
    json, notes = deepspeed_json(config, grid, batch, precision)
    notes = [*precision_notes, *notes, *idle_notes(config)]
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
        notes=tuple(notes),
        attention=attention,
    )


def layer_plan(config: NeoXConfig, padded_vocab_size: int) -> LayerPlan:
    """Return the layer plan of a configuration whose sizes are given."""
    return build_layer_plan(
        architecture_of(config), padded_vocab_size, head_parallelism=config.model.output_layer_parallelism
    )


def padded_vocabulary(config: NeoXConfig, vocab_size: int, mp: int) -> int:
    """Return the rows of the embedding over `mp` tensor ranks: vocab_size rounded up, or padded_vocab_size."""
    multiple = config.model.make_vocab_size_divisible_by * mp
    return config.tokenizer.padded_vocab_size or -(-vocab_size // multiple) * multiple


def _vocabulary_problems(config: NeoXConfig, vocab_size: int) -> Iterator[str]:
    mp, explicit = config.parallelism.model_parallel_size, config.tokenizer.padded_vocab_size
    if vocab_size < 1:
        yield f"a tokenizer of {vocab_size} ids: the vocabulary must hold at least one"
    where = place(config, "padded_vocab_size")
    if explicit is not None and explicit < vocab_size:
        yield f"{where}`padded_vocab_size: {explicit}` is smaller than the tokenizer's {vocab_size} ids; remove it"
    if explicit is not None and explicit % mp:
        ranks = said(config, "model_parallel_size", mp)
        yield f"{where}`padded_vocab_size: {explicit}` is not a multiple of {ranks}; remove it"


def _stages(config: NeoXConfig, layers: LayerPlan, grid: Topology) -> tuple[StagePlan, ...]:
    bounds = partition_layers(layers, grid.pp_size, config.parallelism.pipe_partition_method, grid.tp_size)
    stages = []
    for first, last in pairwise(bounds):
        held = layers.layers[first:last]
        own = {layer.index for layer in held}
        copies = sum(layers[x.tied_to].numel for x in held if x.tied_to is not None and x.tied_to not in own)
        stages.append(StagePlan(first, last, sum(layer.numel for layer in held) + copies))
    empty = [i for i, stage in enumerate(stages) if stage.parameters == 0]
    if empty:
        method = said(config, "pipe_partition_method", config.parallelism.pipe_partition_method)
        raise ConfigError(f"{method} leaves stage {empty[0]} without parameters; use type:transformer|mlp")
    return tuple(stages)
