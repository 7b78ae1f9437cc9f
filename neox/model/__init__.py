"""The network as torch modules, built from the run plan."""

from neox.model.block import MLPS, RESIDUAL_RULES, Block, TransformerLayer
from neox.model.blocks import BLOCKS
from neox.model.build import build_layer, drawn_weights, initial_weights, initialize
from neox.model.cache import BlockState, KVCache, LayerCache, StateForm
from neox.model.cache_step import CacheStep
from neox.model.context import Aux, BlockContext, Context, add_aux
from neox.model.cross_entropy import LossParts, head_cross_entropy, head_loss_parts, vocab_parallel_cross_entropy
from neox.model.distillation import Direction, TeacherLogits
from neox.model.embedding import Embedding, FinalNorm, Head, LMHead
from neox.model.encoder import MaskedLMHead, SentenceHead
from neox.model.experts import ExpertMLP, GroupedLinear, Router, biased_routers, move_selection_biases
from neox.model.gpt import GPT
from neox.model.handoff import Handoff, attach_losses, broadcast_from_head, forward_over_stages
from neox.model.mixer import Mixer, fp32_values
from neox.model.positions import POSITIONS
from neox.model.score_head import ScoreHead
from neox.model.shared_parameters import share_parameters
from neox.model.soft_prompt import SoftPrompt
from neox.model.stage import NetworkOutput, Stage
from neox.model.watch import ForwardWatch

__all__ = [
    "ForwardWatch",
    "LossParts",
    "BLOCKS",
    "GPT",
    "GroupedLinear",
    "MLPS",
    "POSITIONS",
    "RESIDUAL_RULES",
    "Aux",
    "Block",
    "BlockContext",
    "BlockState",
    "CacheStep",
    "Context",
    "Direction",
    "Embedding",
    "ExpertMLP",
    "FinalNorm",
    "Handoff",
    "Head",
    "KVCache",
    "LMHead",
    "LayerCache",
    "MaskedLMHead",
    "Mixer",
    "NetworkOutput",
    "Router",
    "ScoreHead",
    "SentenceHead",
    "SoftPrompt",
    "TeacherLogits",
    "Stage",
    "StateForm",
    "TransformerLayer",
    "add_aux",
    "attach_losses",
    "biased_routers",
    "broadcast_from_head",
    "build_layer",
    "drawn_weights",
    "forward_over_stages",
    "fp32_values",
    "head_cross_entropy",
    "head_loss_parts",
    "initial_weights",
    "initialize",
    "move_selection_biases",
    "share_parameters",
    "vocab_parallel_cross_entropy",
]
