"""Text out: sampling, beams, and the loop around any model that gives logits."""

from neox.generation.completion import Completion, generate
from neox.generation.decoding import Continuation, LanguageModel, decode
from neox.generation.job import check_generation, check_output, generate_all, run_generation, sampling_params
from neox.generation.load import choose_checkpoint, load_model, runner_of_forward, runner_of_layers
from neox.generation.params import SamplingParams
from neox.generation.plan_arguments import add_plan_arguments, one_process, plan_from_arguments, tokenizer_of
from neox.generation.replicas import over_replicas
from neox.generation.runner import ModelRunner, Stage

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
    "tokenizer_of",
]
