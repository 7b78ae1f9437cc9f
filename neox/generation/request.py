"""What a configuration asks of a generation run, and what is wrong with that, known without a model.

No torch here: the head node asks before ranks start, and so does a dry run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neox.config import NeoXConfig
from neox.errors import GenerationError
from neox.files import check_writable, unwritable_parent
from neox.generation.params import SamplingParams
from neox.generation.prompt_file import read_prompts
from neox.generation.text_stream import TextCodec


def sampling_params(config: NeoXConfig) -> SamplingParams:
    """Return the settings that NeoX's keys mean.

    As in gpt-neox, `top_k` or `top_p` with temperature 0 (its default) draws at temperature 1; all three 0 is greedy.
    """
    keys = config.generation
    if keys.return_logits and keys.num_beams > 1:
        raise GenerationError(
            "return_logits and num_beams > 1 do not go together: a beam's tokens come from several rows"
        )
    drawn = (keys.top_k or keys.top_p) and keys.num_beams == 1
    return SamplingParams(
        max_new_tokens=keys.maximum_tokens,
        min_new_tokens=keys.minimum_tokens,
        temperature=1.0 if keys.temperature == 0 and drawn else keys.temperature,
        top_k=keys.top_k,
        top_p=keys.top_p,
        repetition_penalty=keys.repetition_penalty,
        stop=keys.stop_strings,
        num_beams=keys.num_beams,
        length_penalty=keys.length_penalty,
        seed=config.training.seed,
    )


def notes(config: NeoXConfig) -> list[str]:
    """Return what a person may not expect of these settings."""
    keys, found = config.generation, []
    if keys.temperature == 0 and sampling_params(config).samples:
        found.append("temperature is 0 and top_k or top_p is given: drawing at temperature 1")
    if keys.length_penalty != 1 and keys.num_beams == 1:
        found.append(f"length_penalty {keys.length_penalty} has no effect: it ranks beams, and num_beams is 1")
    if keys.sample_input_file is not None and keys.text_gen_type == "interactive":
        found.append("sample_input_file is given: its prompts are used instead of text_gen_type interactive")
    return found


def mode(config: NeoXConfig) -> str:
    """Return `unconditional`, `input-file` or `interactive`: an input file decides, then `text_gen_type`."""
    keys = config.generation
    if keys.sample_input_file is not None:
        return "input-file"
    if keys.text_gen_type == "input-file":
        raise GenerationError("text_gen_type is input-file, and sample_input_file (-i FILE) names no file")
    return keys.text_gen_type or "unconditional"


def prompts_of(config: NeoXConfig) -> list[str]:
    """Return the prompts of a run that is not interactive, as often as each is to be continued."""
    file, times = config.generation.sample_input_file, copies(config)
    return [prompt for prompt in ([""] if file is None else read_prompts(file)) for _ in range(times)]


def copies(config: NeoXConfig) -> int:
    """Return how often each prompt is continued. Raises GenerationError where all continuations would be the same."""
    keys = config.generation
    key = "num_samples" if keys.sample_input_file is None else "num_return_sequences"
    times: int = getattr(keys, key)
    if times > 1 and not sampling_params(config).samples:
        how = "beam search" if keys.num_beams > 1 else "greedy decoding (temperature, top_k and top_p are 0)"
        raise GenerationError(f"{key} is {times}, and {how} would give the same text every time; set it to 1, or draw")
    return times


def context_length(config: NeoXConfig) -> int:
    """Return the longest sequence the model can read, in tokens."""
    length = config.model.max_position_embeddings or config.model.seq_length
    assert length is not None
    return length


def encode_prompts(prompts: Sequence[str], codec: TextCodec, params: SamplingParams, context: int) -> list[list[int]]:
    """Return the ids of each prompt; an empty one is an unconditional start, the end-of-document alone.

    Raises GenerationError that names every prompt which leaves no room for a new token in `context` tokens.
    """
    ids = [codec.encode(prompt) if prompt else [codec.eod] for prompt in prompts]
    problems = []
    for number, tokens in enumerate(ids, start=1):
        try:
            params.room(len(tokens), context)
        except GenerationError as error:
            problems.append(f"prompt {number}: {error}" if len(ids) > 1 else str(error))
    if problems:
        raise GenerationError("\n".join(problems))
    return ids


def check_generation(config: NeoXConfig, codec: TextCodec | None) -> None:
    """Raise GenerationError for settings, prompts and an output file that a run would refuse.

    codec: None where there is no tokenizer to say how long the prompts are.
    """
    params = sampling_params(config)
    if mode(config) == "interactive":
        return
    copies(config)
    prompts, out = config.generation.sample_input_file, Path(config.generation.sample_output_file)
    if out.is_dir():
        raise GenerationError(f"sample_output_file: {out} is a directory")
    if (closed := unwritable_parent(out)) is not None:
        raise GenerationError(f"sample_output_file {out}: nothing can be written in {closed}")
    if prompts is not None:
        if out.exists() and Path(prompts).exists() and out.samefile(prompts):
            raise GenerationError(
                f"sample_output_file {out} is the file of prompts (-i): name another, it would be lost"
            )
        texts = read_prompts(prompts)
        if codec is not None:
            encode_prompts(texts, codec, params, context_length(config))


def check_output(config: NeoXConfig) -> None:
    """Raise GenerationError where completions could not be written; makes their directory."""
    out = config.generation.sample_output_file
    try:
        if mode(config) != "interactive":
            check_writable(Path(out))
    except OSError as error:
        raise GenerationError(f"sample_output_file {out}: cannot be written ({error.strerror})") from error
