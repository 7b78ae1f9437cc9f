"""Section of text generation and evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith
from neox.config.sections.numbers import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class GenerationConfig(Section):
    """Prompts, sampling, outputs and evaluation tasks."""

    text_gen_type: Literal["unconditional", "input-file", "interactive", "chat"] | None = None
    """Source of the prompts. `interactive` continues texts that are typed; `chat` keeps a conversation, for models with
    a chat template."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""

    top_p: Fraction = 0.0
    """Sample from the smallest set of tokens that has this probability; 0 is off. If `temperature` is 0, sampling is at
    1."""

    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0 is off. If `temperature` is 0, sampling is at 1."""

    return_logits: bool = False
    """Also write the logits of generated tokens."""

    maximum_tokens: PositiveInt = 64
    """Largest number of tokens that are generated for a prompt."""

    minimum_tokens: NonNegativeInt = 0
    """Number of tokens that are generated for a prompt before it may end."""

    repetition_penalty: PositiveFloat = 1.0
    """Number by which the logits of tokens in the text are divided (multiplied if they are below zero); 1 is off."""

    stop_strings: tuple[str, ...] = ()
    """Strings that end a continuation; they are not part of it."""

    num_beams: PositiveInt = 1
    """Number of beams. More than 1 means beam search instead of sampling."""

    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** length_penalty."""

    generation_batch_size: PositiveInt = 8
    """Number of prompts that are continued in one batch, and of sequences that are scored in one batch."""

    prompt_end: Annotated[str, OnlyWith("text_gen_type", ("interactive",))] = "\n"
    """Text that ends a prompt typed interactively."""

    sample_input_file: str | None = None
    """File of prompts, one in each line."""

    sample_output_file: str = "samples.txt"
    """File that the completions are written to."""

    num_samples: PositiveInt = 1
    """Number of samples without a prompt (text_gen_type: unconditional)."""

    num_return_sequences: PositiveInt = 1
    """Number of continuations of each prompt of an input file."""

    inference_precision: Literal["fp32", "fp16", "bf16"] | None = None
    """Number format of the weights in generation and evaluation, by default that of training. fp32 gives the same
    tokens and scores for every layout of ranks and batches; half precision rounds differently in each."""

    recompute: bool = False
    """Generate without a cache of keys and values."""

    cuda_graphs: bool = False
    """Record a step of decoding as a CUDA graph for each batch, and replay it, if the model is on one GPU. With tensor
    or pipeline ranks, and on CPUs, steps are always run one by one."""

    eval_results_prefix: str = ""
    """Prefix of evaluation result files."""

    eval_tasks: Annotated[
        tuple[str, ...] | None, Excludes("objective", ("masked_lm",), reason="tasks score next tokens")
    ] = None
    """Tasks to evaluate: names of lm-evaluation-harness, YAML files of such tasks, or own tasks as KIND=PATH:
    `wikitext=wiki.test.raw`, `lambada=lambada.jsonl`, `perplexity=my.jsonl`, `perplexity=my_text_document`.
    `perplexity=` scores each document as lm-evaluation-harness does: all its tokens but not its end, per token, per
    word (as `wc -w` counts them) and per byte. `wikitext=` scores a file as Megatron-LM does: its words stand between
    single blanks, and `word_ppl` divides by one less. `needle=PICTURE.svg` hides pass keys in synthetic texts of up to
    seq_length tokens, and draws where they are found."""

    eval_stride: PositiveInt | None = None
    """Number of tokens by which the windows of `perplexity=` and `wikitext=` advance; each is seq_length long. By
    default they do not overlap, but the last one of a document of `perplexity=` reaches back to its full length."""

    eval_num_fewshot: NonNegativeInt | None = None
    """Number of examples shown before each question of harness tasks; by default the task's own number."""

    eval_limit: PositiveInt | None = None
    """Score only this many examples of each task, for a quick look: passages of `lambada=`, documents of `perplexity=`,
    articles of `wikitext=`, texts for each place of `needle=`, and the examples of a harness task."""
