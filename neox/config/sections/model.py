"""The network: GPT-NeoX's architecture, and BERT's."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from neox.architecture import ACTIVATIONS, NORMS, SPARSITY
from neox.architecture.attention import QueryKeyNormName
from neox.architecture.choices import (
    TRANSFORMER_ENGINE_NORMS,
    ActivationName,
    NormName,
    PositionsName,
)
from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Requires
from neox.config.sections.numbers import NonNegativeInt, PositiveFloat, PositiveFraction, PositiveInt
from neox.config.sections.preferences import OF_PREFERENCES

InitMethod = Literal[
    "normal",
    "scaled_normal",
    "single_residual_scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
]


def _only(*kinds: str) -> OnlyWith:
    return OnlyWith("attention_config", kinds)


_MASKED = OnlyWith("objective", ("masked_lm",))
_NEEDS_MASKED = Requires("objective", ("masked_lm",), advice="remove it, or set objective: masked_lm")
_GELU = Requires("activation", tuple(name for name in ACTIVATIONS if name.startswith("gelu")))
_GATED = tuple(name for name, activation in ACTIVATIONS.items() if activation.width_factor != 1)
_NORMS_BY_NAME = {**NORMS, **{name: NORMS[norm] for name, norm in TRANSFORMER_ENGINE_NORMS.items()}}
_NORMS_OF_HEADS = tuple(name for name, norm in _NORMS_BY_NAME.items() if norm.of_heads)


def _as_pattern(attention_config: Any) -> Any:
    """Return the pattern of one kind of attention in all layers if only its name is there."""
    if isinstance(attention_config, str):
        return (((attention_config,), "all"),)
    return attention_config


def _not_masked(reason: str, *, when: tuple[Any, ...] = (), advice: str = "remove it") -> Excludes:
    """Return the marker of what a masked language model does not have."""
    return Excludes("objective", ("masked_lm",), when=when, reason=reason, advice=advice)


def _norms_of(epsilon_key: str) -> OnlyWith:
    return OnlyWith("norm", tuple(name for name, norm in _NORMS_BY_NAME.items() if norm.epsilon_key == epsilon_key))


_NOT_MUP = Excludes("use_mup", reason="muP has a factor of its own")
_GIVE_WINDOW = "give the width of the window"
_NO_FLASH = "use global or sliding_window"


class SparsityConfig(Section):
    """Patterns of sparse attention, in blocks of tokens. A setting that is not given has the default of its pattern."""

    block: Annotated[PositiveInt | None, _only(*SPARSITY)] = None
    """Number of tokens in a block, by default 16. seq_length must be a multiple of it."""
    different_layout_per_head: Annotated[bool | None, _only("sparse_fixed", "sparse_variable", "bigbird")] = None
    """Whether heads have different random blocks or global patterns."""
    num_local_blocks: Annotated[PositiveInt | None, _only("local", "sparse_fixed")] = None
    """`sparse_fixed`: number of blocks in a local window. `local`: twice the number of earlier blocks that a block
    sees. By default 4."""
    num_global_blocks: Annotated[PositiveInt | None, _only("sparse_fixed", "bigbird")] = None
    """`sparse_fixed`: number of last blocks of each window that all later blocks see. `bigbird`: number of first
    blocks, which see all blocks and which all blocks see. By default 1."""
    num_different_global_patterns: Annotated[PositiveInt | None, _only("sparse_fixed")] = None
    """Number of patterns of global blocks in a window, which heads use in turn; with different_layout_per_head."""
    num_random_blocks: Annotated[NonNegativeInt | None, _only("sparse_variable", "bigbird")] = None
    """Number of earlier blocks that are drawn for each block, by default 1 for `bigbird` and 0 for
    `sparse_variable`."""
    random_seed: Annotated[int | None, _only("sparse_variable", "bigbird")] = None
    """Seed of the random blocks, by default 1234. They depend only on the seed, the layer and the head. (gpt-neox has
    no such key.)"""
    local_window_blocks: Annotated[tuple[int, ...] | None, _only("sparse_variable")] = Field(None, min_length=1)
    """Numbers of blocks in the local windows, by default [4]. Further windows have the last size."""
    global_block_indices: Annotated[tuple[int, ...] | None, _only("sparse_variable", "bslongformer")] = None
    """Blocks that all later blocks see, and that see all blocks in `bslongformer`. By default [0]."""
    global_block_end_indices: Annotated[tuple[int, ...] | None, _only("sparse_variable", "bslongformer")] = None
    """Makes each of global_block_indices a range that ends before this block."""
    num_sliding_window_blocks: Annotated[PositiveInt | None, _only("local", "bigbird", "bslongformer")] = None
    """Width of the sliding window around a block, half of which are earlier blocks. By default 3."""


class SoftPromptSettings(Section):
    """Vectors before the tokens; only they are trained."""

    enabled: Annotated[
        bool,
        _not_masked("", when=(True,)),
        Excludes(
            "pipe_parallel_size",
            above=1,
            when=(True,),
            reason="most stages would have nothing to train",
            advice="use pipe_parallel_size 1",
        ),
    ] = True
    """Whether there is a soft prompt."""
    num_tokens: PositiveInt = 10
    """Number of vectors. They make the sequence that the network computes longer, not that of the data."""
    init_string: str = ""
    """Text from which the prompt starts: the vectors of its tokens, repeated or cut to num_tokens. Needs the
    tokenizer."""
    init_range: PositiveFloat = 0.5
    """Without init_string, the prompt starts from uniform numbers in [-init_range, init_range]."""


MUP_INIT_METHODS = ("normal", "scaled_normal", "wang_init", "small_init")
"""Methods whose deviation is a formula, which muP evaluates at the base width."""

_WITHOUT_MUP = Excludes(
    "use_mup",
    when=tuple(name for name in get_args(InitMethod) if name not in MUP_INIT_METHODS),
    reason="both follow the width",
    advice=f"use one of {', '.join(MUP_INIT_METHODS)}",
)


class ModelConfig(Section):
    """Shapes, positions, residuals, attention and initial weights."""

    precision: Literal["auto", "fp16", "fp32", "bfloat16", "bf16"] | None = None
    """Number format of the forward and backward pass, by default fp32. The blocks `fp16` and `bf16` say the same in
    DeepSpeed's words; a contradiction is refused. `auto` is bf16 if every host trains faster in it (GPUs of compute
    capability 8.0 or more, CPUs with AMX or ARM's bf16, AMD's CPUs with AVX512-BF16), else fp32; a run that resumes
    from a checkpoint keeps its precision."""

    objective: Literal["causal_lm", "masked_lm"] = "causal_lm"
    """What the network learns: `causal_lm` predicts each next token. `masked_lm` is BERT (arXiv:1810.04805): tokens
    attend to all others, and masked tokens are predicted."""

    bert_binary_head: Annotated[bool, _MASKED] = True
    """Also predict from the first token whether the second sentence follows the first. The name is Megatron-LM's."""

    num_tokentypes: Annotated[int | None, _MASKED] = Field(None, ge=0, le=1_000)
    """Rows of the table of token types, which tell the sentences of a pair apart. By default 2 with bert_binary_head,
    else 0. The name is Megatron-LM's."""

    embed_layernorm: bool = False
    """Normalise the sum of the embeddings, as BERT and BLOOM do. Megatron-LM's BERT does not."""

    max_preds_per_seq: Annotated[PositiveInt | None, _MASKED] = None
    """Largest number of masked tokens in a sample; only these go through the head. By default 15 % of seq_length,
    rounded up to a multiple of 10. The name is Megatron-LM's."""

    num_layers: int | None = Field(None, ge=1, le=1_000)
    """Number of transformer layers. Required."""

    hidden_size: int | None = Field(None, ge=1, le=2**24)
    """Width of the hidden states. Required; a multiple of num_attention_heads."""

    num_attention_heads: PositiveInt | None = None
    """Number of attention heads. Required; a multiple of model_parallel_size."""

    num_kv_heads: NonNegativeInt | None = None
    """Number of heads of keys and values, by default (and with 0) num_attention_heads. Each is shared by
    num_attention_heads / num_kv_heads neighbouring heads of queries (arXiv:2305.13245). A multiple of
    model_parallel_size."""

    head_dim: PositiveInt | None = None
    """Width of an attention head, by default hidden_size / num_attention_heads."""

    kv_lora_rank: Annotated[PositiveInt | None, _only("latent"), _NOT_MUP] = None
    """Width of the latent vector from which keys and values are computed in blocks of kind `latent` (multi-head latent
    attention, DeepSeek-V2). The rotary dimensions of a key, int(head_dim * rotary_pct), are shared by all heads; the
    others are computed from the latent vector. Generation caches only the latent vector and the rotary dimensions."""

    q_lora_rank: Annotated[PositiveInt | None, _only("latent")] = None
    """Width of the latent vector from which queries are computed in these blocks. By default queries are computed from
    the hidden states."""

    v_head_dim: Annotated[PositiveInt | None, _only("latent")] = None
    """Width of a head's values in these blocks; by default head_dim."""

    intermediate_size: PositiveInt | None = None
    """Inner width of an MLP without a gate, by default 4 x hidden_size. In a gated MLP each of the two halves is a
    third of it, as in later gpt-neox: 32768 with mlp_multiple_of 256 gives 11008."""

    expansion_factor: Annotated[PositiveFloat | None, Excludes("intermediate_size")] = None
    """intermediate_size as a multiple of hidden_size."""

    mlp_multiple_of: PositiveInt | None = None
    """The inner width that follows from intermediate_size or expansion_factor is rounded up to a multiple of this, by
    default 1. If none of the three is given, `geglu` is 8/3 x hidden_size wide, as in gpt-neox v2.0."""

    mlp_type: Literal["regular", "llama"] = "regular"
    """Key of gpt-neox from May 2023 to September 2024. `llama` means a gated MLP without biases, with `activation` as
    its gate (`silu` becomes `swiglu`). Next to it `intermediate_size` is the width itself, as mlp_width; without it the
    width is 8/3 x hidden_size, rounded up to a multiple of 256."""

    mlp_width: Annotated[
        PositiveInt | None, Excludes("intermediate_size"), Excludes("expansion_factor"), Excludes("mlp_multiple_of")
    ] = None
    """Inner width of the MLP itself, gated or not (Hugging Face's `intermediate_size`), in place of the three keys
    above."""

    seq_length: PositiveInt | None = None
    """Number of tokens in a sample. Required."""

    max_position_embeddings: PositiveInt | None = None
    """Length of the longest sequence that has positions, by default seq_length (gpt-neox requires the key). At least
    seq_length."""

    norm: NormName = "layernorm"
    """Normalisation layer. `rmsnorm` adds its epsilon inside the root, as later gpt-neox and Hugging Face do;
    `rmsnorm_v2.0` adds it outside, as `rmsnorm` of gpt-neox v2.0 does. `rmsnorm_1p` multiplies by 1 + its scale
    (Gemma). `layernorm_no_bias` has a weight only (Command-R). `te_layernorm` and `te_rmsnorm` mean `layernorm`
    and `rmsnorm`."""

    layernorm_epsilon: Annotated[PositiveFloat, _norms_of("layernorm_epsilon")] = 1e-5
    """Number added to the variance inside LayerNorm."""

    rms_norm_epsilon: Annotated[PositiveFloat, _norms_of("rms_norm_epsilon")] = 1e-8
    """Number added to the mean square inside RMSNorm."""

    scalenorm_epsilon: Annotated[PositiveFloat, _norms_of("scalenorm_epsilon")] = 1e-8
    """Smallest norm by which ScaleNorm divides hidden states."""

    pos_emb: Annotated[
        PositionsName,
        _not_masked("it counts distances to earlier tokens only", when=("alibi", "rpe"), advice="use learned"),
    ] = "learned"
    """How positions enter the network: `learned` and `sinusoidal` vectors are added to the tokens' vectors, `rotary`
    positions rotate queries and keys, `alibi` lowers scores with the distance, and `rpe` adds a learned number for each
    distance to scores (T5's buckets, one table for all blocks)."""

    rpe_num_buckets: Annotated[int, OnlyWith("pos_emb", ("rpe",))] = Field(32, ge=2, le=100_000)
    """Rows of the table of relative positions. Each row of the first half is for one distance, each row of the second
    half for a range."""

    rpe_max_distance: Annotated[int, OnlyWith("pos_emb", ("rpe",))] = Field(128, ge=2)
    """Distance from which on all tokens share the last row of the table of relative positions."""

    opt_pos_emb_offset: Annotated[NonNegativeInt, OnlyWith("pos_emb", ("learned",))] = 0
    """Number of rows in the table of learned positions that come before position 0 (2 for OPT). They count among its
    max_position_embeddings rows."""

    rotary_pct: Annotated[PositiveFraction, OnlyWith("pos_emb", ("rotary",))] = 1.0
    """Fraction of each head that is rotated: its first int(head_dim * rotary_pct) dimensions."""

    rotary_emb_base: Annotated[PositiveInt | PositiveFloat, OnlyWith("pos_emb", ("rotary",))] = 10000
    """Base of the rotary frequencies."""

    rope_scaling: Annotated[dict[str, Any] | None, OnlyWith("pos_emb", ("rotary",))] = None
    """Scaling of the rotary frequencies for longer sequences, in Hugging Face's format: a `rope_type` (`linear`,
    `llama3`, `yarn`, `dynamic` or `longrope`) with its settings, such as `{rope_type: linear, factor: 2.0}`. With
    `dynamic` and `longrope`, frequencies depend on the length of a token's document, or of its row if attention crosses
    documents; in generation, on the largest number of tokens that a batch may reach."""

    rotary_emb_base_local: Annotated[
        PositiveInt | PositiveFloat | None,
        OnlyWith("pos_emb", ("rotary",)),
        Requires("sliding_window_width", advice=_GIVE_WINDOW),
    ] = None
    """Base of the rotary frequencies in blocks with a sliding window, whose frequencies are not scaled then (Gemma 3).
    By default these blocks have the base and the scaling of the others."""

    no_rotary_layers: Annotated[tuple[NonNegativeInt, ...], OnlyWith("pos_emb", ("rotary",))] = ()
    """Numbers of the blocks, counted from 0, that rotate neither queries nor keys (SmolLM 3, Command R7B)."""

    no_weight_tying: Annotated[bool, _not_masked("its head multiplies by the embedding's weight")] = False
    """Give the head a weight of its own instead of the embedding's."""

    gpt_j_residual: bool = False
    """Parallel residual: x + attention(ln1(x)) + mlp(ln2(x))."""

    gpt_j_tied: Annotated[bool, OnlyWith("gpt_j_residual")] = False
    """One norm for both, as in GPT-J: x + attention(ln1(x)) + mlp(ln1(x))."""

    norm_placement: Annotated[
        Literal["input", "output", "both", "post"],
        replace(_NEEDS_MASKED, when=("post",)),
        Excludes("gpt_j_residual", when=("output", "both", "post")),
    ] = "input"
    """What is normalised: the `input` of attention and MLP, their `output` before it is added to the residual (OLMo-2),
    `both` (Gemma 2), or the residual after it (`post`, BERT)."""

    embedding_multiplier: Annotated[PositiveFloat, _NOT_MUP] = 1.0
    """Factor of the tokens' vectors (Gemma, Granite). A tied head multiplies by the vectors without it."""

    residual_multiplier: PositiveFloat = 1.0
    """Factor of what attention and MLP add to the residual (Granite)."""

    attention_multiplier: Annotated[PositiveFloat | None, _NOT_MUP] = None
    """Factor of attention's scores, by default 1 / sqrt(head_dim) (Gemma 2, Granite)."""

    attention_softcap: Annotated[
        PositiveFloat | None,
        Excludes("apply_query_key_layer_scaling", reason="both change the scores"),
        Excludes("attention_config", ("flash",), reason="that kernel changes no score", advice=_NO_FLASH),
    ] = None
    """Bound c of attention's scores s, which become c tanh(s / c) (Gemma 2)."""

    attention_sinks: Annotated[
        bool,
        Excludes("apply_query_key_layer_scaling", reason="both change the scores"),
        Excludes("attention_config", ("flash",), reason="that kernel has no sinks", advice=_NO_FLASH),
        Excludes("scaled_upper_triang_masked_softmax_fusion", reason="that kernel has no sinks"),
        Excludes("scaled_masked_softmax_fusion", reason="that kernel has no sinks"),
    ] = False
    """Give each head a trained score that takes part in the softmax and adds nothing, so that the weights of tokens may
    add up to less than 1 (gpt-oss)."""

    attention_output_gate: bool = False
    """Multiply the outputs of attention's heads by the sigmoid of a projection of the hidden states (Qwen3-Next)."""

    logit_multiplier: Annotated[PositiveFloat, _NOT_MUP] = 1.0
    """Factor of the logits (Command-R's `logit_scale`; Granite divides by `logits_scaling`)."""

    logit_softcap: Annotated[PositiveFloat | None, _not_masked("its head has no bound")] = None
    """Bound c of the logits z, which become c tanh(z / c) (Gemma 2)."""

    use_bias_in_attn_linear: bool = True
    """Biases in the projections of attention."""

    use_bias_in_qkv: bool | None = None
    """Biases of queries, keys and values, by default as use_bias_in_attn_linear."""

    use_bias_in_mlp: bool = True
    """Biases in both projections of the MLP."""

    use_bias_in_lm_head: Annotated[bool, OnlyWith("no_weight_tying")] = False
    """A bias of the head, as in GPT-J."""

    use_qk_layernorm: Annotated[
        bool,
        Excludes("qk_norm", ("head", "full"), reason="these are two norms of the same vectors"),
        Requires("norm", _NORMS_OF_HEADS, advice="use norm layernorm or rmsnorm"),
    ] = False
    """Normalise queries and keys as later gpt-neox does: with the network's norm, over the dimensions of each head for
    rmsnorm and of all heads for layernorm. Queries and keys share one scale with a number for every dimension of every
    head."""

    qk_norm: QueryKeyNormName = "none"
    """Normalise queries and keys. `head`: RMSNorm over the dimensions of each head, with one scale for all heads of
    queries and one for all heads of keys (Qwen3). `full`: RMSNorm over the dimensions of all heads (OLMo-2)."""

    sliding_window_width: Annotated[PositiveInt | None, _not_masked("windows see earlier tokens only")] = None
    """Number of tokens that a token attends to, including itself, in blocks of kind `flash` or `sliding_window`;
    without attention_config in all blocks. (gpt-neox's kernel sees one token more.)"""

    output_layer_parallelism: Annotated[Literal["row", "column"], OnlyWith("no_weight_tying")] = "row"
    """Which dimension of the untied head is split over tensor ranks."""

    activation: Annotated[
        ActivationName, _not_masked("its head uses the activation without a gate", when=_GATED, advice="use gelu")
    ] = "gelu"
    """Activation of the MLP. `gelu` is the erf form, or with bias_gelu_fusion `gelu_tanh`, the tanh approximation. In
    `geglu`, `geglu_tanh`, `swiglu`, `reglu`, `glu` and `bilinear`, one half of the MLP's first product is multiplied by
    gelu, its approximation, silu, relu, the sigmoid or the identity of the other half."""

    bias_gelu_fusion: Annotated[bool, _GELU] = False
    """Add the bias and apply the tanh approximation of gelu in one kernel."""

    scaled_upper_triang_masked_softmax_fusion: Annotated[
        bool, _not_masked("that kernel is causal", advice="use scaled_masked_softmax_fusion")
    ] = False
    """Scale, causal mask and softmax of attention scores in one kernel, in blocks whose attention is not `flash` (flash
    goes first in gpt-neox, too). Such blocks work neither with reset_attention_mask, nor with preferences or context
    ranks."""

    scaled_masked_softmax_fusion: Annotated[bool, _MASKED] = False
    """Scale, padding mask and softmax of attention scores in one kernel."""

    apply_query_key_layer_scaling: bool = False
    """Divide attention scores by the number of the layer and multiply them by it again in the softmax, to avoid
    overflows in fp16."""

    attention_config: Annotated[
        tuple[Any, ...] | None, BeforeValidator(_as_pattern, json_schema_input_type=str | tuple[Any, ...] | None)
    ] = None
    """Attention kinds by layer: `flash` for all, or `[[["global"], 12]]`, `[[["local", "global"], "all"]]`. Sparse
    kinds: `local`, `sparse_fixed`, `sparse_variable`, `bigbird`, `bslongformer`. `sliding_window` is `flash` with
    sliding_window_width, `latent` is DeepSeek's with kv_lora_rank. `gmlp` and `amlp` gate over positions instead of
    attending (gMLP); they generate without a cache."""

    sparsity_config: SparsityConfig | None = None
    """Patterns of the sparse kinds of attention_config."""

    hf_architecture: str | None = None
    """Form of exports to Hugging Face (a `model_type`). `tools/convert_from_hf.py` writes it, so that a model goes out
    as what it came in as. By default the first form that can express the network. `--hf-architecture` asks for
    another."""

    soft_prompt_tuning: SoftPromptSettings | None = None
    """Train a soft prompt for a network that does not change. Give the network's checkpoint as `load`, with `finetune:
    true`."""

    mtp_num_layers: Annotated[
        NonNegativeInt | None,
        Excludes("objective", ("masked_lm",), reason="a masked language model has no next tokens"),
        Excludes("train_impl", OF_PREFERENCES, reason="its loss is of whole answers"),
        Excludes("soft_prompt_tuning", reason="only the prompt is trained then"),
        Excludes("train_only_added_tokens", reason="the modules would not be trained"),
        Excludes("pos_emb", ("rpe",), reason="all blocks of the network share its table"),
        Excludes("pipeline_schedule", ("interleaved", "dualpipev"), reason="the modules stand on the last stage"),
    ] = None
    """Number of modules that learn to predict tokens further ahead: module k predicts token k + 1 from the hidden
    states and the tokens up to k ahead (multi-token prediction of DeepSeek-V3, arXiv:2412.19437). Each has a block like
    the last one. Training only: generation and evaluations do not use them. The name is Megatron-LM's."""

    gmlp_attn_dim: Annotated[PositiveInt, _only("amlp")] = 64
    """Width of the attention in `amlp` blocks."""

    make_vocab_size_divisible_by: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times model_parallel_size."""

    init_method: Annotated[InitMethod, _WITHOUT_MUP] = "normal"
    """Initial weights of embeddings and of layers that read hidden states."""

    output_layer_init_method: Annotated[InitMethod, _WITHOUT_MUP] = "scaled_normal"
    """Initial weights of layers that write into the residual (`attention.dense`, `mlp.dense_4h_to_h`)."""

    init_method_std: PositiveFloat = 0.02
    """Standard deviation for `normal`, `scaled_normal` (of which it is divided by the root of 2 x num_layers) and
    `single_residual_scaled_normal` (by that of num_layers, for blocks that add to the residual once, as Mamba's)."""

    @property
    def predicted_tokens(self) -> int | None:
        """Tokens of a sample that go through the head of a masked language model; None if all do."""
        if self.objective != "masked_lm" or self.seq_length is None:
            return None
        return self.max_preds_per_seq or min(self.seq_length, ceil(0.15 * self.seq_length / 10) * 10)
