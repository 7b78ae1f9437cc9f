"""Section of text generation and evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import OnlyWith, Section


class GenerationConfig(Section):
    """Prompts, sampling, outputs and evaluation tasks."""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = None
    """Source of the prompts."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""

    top_p: float = Field(0.0, ge=0, le=1)
    """Sample from the smallest set of tokens with this probability; 0 is off. With `temperature` 0 it samples at 1."""

    top_k: int = Field(0, ge=0)
    """Sample from this many most likely tokens; 0 is off. With `temperature` 0 it samples at 1."""

    return_logits: bool = False
    """Also write the logits of generated tokens."""

    maximum_tokens: int = Field(64, ge=1)
    """Largest number of tokens generated for a prompt."""

    minimum_tokens: int = Field(0, ge=0)
    """Tokens generated for a prompt before it may end."""

    repetition_penalty: float = Field(1.0, gt=0)
    """Divides (or, below zero, multiplies) the logits of tokens already in the text; 1 is off."""

    stop_strings: tuple[str, ...] = ()
    """Strings that end a continuation; they are not part of it."""

    num_beams: int = Field(1, ge=1)
    """More than 1: beam search with that many beams, instead of sampling."""

    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** length_penalty."""

    generation_batch_size: int = Field(8, ge=1)
    """Prompts continued in one batch, and sequences scored in one batch."""

    prompt_end: Annotated[str, OnlyWith("text_gen_type", ("interactive",))] = "\n"
    """Text that ends a prompt typed interactively."""

    sample_input_file: str | None = None
    """File of prompts, one per line."""

    sample_output_file: str = "samples.txt"
    """File the completions are written to."""

    num_samples: int = Field(1, ge=1)
    """Number of samples without a prompt (text_gen_type: unconditional)."""

    num_return_sequences: int = Field(1, ge=1)
    """Continuations of each prompt of an input file."""

    inference_precision: Literal["fp32", "fp16", "bf16"] | None = None
    """Number format of the weights in generation and evaluation; that of training where unset. fp32 gives the same
    tokens and scores for every layout of ranks and batches; half precision rounds differently with each."""

    recompute: bool = False
    """Generate without a cache of keys and values."""

    cuda_graphs: bool = False
    """Record a step of decoding as a CUDA graph for each batch and replay it, where the model is on one GPU. With
    tensor or pipeline ranks, and on CPUs, steps are always run one by one."""

    eval_results_prefix: str = ""
    """Prefix of evaluation result files."""

    eval_tasks: tuple[str, ...] | None = None
    """Tasks to evaluate: names of lm-evaluation-harness, YAML files of such tasks, or own tasks as KIND=PATH:
    `wikitext=wiki.test.raw`, `lambada=lambada.jsonl`, `perplexity=my.jsonl`, `perplexity=my_text_document`."""

    eval_stride: int | None = Field(None, ge=1)
    """Tokens by which the windows of a perplexity advance, each seq_length long; no overlap where unset."""

    eval_num_fewshot: int | None = Field(None, ge=0)
    """Examples shown before each question of harness tasks; the task's own number where unset."""

    eval_limit: int | None = Field(None, ge=1)
    """Score only the first so many examples of each task, for a quick look: passages of `lambada=`, documents of
    `perplexity=`, articles of `wikitext=`, and the examples of a harness task."""
