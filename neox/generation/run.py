"""Generation runs of a configuration: without prompts, from a file, or interactive; resumable with a partial output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from neox import files
from neox.engine import from_first_rank
from neox.errors import GenerationError
from neox.generation.chat_format import ChatFormat, chat_template_for
from neox.generation.chat_terminal import converse
from neox.generation.completion import Completion, generate, over_replicas
from neox.generation.decoding import LanguageModel, check_ids
from neox.generation.interactive import interact
from neox.generation.request import encode_prompts, mode, notes, prompts_of, sampling_params
from neox.log import get_logger, progress
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from neox.tokenizer import Tokenizer
from neox.tokenizer.chat import ChatTemplate

_log = get_logger(__name__)


def run_generation(
    plan: RunPlan, model: LanguageModel, codec: Tokenizer, grid: ParallelGrid, checkpoint: Path
) -> list[Completion]:
    """Do what the configuration asks for; all ranks together.

    Rank 0 writes the output file when all completions are done. Until then it keeps the finished ones in a partial
    output next to it, from which the same run resumes after an interruption.

    Args:
        plan: Plan of the run.
        model: Model to generate with.
        codec: Tokenizer.
        grid: Process groups; data-parallel ranks divide the prompts among themselves.
        checkpoint: Source of the model's weights.

    Returns:
        All completions, in the order of the prompts; none for an interactive run.

    Raises:
        GenerationError: If prompts are empty or do not fit; it comes before anything is generated.
    """
    config = plan.config
    keys = config.generation
    params = sampling_params(config)
    for note in notes(config):
        _log.info("%s", note)
    if mode(config) == "interactive":
        interact(model, params, codec, grid, prompt_end=keys.prompt_end)
        return []
    if mode(config) == "chat":
        chat = _chat_format(plan, codec, grid, checkpoint)
        if not config.given("maximum_tokens"):  # an answer ends by itself
            params = replace(params, max_new_tokens=model.max_length)
        converse(model, params, chat, codec, grid)
        return []
    prompts = prompts_of(config)
    out = Path(keys.sample_output_file)
    ids = encode_prompts(prompts, codec, params, model.max_length)
    check_ids(ids, model)
    partial = PartialOutput(out, run_hash(plan, prompts, checkpoint))
    done = partial.read() if grid.world_size == 1 else from_first_rank(partial.read)
    # Batches of similar lengths, with the longest first, so that running out of memory shows immediately.
    missing = set(range(len(prompts))) - set(done)
    todo = sorted(missing, key=lambda n: (-len(ids[n]), n))
    batch_size = keys.generation_batch_size

    def generate_part(numbers: Sequence[int]) -> list[Completion]:
        part = [prompts[n] for n in numbers]
        return generate(
            model, part, params, codec, batch_size=batch_size, sequence_ids=numbers, keep_logits=keys.return_logits
        )

    with progress("generate", len(todo), "prompts") if grid.rank == 0 else nullcontext() as bar:
        size = batch_size * grid.dp_size
        for start in range(0, len(todo), size):
            batch = todo[start : start + size]
            completions = dict(zip(batch, over_replicas(batch, generate_part, grid), strict=True))
            done.update(completions)
            if bar is not None:
                partial.add(completions)
                bar.update(len(batch))
    results = [done[n] for n in range(len(prompts))]
    if grid.rank == 0:
        write_completions(out, results)
        partial.remove()
        tokens = sum(completion.length for completion in results)
        seconds = max(completion.duration for completion in results)
        _log.info("%d completion(s), %d tokens, in %s (longest batch %.2f s)", len(results), tokens, out, seconds)
    return results


def _chat_format(plan: RunPlan, codec: Tokenizer, grid: ParallelGrid, checkpoint: Path) -> ChatFormat:
    """Return the form of conversations with a checkpoint; rank 0 reads its template."""
    assert isinstance(codec, Tokenizer), "templates are written for tokenizers of files"

    def read() -> ChatTemplate:
        return chat_template_for(plan.config, checkpoint, codec)

    template = read() if grid.world_size == 1 else from_first_rank(read)
    return ChatFormat(template, codec)


def run_hash(plan: RunPlan, prompts: Sequence[str], checkpoint: Path) -> str:
    """Return a hash of everything that completions depend on: prompts, settings, precision and weights."""
    generation = plan.config.generation.model_dump_json(exclude={"cuda_graphs"})
    settings = [generation, repr(sampling_params(plan.config)), plan.precision]
    weights = [str(checkpoint.resolve()), checkpoint.stat().st_mtime_ns]
    if plan.config.checkpoint.load_weights != "trained":
        weights.append(plan.config.checkpoint.load_weights)
    return hashlib.sha256(json.dumps([*settings, *weights, *prompts]).encode()).hexdigest()


def write_completions(path: str | Path, completions: Iterable[Completion]) -> None:
    """Write one JSON object per line, atomically. An existing file is renamed first.

    Raises:
        GenerationError: If the file cannot be written.
    """
    path = Path(path)
    lines = [json.dumps(completion.to_json(), ensure_ascii=False) + "\n" for completion in completions]
    try:
        if path.is_file():
            kept = _free_name(path)
            path.rename(kept)
            _log.info("%s already existed; its completions are now in %s", path, kept)
        files.write_text(path, lines)
    except OSError as error:
        raise GenerationError(f"{path}: cannot be written ({error.strerror or error})") from error


def _free_name(path: Path) -> Path:
    """Return the first of NAME.1.SUFFIX, NAME.2.SUFFIX, ... that does not exist."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free


class PartialOutput:
    """File `OUTPUT.partial`: a line that identifies the run, then one line `[number, completion]` for each completion.

    One rank reads and writes it.
    """

    def __init__(self, out: Path, run: str) -> None:
        """Name the file; nothing is read or written.

        Args:
            out: Output file of the run.
            run: `run_hash` of the run.
        """
        self.path = files.partial_path(out)
        self._header = json.dumps({"unfinished_run": run}) + "\n"
        self._restored: dict[int, Completion] = {}
        self._started = False

    def read(self) -> dict[int, Completion]:
        """Return the completions of an interrupted run by prompt number; an incomplete last line is dropped.

        Raises:
            GenerationError: If the file cannot be read.
        """
        try:
            *lines, _ = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise GenerationError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        if not lines or lines[0] + b"\n" != self._header.encode():
            _log.warning(
                "%s belongs to a run with other prompts, settings or weights: ignored, and will be overwritten",
                self.path,
            )
            return {}
        try:
            for line in lines[1:]:
                number, record = json.loads(line)
                self._restored[number] = Completion(**record)
        except (ValueError, TypeError) as error:
            raise GenerationError(f"{self.path}: is broken ({error}); remove it to start over") from error
        _log.info("resuming an interrupted run: %s holds %d completion(s)", self.path, len(self._restored))
        return dict(self._restored)

    def add(self, completions: Mapping[int, Completion]) -> None:
        """Append finished completions. Raises GenerationError if they cannot be written."""
        try:
            if self._started:
                with self.path.open("a", encoding="utf-8") as file:
                    file.writelines(_lines(completions))
            else:  # a new file drops an incomplete last line, and the completions of another run
                files.write_text(self.path, [self._header, *_lines({**self._restored, **completions})])
        except OSError as error:
            raise GenerationError(f"{self.path}: cannot be written ({error.strerror or error})") from error
        self._started = True

    def remove(self) -> None:
        """Delete the file, once the output is written."""
        self.path.unlink(missing_ok=True)


def _lines(completions: Mapping[int, Completion]) -> Iterator[str]:
    for number, completion in completions.items():
        yield json.dumps([number, completion.to_json()], ensure_ascii=False) + "\n"
