"""`Architecture`: what a network computes, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from math import nextafter
from types import MappingProxyType
from typing import Any, NamedTuple, Self

_FINETUNE = {"finetune": True}
"""Marks fields that may differ from the checkpoint's when a model is fine-tuned."""
_TRAINING_ONLY = {"compared": False}
"""Marks fields that change only how the network is trained. A checkpoint fits whatever their values."""

Pairs = tuple[tuple[str, Any], ...]
"""A dictionary as a hashable value: its sorted items, lists in it as tuples."""


def frozen(value: Any) -> Any:
    """Return a value of a YAML or JSON file as a hashable one: lists as tuples, dictionaries as `Pairs`."""
    if isinstance(value, Mapping):
        return tuple(sorted((key, frozen(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    return value


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, as a new dictionary: those whose value is not None."""
    return {key: value for key, value in settings.items() if value is not None}


def thawed(value: Any) -> Any:
    """Return a value as JSON has it: tuples, and those inside them, as lists."""
    if isinstance(value, tuple):
        return list(map(thawed, value))
    return value


WITHOUT_LOGITS: Mapping[str, Any] = MappingProxyType(
    {"tie_word_embeddings": False, "head_bias": False, "logit_multiplier": 1.0, "logit_softcap": 0.0}
)
"""Fields that only a language model head uses -> their values in a network with a score head."""

WITHOUT_ATTENTION: Mapping[str, Any] = MappingProxyType(
    {
        "num_attention_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "qkv_bias": False,
        "attention_output_bias": False,
        "rotary_ndims": 0,
        "rotary_base": 0.0,
        "rope_scaling": (),
        "value_head_dim": 0,
    }
)
"""Fields that only blocks with attention use -> their values in a network without any."""
WITHOUT_MLP: Mapping[str, Any] = MappingProxyType(
    {"mlp_width": 0, "mlp_bias": False, "activation": "silu", "residual": "sequential"}
)
"""Fields that only blocks with an MLP use -> their values in a network without any."""


class NetworkFields(Enum):
    """Fields of a network that are compared with a checkpoint's."""

    ALL = "all"
    FIXED = "those that stay the same in fine-tuning"
    ADJUSTABLE = "those that fine-tuning may change"


class Difference(NamedTuple):
    """One field in which a checkpoint's network differs from the one that loads it."""

    field: str
    saved: Any
    wanted: Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformer: a decoder, or a bidirectional encoder. It holds no padding, dropout, precision or kernel choice.

    Defaults are those of networks like GPT-NeoX-20B.

    Attributes:
        num_layers: Number of blocks.
        hidden_size: Width of the hidden states.
        num_attention_heads: Number of query heads of a block; 1 if no block has attention.
        num_kv_heads: Number of key and value heads. Each serves `num_attention_heads / num_kv_heads` neighbouring
            query heads.
        head_dim: Width of one head; 1 if no block has attention.
        mlp_width: Inner width of the MLP, after the activation; 0 if no block has an MLP.
        activation: Key of `ACTIVATIONS`.
        norm: Key of `NORMS`.
        norm_epsilon: Epsilon of the norms; 0 if the norm has none.
        qkv_bias: Whether queries, keys and values have biases.
        attention_output_bias: Whether attention's output projection has a bias.
        mlp_bias: Whether both projections of the MLP have biases.
        head_bias: Whether the head adds a bias to the logits.
        qk_norm: Key of `QUERY_KEY_NORMS`: the norm of queries and keys, before positions.
        residual: Key of `RESIDUALS`: how a block adds its sublayers to its input, and where its norms are.
        positions: Key of `POSITIONS`.
        rotary_ndims: Leading dimensions of each head that are rotated; 0 if positions are not rotary.
        rotary_base: Base of the rotary frequencies; 0 if positions are not rotary.
        rope_scaling: Hugging Face's dictionary of that name as sorted pairs (key, value); () for none.
        local_rotary_base: Base in blocks with a window, whose frequencies are not scaled then; 0 for the base and the
            scaling of the other blocks.
        unrotated_blocks: Numbers of the blocks that rotate nothing, although positions are rotary.
        learned_offset: Number of rows before that of position 0 in a table of learned positions.
        rpe_buckets: Rows of the table of relative positions; 0 if positions are not `rpe`.
        rpe_max_distance: Distance from which relative positions share a row; 0 if positions are not `rpe`.
        max_positions: Longest sequence that the network is meant for, in tokens, and rows of a table of learned
            positions. No parameter of other positions depends on it, so checkpoints are not compared in it.
        attention: Key of `BLOCKS` for each block.
        window: Keys that a query of a `sliding_window` block sees, with its own; 0 without such blocks.
        latent_width: Width of the latent vector from which `latent` blocks compute keys and values; 0 without such
            blocks.
        query_latent_width: Width of the latent vector from which they compute queries; 0 if from the hidden states.
        value_head_dim: Width of a head's values in these blocks; 0 without such blocks.
        sparsity: Settings of sparse attention as sorted pairs (key, value); () without it.
        gmlp_width: Inner width of the attention in `amlp` blocks; 0 without such blocks.
        mamba_heads: Number of heads of `mamba2` blocks; 0 without such blocks.
        mamba_head_dim: Channels of one of these heads; 0 without such blocks.
        mamba_groups: Number of groups of heads that share B and C; 0 without such blocks.
        mamba_width: Channels of `mamba` blocks; 0 without such blocks.
        mamba_dt_rank: Width of the steps before their projection to these channels; 0 without such blocks.
        mamba_state: Elements of the state of one channel in blocks of Mamba; 0 without such blocks.
        mamba_conv: Tokens that the convolution of these blocks sees; 0 without such blocks.
        mamba_conv_bias: Whether this convolution has a bias.
        mamba_linear_bias: Whether the projections of these blocks have biases.
        linear_key_heads: Number of heads of queries and keys in `gated_delta` blocks; 0 without such blocks.
        linear_value_heads: Number of heads of values in these blocks, a multiple of the former.
        linear_key_dim: Width of a key in these blocks; 0 without them.
        linear_value_dim: Width of a value in these blocks; 0 without them.
        linear_conv: Tokens that the convolution of these blocks sees; 0 without them.
        linear_negative_eigenvalues: Whether their writes may have twice the strength, so that a state can change sign.
        linear_norm_epsilon: Epsilon of the norm of their heads; 0 without them.
        linear_residual: Key of `RESIDUALS` in these blocks; empty for that of the network.
        rwkv_width: Width of time mixing in `rwkv` blocks; 0 without such blocks.
        rwkv_heads: Number of its heads; 0 without such blocks.
        rwkv_mlp_width: Width of channel mixing in these blocks; 0 without them.
        soft_prompt_tokens: Number of trained vectors before the tokens; 0 for none.
        tie_word_embeddings: Whether the head multiplies by the embedding's weight.
        attention_scale: Factor of attention's scores; 0 for 1 / sqrt(head_dim).
        attention_softcap: Bound c of attention's scores s, which become c tanh(s / c); 0 for none.
        attention_sinks: Whether each head has a trained score that takes part in the softmax and adds nothing.
        attention_output_gate: Whether the outputs of attention's heads are multiplied by the sigmoid of a projection of
            the hidden states.
        residual_multiplier: Factor of what a sublayer adds to the residual stream.
        embedding_multiplier: Factor of the tokens' vectors.
        position_multiplier: Factor of the positions' vectors.
        logit_multiplier: Factor of the logits.
        logit_softcap: Bound c of the logits z, which become c tanh(z / c); 0 for none.
        bidirectional: Whether tokens also attend to later ones. The head is that of masked language modelling then: a
            dense layer, activation and norm before the embedding's weight, and a bias of the logits (BERT).
        token_types: Rows of a table of token types, whose vectors are added to the tokens'; 0 for none.
        embedding_norm: Whether the sum of the embeddings is normalised.
        sentence_head: Whether a bidirectional network also predicts if the second sentence of a sample follows the
            first one: by a dense layer with tanh on the first token's hidden state (the pooler), and two logits.
        score_head: Whether the head computes a score instead of logits, as in a reward model.
        mtp_num_layers: Number of modules behind the network that predict tokens further ahead, in training only
            (`neox.architecture.multi_token`).
        num_experts: Number of experts in the blocks that have experts instead of one MLP; 0 for none.
        expert_blocks: Numbers of these blocks.
        experts_per_token: Number of experts that compute each token.
        expert_width: Inner width of one expert.
        expert_bias: Whether both linear layers of the routed experts have biases.
        shared_expert_width: Inner width of an expert that computes every token; 0 for none.
        shared_expert_gate: Whether its output is multiplied by the sigmoid of a number for each token.
        router: Key of `ROUTERS`: how experts are chosen; empty without experts.
        router_logit_bias: Whether a trained bias per expert is added to the router's logits.
        router_normalizes: Whether the weights of a token's experts are divided by their sum.
        router_groups: Number of groups of experts; a token chooses some groups first. 0 for no groups.
        router_top_groups: Number of groups that a token chooses.
        router_group_best: Number of best expert scores in a group that are added up to the group's score.
        router_scale: Factor of the weights.
        router_bias: Whether a bias of each expert is added to scores for the choice, not for the weights. It moves
            towards equal shares after each step, without a gradient.
        router_bias_rate: Distance that it moves in a step.
        router_jitter: The router's inputs are multiplied by random numbers in 1 - jitter to 1 + jitter in training.
        expert_capacity: Most tokens of one expert, as a multiple of equal shares; 0 for no limit.
        balance_coefficient: Factor of the loss that balances experts.
        balance_per_sample: Whether that loss is the mean over samples of each one's, instead of one over all tokens.
        z_coefficient: Factor of the loss that keeps the router's logits small.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    activation: str
    norm: str
    norm_epsilon: float
    qkv_bias: bool = True
    attention_output_bias: bool = True
    mlp_bias: bool = True
    head_bias: bool = False
    qk_norm: str = "none"
    residual: str
    positions: str = field(metadata=_FINETUNE)
    rotary_ndims: int = field(metadata=_FINETUNE)
    rotary_base: float = field(metadata=_FINETUNE)
    rope_scaling: Pairs = field(default=(), metadata=_FINETUNE)
    local_rotary_base: float = field(default=0.0, metadata=_FINETUNE)
    unrotated_blocks: tuple[int, ...] = field(default=(), metadata=_FINETUNE)
    learned_offset: int = field(default=0, metadata=_FINETUNE)
    rpe_buckets: int = field(default=0, metadata=_FINETUNE)
    rpe_max_distance: int = field(default=0, metadata=_FINETUNE)
    max_positions: int = field(metadata={"stored": False})  # compared if positions are learned
    attention: tuple[str, ...] = field(metadata=_FINETUNE)
    window: int = field(default=0, metadata=_FINETUNE)
    latent_width: int = 0
    query_latent_width: int = 0
    value_head_dim: int = 0
    sparsity: Pairs = field(default=(), metadata=_FINETUNE)
    gmlp_width: int = 0
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_groups: int = 0
    mamba_width: int = 0
    mamba_dt_rank: int = 0
    mamba_state: int = 0
    mamba_conv: int = 0
    mamba_conv_bias: bool = False
    mamba_linear_bias: bool = False
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_conv: int = 0
    linear_negative_eigenvalues: bool = False
    linear_norm_epsilon: float = 0.0
    linear_residual: str = ""
    rwkv_width: int = 0
    rwkv_heads: int = 0
    rwkv_mlp_width: int = 0
    soft_prompt_tokens: int = field(default=0, metadata=_FINETUNE)
    tie_word_embeddings: bool = field(metadata=_FINETUNE)
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    attention_sinks: bool = False
    attention_output_gate: bool = False
    residual_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    position_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0
    bidirectional: bool = False
    token_types: int = 0
    embedding_norm: bool = False
    sentence_head: bool = False
    score_head: bool = field(default=False, metadata=_FINETUNE)
    mtp_num_layers: int = field(default=0, metadata=_FINETUNE)
    num_experts: int = 0
    expert_blocks: tuple[int, ...] = ()
    experts_per_token: int = field(default=0, metadata=_FINETUNE)
    expert_width: int = 0
    expert_bias: bool = False
    shared_expert_width: int = 0
    shared_expert_gate: bool = False
    router: str = field(default="", metadata=_FINETUNE)
    router_logit_bias: bool = False
    router_normalizes: bool = field(default=False, metadata=_FINETUNE)
    router_groups: int = field(default=0, metadata=_FINETUNE)
    router_top_groups: int = field(default=0, metadata=_FINETUNE)
    router_group_best: int = field(default=0, metadata=_FINETUNE)
    router_scale: float = field(default=1.0, metadata=_FINETUNE)
    router_bias: bool = False
    router_bias_rate: float = field(default=0.0, metadata=_TRAINING_ONLY)
    router_jitter: float = field(default=0.0, metadata=_TRAINING_ONLY)
    expert_capacity: float = field(default=0.0, metadata=_TRAINING_ONLY)
    balance_coefficient: float = field(default=0.0, metadata=_TRAINING_ONLY)
    balance_per_sample: bool = field(default=False, metadata=_TRAINING_ONLY)
    z_coefficient: float = field(default=0.0, metadata=_TRAINING_ONLY)

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens that there are positions for."""
        return self.max_positions - self.learned_offset

    @property
    def mlp(self) -> tuple[str, ...]:
        """Kind of each block's MLP: a key of `MLPS`."""
        kinds = ["dense"] * self.num_layers
        for number in self.expert_blocks:
            kinds[number] = "experts"
        return tuple(kinds)

    @property
    def unused_fields(self) -> frozenset[str]:
        """Fields without effect: those of dense MLPs if all blocks have experts, those of logits with a score head."""
        unused: set[str] = set()
        if len(self.expert_blocks) == self.num_layers:
            unused.update(("mlp_width", "mlp_bias"))
        if self.score_head:
            unused.update(WITHOUT_LOGITS)
        return frozenset(unused)

    @property
    def attended_heads(self) -> int:
        """Heads of keys and values as queries see them."""
        if self.qk_norm == "neox":
            return self.num_attention_heads  # gpt-neox's norm gives each query head keys of its own
        return self.num_kv_heads

    @property
    def parallel_residual(self) -> bool:
        """Whether attention and MLP read the same hidden states, so that their results are reduced together."""
        return self.residual.startswith("parallel")

    @property
    def rotary_fraction(self) -> float:
        """The fraction of each head that is rotated: int(head_dim * fraction) is `rotary_ndims`."""
        fraction = self.rotary_ndims / self.head_dim
        if int(self.head_dim * fraction) < self.rotary_ndims:
            return nextafter(fraction, 1.0)  # the quotient was rounded down
        return fraction

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return {name: thawed(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the architecture that `to_dict` described."""
        return cls(**{name: frozen(value) for name, value in values.items()})

    def differences(self, saved: Mapping[str, Any], among: NetworkFields = NetworkFields.ALL) -> list[Difference]:
        """List the fields in which a checkpoint's network is another one.

        Args:
            saved: Field name -> value, as far as the checkpoint stores them; other fields are not compared.
            among: The fields that are compared.

        Returns:
            One `Difference` per field, in the order of the fields.
        """
        found = []
        for checked in fields(self):
            wanted = getattr(self, checked.name)
            if checked.name not in saved or saved[checked.name] == wanted:
                continue
            if not checked.metadata.get("compared", True) or checked.name in self.unused_fields:
                continue
            if not checked.metadata.get("stored", True) and self.positions != "learned":
                continue
            group = NetworkFields.FIXED
            if checked.metadata.get("finetune", False):
                group = NetworkFields.ADJUSTABLE
            if among in (NetworkFields.ALL, group):
                found.append(Difference(checked.name, saved[checked.name], wanted))
        return found
