"""Generation settings and prompts of a configuration, checked without a model.

No torch here: the launcher checks requests before ranks start, and so does a dry run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from neox.config import NeoXConfig
from neox.errors import GenerationError
from neox.files import check_writable, unwritable_parent
from neox.generation.text_stream import is_text
from neox.problems import Missing, Problem
from neox.tokenizer import Tokenizer, positions

_SMALLEST_TEMPERATURE = 1e-20  # below it sampling equals greedy decoding, and dividing by it overflows float32
TYPED = ("interactive", "chat")
"""Modes in which a person types prompts."""
Prompt = str | tuple[int, ...]
"""Text, or ids that are taken as they are."""
_TEXT_KEYS = ("context", "prompt", "text")


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one generation; the defaults are greedy decoding.

    Attributes:
        max_new_tokens: Most tokens of the continuation.
        min_new_tokens: Number of first tokens that cannot be end-of-document, nor one of `stop_ids`.
        temperature: 0 takes the most probable token (greedy); otherwise logits are divided by it and a token is drawn.
        top_k: Draw among the `top_k` most probable tokens; 0 means all.
        top_p: Draw among the fewest tokens whose probability reaches `top_p` (nucleus sampling, Holtzman et al. 2019,
            arXiv:1904.09751); 0 and 1 mean all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens already in the context (CTRL,
            Keskar et al. 2019, arXiv:1909.05858); 1 means none.
        stop: Strings that end a continuation and are not part of its text. Not with beams.
        stop_ids: Ids of tokens that end a continuation as end-of-document does. Not with beams.
        num_beams: More than 1 searches with that many beams instead of drawing.
        length_penalty: A finished beam's score is its log-probability / length ** length_penalty.
        seed: Two runs with one seed draw the same tokens, whatever the batch size.

    Raises:
        GenerationError: For values out of range and combinations that contradict each other.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = field(default=(), repr=False)  # no key sets it, and `run_hash` hashes the rest
    num_beams: int = 1
    length_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [message for wrong, message in self._checks() if wrong]
        if problems:
            raise GenerationError("; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        """Return (whether it is violated, message) for each rule."""
        return [
            (self.max_new_tokens < 1, f"maximum_tokens is {self.max_new_tokens}: it must be at least 1"),
            (
                not 0 <= self.min_new_tokens <= self.max_new_tokens,
                f"minimum_tokens is {self.min_new_tokens}: it must be between 0 and maximum_tokens "
                f"({self.max_new_tokens})",
            ),
            (not self.temperature >= 0, f"temperature is {self.temperature}: it must be 0 (greedy) or positive"),
            (self.top_k < 0, f"top_k is {self.top_k}: it must be 0 (all tokens) or positive"),
            (not 0 <= self.top_p <= 1, f"top_p is {self.top_p}: it must be between 0 and 1 (0 and 1: all tokens)"),
            (not self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}: it must be positive"),
            ("" in self.stop, "an empty stop string would end every continuation immediately"),
            (self.num_beams < 1, f"num_beams is {self.num_beams}: it must be at least 1"),
            (
                self.num_beams > 1 and (self.samples or self.top_k > 0 or 0 < self.top_p < 1),
                f"num_beams is {self.num_beams}, temperature {self.temperature}, top_k {self.top_k}, top_p "
                f"{self.top_p}: beam search draws no random tokens; set temperature, top_k and top_p to 0, or "
                "num_beams to 1",
            ),
            (
                self.num_beams > 1 and bool(self.stop or self.stop_ids),
                "stop strings, stop tokens and num_beams > 1 cannot be combined; leave one of them out",
            ),
        ]

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > _SMALLEST_TEMPERATURE

    def token_limit(self, prompt: int, context: int) -> int:
        """Return the most tokens that may follow a prompt.

        Args:
            prompt: Tokens of the prompt.
            context: Longest sequence of the model in tokens.

        Raises:
            GenerationError: If the prompt is empty, or none may follow.
        """
        if not prompt:
            raise GenerationError("the prompt is empty: there is nothing to continue")
        if prompt >= context:
            raise GenerationError(
                f"the prompt has {prompt} tokens, and this model's context is {context} "
                "(max_position_embeddings): shorten it so that at least one token fits after it"
            )
        return min(context - prompt, self.max_new_tokens)


def sampling_params(config: NeoXConfig) -> SamplingParams:
    """Return the settings of a configuration's keys.

    As in gpt-neox, `top_k` or `top_p` with temperature 0 (its default) draws at temperature 1; all three 0 is greedy.
    """
    keys = config.generation
    if keys.return_logits and keys.num_beams > 1:
        raise GenerationError(
            "return_logits and num_beams > 1 cannot be combined: the tokens of a beam come from several rows of logits"
        )
    temperature = keys.temperature
    if temperature == 0 and keys.num_beams == 1 and (keys.top_k or keys.top_p):
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


def notes(config: NeoXConfig) -> list[str]:
    """Return notes about settings with an effect that a user may not expect."""
    keys = config.generation
    found = []
    if keys.temperature == 0 and sampling_params(config).samples:
        found.append("temperature is 0 and top_k or top_p is given: drawing at temperature 1")
    if keys.length_penalty != 1 and keys.num_beams == 1:
        found.append(f"length_penalty {keys.length_penalty} has no effect: it ranks beams, and num_beams is 1")
    if keys.sample_input_file is not None and keys.text_gen_type in TYPED:
        found.append(f"sample_input_file is given: its prompts are used instead of text_gen_type {keys.text_gen_type}")
    return found


def mode(config: NeoXConfig) -> str:
    """Return `unconditional`, `input-file`, `interactive` or `chat`: an input file decides, then `text_gen_type`."""
    keys = config.generation
    if keys.sample_input_file is not None:
        return "input-file"
    if keys.text_gen_type == "input-file":
        raise GenerationError("text_gen_type is input-file, but sample_input_file (-i FILE) is not given")
    return keys.text_gen_type or "unconditional"


def prompts_of(config: NeoXConfig) -> list[str]:
    """Return the prompts of a run that is not interactive, each repeated once per continuation."""
    file = config.generation.sample_input_file
    prompts = [""] if file is None else read_prompts(file)
    times = copies(config)
    repeated = []
    for prompt in prompts:
        repeated += [prompt] * times
    return repeated


def copies(config: NeoXConfig) -> int:
    """Return the number of continuations per prompt.

    Raises:
        GenerationError: If all of them would be the same text.
    """
    keys = config.generation
    if keys.sample_input_file is None:
        key = "num_samples"
        times = keys.num_samples
    else:
        key = "num_return_sequences"
        times = keys.num_return_sequences
    if times > 1 and not sampling_params(config).samples:
        method = "greedy decoding (temperature, top_k and top_p are 0)"
        if keys.num_beams > 1:
            method = "beam search"
        raise GenerationError(f"{key} is {times}, but {method} gives the same text every time; set it to 1, or sample")
    return times


def context_length(config: NeoXConfig) -> int:
    """Return the longest sequence of the model in tokens."""
    length = config.model.max_position_embeddings or config.model.seq_length
    assert length is not None
    return length


def encode_prompts(
    prompts: Sequence[Prompt], codec: Tokenizer, params: SamplingParams, context: int
) -> list[list[int]]:
    """Encode prompts. An empty one becomes what stands before the first token of a text.

    Args:
        prompts: Texts, or ids.
        codec: Tokenizer.
        params: Settings; at least one new token must fit.
        context: Longest sequence of the model in tokens.

    Raises:
        GenerationError: If prompts do not fit; it names all of them.
    """
    ids = [positions.prompt(codec, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    problems = []
    for number, tokens in enumerate(ids, start=1):
        try:
            params.token_limit(len(tokens), context)
        except GenerationError as error:
            place = f"prompt {number}: " if len(ids) > 1 else ""
            problems.append(f"{place}{error}")
    if problems:
        raise GenerationError("\n".join(problems))
    return ids


def check_generation(config: NeoXConfig, codec: Tokenizer | None) -> None:
    """Check settings, prompts and the output file. Nothing is created.

    Args:
        config: Configuration of a generation run.
        codec: Tokenizer; None skips the check of the prompts' lengths.

    Raises:
        GenerationError: For everything that `generation_problems` returns, in one message.
    """
    problems = generation_problems(config, codec)
    if problems:
        raise GenerationError("\n".join(map(str, problems)))


def generation_problems(config: NeoXConfig, codec: Tokenizer | None) -> list[Problem]:
    """Return why a run would refuse the request. Arguments as for `check_generation`.

    A file of prompts that is not on this machine, and a directory that cannot be written on it, are `Missing`.
    """
    try:
        params = sampling_params(config)
        way = mode(config)
    except GenerationError as error:
        return _problems_of(error)
    if way == "chat" and params.num_beams > 1:
        message = f"num_beams is {params.num_beams}: a conversation is not searched with beams; set it to 1"
        return [Problem(("num_beams",), message)]
    if way in TYPED:
        return []
    problems: list[Problem] = []
    try:
        copies(config)
    except GenerationError as error:
        problems += _problems_of(error)
    problems += _output_problems(config)
    prompts = config.generation.sample_input_file
    if prompts is None:
        return problems
    try:
        texts = read_prompts(prompts)
        if codec is not None:
            encode_prompts(texts, codec, params, context_length(config))
    except GenerationError as error:
        found = _problems_of(error)
        problems += found if Path(prompts).exists() else Missing.of(found)
    return problems


def _problems_of(error: GenerationError) -> list[Problem]:
    """Return a problem for each line of an error."""
    return [Problem((), line) for line in str(error).splitlines()]


def _output_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield why completions cannot be written to `sample_output_file`."""
    keys = ("sample_output_file",)
    prompts = config.generation.sample_input_file
    out = Path(config.generation.sample_output_file)
    if out.is_dir():
        yield Problem(keys, f"sample_output_file: {out} is a directory")
        return
    parent = unwritable_parent(out)
    if parent is not None:
        yield Missing(keys, f"sample_output_file {out}: nothing can be written in {parent}")
    elif prompts is not None and out.exists() and Path(prompts).exists() and out.samefile(prompts):
        message = f"sample_output_file {out} is the file of prompts (-i), which would be overwritten: name another file"
        yield Problem(keys, message)


def check_output(config: NeoXConfig) -> None:
    """Create the directory of the output file.

    Raises:
        GenerationError: If completions cannot be written there.
    """
    out = config.generation.sample_output_file
    try:
        if mode(config) not in TYPED:
            check_writable(Path(out))
    except OSError as error:
        raise GenerationError(f"sample_output_file {out}: cannot be written ({error.strerror})") from error


def read_prompts(path: str | Path) -> list[str]:
    """Read prompts: one per line, or in a `.jsonl` file one object per line with `context`, `prompt` or `text`.

    Blank lines at the end are ignored.

    Raises:
        GenerationError: If the file cannot be read, has no prompts, or has other blank or malformed lines, which are
            all named with their numbers.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GenerationError(f"{path}: cannot be read as a file of prompts ({reason})") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise GenerationError(f"{path}: contains no prompts; write one per line, or set text_gen_type: unconditional")
    parse = _parse_json_prompt if path.suffix in (".jsonl", ".json") else _parse_prompt
    prompts = []
    problems = []
    for number, line in enumerate(lines, start=1):
        try:
            prompts.append(parse(line.removesuffix("\r")))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise GenerationError("\n".join(problems))
    return prompts


def _parse_prompt(line: str) -> str:
    if not line.strip():
        raise ValueError("empty prompt: remove the line, or set text_gen_type: unconditional")
    return line


def _parse_json_prompt(line: str) -> str:
    if not line.strip():
        raise ValueError("empty line")
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    text = record
    if isinstance(record, dict):
        text = next((record[key] for key in _TEXT_KEYS if key in record), None)
    if not isinstance(text, str):
        raise ValueError(
            f"no prompt: expected a string, or an object with a string under one of {', '.join(_TEXT_KEYS)}"
        )
    if not is_text(text):
        raise ValueError("the prompt contains a lone UTF-16 surrogate (\\ud800 to \\udfff), which is not valid text")
    return _parse_prompt(text)
