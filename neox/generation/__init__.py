"""Text out: sampling, beams, and the loop around any model that gives logits.

Names are loaded when first used: the head node checks prompts without waiting for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox.generation.choosing import choose_checkpoint
    from neox.generation.completion import Completion, generate
    from neox.generation.decoding import Continuation, LanguageModel, decode
    from neox.generation.job import generate_all, run_generation
    from neox.generation.load import load_model, runner_of_forward, runner_of_layers
    from neox.generation.params import SamplingParams
    from neox.generation.plan_arguments import add_plan_arguments, one_process, plan_from_arguments, tokenizer_of
    from neox.generation.replicas import over_replicas
    from neox.generation.request import check_generation, check_output, sampling_params
    from neox.generation.runner import ModelRunner, Stage
    from neox.generation.start import start_ranks

_HOMES = {
    "choose_checkpoint": "choosing",
    "Completion": "completion",
    "generate": "completion",
    "Continuation": "decoding",
    "LanguageModel": "decoding",
    "decode": "decoding",
    "generate_all": "job",
    "run_generation": "job",
    "load_model": "load",
    "runner_of_forward": "load",
    "runner_of_layers": "load",
    "SamplingParams": "params",
    "add_plan_arguments": "plan_arguments",
    "one_process": "plan_arguments",
    "plan_from_arguments": "plan_arguments",
    "tokenizer_of": "plan_arguments",
    "over_replicas": "replicas",
    "check_generation": "request",
    "check_output": "request",
    "sampling_params": "request",
    "ModelRunner": "runner",
    "Stage": "runner",
    "start_ranks": "start",
}

__all__ = [
    "Completion",
    "Continuation",
    "LanguageModel",
    "ModelRunner",
    "SamplingParams",
    "Stage",
    "add_plan_arguments",
    "check_generation",
    "check_output",
    "choose_checkpoint",
    "decode",
    "generate",
    "generate_all",
    "load_model",
    "one_process",
    "over_replicas",
    "plan_from_arguments",
    "run_generation",
    "runner_of_forward",
    "runner_of_layers",
    "sampling_params",
    "start_ranks",
    "tokenizer_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
