"""What a generation run does, by its configuration: without prompts, from a file, or with a person."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neox.config import NeoXConfig, RunPlan
from neox.errors import GenerationError
from neox.generation.completion import Completion, encode_prompts, generate
from neox.generation.decoding import LanguageModel
from neox.generation.interactive import interact
from neox.generation.params import SamplingParams
from neox.generation.prompt_file import check_writable, read_prompts, write_completions
from neox.generation.replicas import over_replicas
from neox.generation.text_stream import TextCodec
from neox.log import get_logger, progress
from neox.parallel import ParallelGrid

_log = get_logger(__name__)


def sampling_params(config: NeoXConfig) -> SamplingParams:
    """Return the settings that NeoX's keys mean.

    As in gpt-neox, `top_k` or `top_p` with temperature 0 (its default) draws at temperature 1; all three 0 is greedy.
    """
    keys = config.generation
    if keys.return_logits and keys.num_beams > 1:
        raise GenerationError(
            "return_logits and num_beams > 1 do not go together: a beam's tokens come from several rows"
        )
    temperature = keys.temperature
    if temperature == 0 and (keys.top_k or keys.top_p) and keys.num_beams == 1:
        _log.info("temperature is 0 and top_k or top_p is given: drawing at temperature 1")
        temperature = 1.0
    return SamplingParams(
        max_new_tokens=keys.maximum_tokens,
        min_new_tokens=keys.minimum_tokens,
        temperature=temperature,
        top_k=keys.top_k,
        top_p=keys.top_p,
        repetition_penalty=keys.repetition_penalty,
        stop=keys.stop_strings,
        num_beams=keys.num_beams,
        length_penalty=keys.length_penalty,
        seed=config.training.seed,
    )


def mode(config: NeoXConfig) -> str:
    """Return `unconditional`, `input-file` or `interactive`: an input file decides, then `text_gen_type`."""
    keys = config.generation
    if keys.sample_input_file is not None:
        if keys.text_gen_type not in (None, "input-file"):
            _log.info(
                "sample_input_file is given: its prompts are used instead of text_gen_type %s", keys.text_gen_type
            )
        return "input-file"
    if keys.text_gen_type == "input-file":
        raise GenerationError("text_gen_type is input-file, and sample_input_file (-i FILE) names no file")
    return keys.text_gen_type or "unconditional"


def prompts_of(config: NeoXConfig) -> list[str]:
    """Return the prompts of a run that is not interactive, as often as each is to be continued."""
    keys = config.generation
    if keys.sample_input_file is None:
        return [""] * keys.num_samples
    return [prompt for prompt in read_prompts(keys.sample_input_file) for _ in range(keys.num_return_sequences)]


def check_generation(config: NeoXConfig) -> None:
    """Raise GenerationError for settings and prompts that a run would refuse, without a model."""
    sampling_params(config)
    if mode(config) != "interactive":
        prompts_of(config)
        prompts, out = config.generation.sample_input_file, Path(config.generation.sample_output_file)
        if out.is_dir():
            raise GenerationError(f"sample_output_file: {out} is a directory")
        if prompts is not None and out.exists() and out.samefile(prompts):
            raise GenerationError(
                f"sample_output_file {out} is the file of prompts (-i): name another, it would be lost"
            )


def check_output(config: NeoXConfig) -> None:
    """Raise GenerationError where completions could not be written; for rank 0, before minutes of work."""
    if mode(config) != "interactive":
        check_writable(config.generation.sample_output_file)


def run_generation(plan: RunPlan, model: LanguageModel, codec: TextCodec, grid: ParallelGrid) -> list[Completion]:
    """Do what the configuration asks for; all ranks together. Completions are written by rank 0 when all are done.

    Raises GenerationError before anything is generated for prompts that are empty or do not fit.
    """
    config, keys = plan.config, plan.config.generation
    params = sampling_params(config)
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
            "%d completions, %d tokens, in %s (longest batch %.2f s)",
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
    encode_prompts(prompts, codec, model, params)  # refuses on all ranks, before anything starts

    def share(numbers: Sequence[int]) -> list[Completion]:
        mine = [prompts[n] for n in numbers]
        settings = {"batch_size": batch_size, "numbers": numbers, "keep_logits": keep_logits}
        if grid.rank != 0:
            return generate(model, mine, params, codec, **settings)
        with progress("generate", len(mine), "prompts") as bar:
            return generate(model, mine, params, codec, **settings, done=bar.update)

    return over_replicas(range(len(prompts)), share, grid)
