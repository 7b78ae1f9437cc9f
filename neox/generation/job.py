"""What a generation run does, by its configuration: without prompts, from a file, or with a person."""

from __future__ import annotations

from collections.abc import Sequence

from neox.config import RunPlan
from neox.generation.completion import Completion, generate
from neox.generation.decoding import LanguageModel
from neox.generation.interactive import interact
from neox.generation.params import SamplingParams
from neox.generation.prompt_file import write_completions
from neox.generation.replicas import over_replicas
from neox.generation.request import encode_prompts, mode, notes, prompts_of, sampling_params
from neox.generation.text_stream import TextCodec
from neox.log import get_logger, progress
from neox.parallel import ParallelGrid

_log = get_logger(__name__)


def run_generation(plan: RunPlan, model: LanguageModel, codec: TextCodec, grid: ParallelGrid) -> list[Completion]:
    """Do what the configuration asks for; all ranks together. Completions are written by rank 0 when all are done.

    Raises GenerationError before anything is generated for prompts that are empty or do not fit.
    """
    config, keys = plan.config, plan.config.generation
    params = sampling_params(config)
    for note in notes(config):
        _log.info("%s", note)
    if mode(config) == "interactive":
        interact(model, params, codec, grid, prompt_end=keys.prompt_end)
        return []
    done = generate_all(
        model,
        prompts_of(config),
        params,
        codec,
        grid,
        batch_size=keys.generation_batch_size,
        keep_logits=keys.return_logits,
    )
    if grid.rank == 0:
        write_completions(keys.sample_output_file, done)
        tokens, seconds = sum(c.length for c in done), max(c.duration for c in done)
        _log.info(
            "%d completion(s), %d tokens, in %s (longest batch %.2f s)",
            len(done),
            tokens,
            keys.sample_output_file,
            seconds,
        )
    return done


def generate_all(
    model: LanguageModel,
    prompts: Sequence[str],
    params: SamplingParams,
    codec: TextCodec,
    grid: ParallelGrid,
    *,
    batch_size: int = 8,
    keep_logits: bool = False,
) -> list[Completion]:
    """Continue prompts, shared out to the copies of the model; every rank gets all completions."""
    encode_prompts(prompts, codec, params, model.max_length)  # refuses on all ranks, before anything starts

    def share(numbers: Sequence[int]) -> list[Completion]:
        mine = [prompts[n] for n in numbers]
        settings = {"batch_size": batch_size, "numbers": numbers, "keep_logits": keep_logits}
        if grid.rank != 0:
            return generate(model, mine, params, codec, **settings)
        with progress("generate", len(mine), "prompts") as bar:
            return generate(model, mine, params, codec, **settings, done=bar.update)

    return over_replicas(range(len(prompts)), share, grid)
