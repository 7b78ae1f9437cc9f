"""What a generation run does, by its configuration: without prompts, from a file, or with a person."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from neox.config import RunPlan
from neox.engine import from_first_rank
from neox.generation.completion import Completion, generate
from neox.generation.decoding import LanguageModel
from neox.generation.interactive import interact
from neox.generation.params import SamplingParams
from neox.generation.prompt_file import write_completions
from neox.generation.replicas import over_replicas
from neox.generation.request import encode_prompts, mode, notes, prompts_of, sampling_params
from neox.generation.text_stream import TextCodec
from neox.generation.unfinished import UnfinishedRun
from neox.log import get_logger, progress
from neox.parallel import ParallelGrid

_log = get_logger(__name__)


def run_generation(
    plan: RunPlan, model: LanguageModel, codec: TextCodec, grid: ParallelGrid, checkpoint: Path
) -> list[Completion]:
    """Do what the configuration asks for; all ranks together. Rank 0 writes completions when all are done, and until
    then keeps what is finished beside the output, from which the same run goes on after an interruption.

    checkpoint: where the model's weights are from. Raises GenerationError before anything is generated for prompts that
    are empty or do not fit.
    """
    config, keys = plan.config, plan.config.generation
    params = sampling_params(config)
    for note in notes(config):
        _log.info("%s", note)
    if mode(config) == "interactive":
        interact(model, params, codec, grid, prompt_end=keys.prompt_end)
        return []
    prompts, out = prompts_of(config), Path(keys.sample_output_file)
    ids = encode_prompts(prompts, codec, params, model.max_length)
    kept = UnfinishedRun(out, run_name(plan, prompts, checkpoint))
    done = kept.read() if grid.world_size == 1 else from_first_rank(kept.read)
    # Similar lengths come together, and the longest first: what does not fit into memory shows at once.
    left = sorted(set(range(len(prompts))) - set(done), key=lambda n: (-len(ids[n]), n))
    width = keys.generation_batch_size

    def share(numbers: Sequence[int]) -> list[Completion]:
        mine = [prompts[n] for n in numbers]
        return generate(model, mine, params, codec, batch_size=width, numbers=numbers, keep_logits=keys.return_logits)

    with progress("generate", len(left), "prompts") if grid.rank == 0 else nullcontext() as bar:
        for batch in batches(left, width * grid.dp_size):
            completions = dict(zip(batch, over_replicas(batch, share, grid), strict=True))
            done.update(completions)
            if bar is not None:
                kept.add(completions)
                bar.update(len(batch))
    results = [done[n] for n in range(len(prompts))]
    if grid.rank == 0:
        write_completions(out, results)
        kept.remove()
        tokens, seconds = sum(c.length for c in results), max(c.duration for c in results)
        _log.info("%d completion(s), %d tokens, in %s (longest batch %.2f s)", len(results), tokens, out, seconds)
    return results


def batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield `size` items at a time, and what is left."""
    return (items[start : start + size] for start in range(0, len(items), size))


def run_name(plan: RunPlan, prompts: Sequence[str], checkpoint: Path) -> str:
    """Return what is the same for two runs that give the same completions: a hash of all they depend on."""
    config, saved = plan.config, checkpoint.stat().st_mtime_ns
    settings = [config.generation.model_dump_json(), repr(sampling_params(config)), plan.precision]
    facts = [*settings, str(checkpoint.resolve()), saved, *prompts]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def generate_all(
    model: LanguageModel,
    prompts: Sequence[str],
    params: SamplingParams,
    codec: TextCodec,
    grid: ParallelGrid,
    *,
    batch_size: int = 8,
) -> list[Completion]:
    """Continue prompts, shared out to the copies of the model; every rank gets all completions."""
    encode_prompts(prompts, codec, params, model.max_length)  # refuses on all ranks, before anything starts

    def share(numbers: Sequence[int]) -> list[Completion]:
        mine = [prompts[n] for n in numbers]
        if grid.rank != 0:
            return generate(model, mine, params, codec, batch_size=batch_size, numbers=numbers)
        with progress("generate", len(mine), "prompts") as bar:
            return generate(model, mine, params, codec, batch_size=batch_size, numbers=numbers, done=bar.update)

    return over_replicas(range(len(prompts)), share, grid)
