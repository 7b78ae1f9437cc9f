"""Keys that choose kernels and number formats inside the network."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.unsupported.key import UnsupportedKey, keys


def kernels_and_numbers() -> Iterator[UnsupportedKey]:
    """Yield keys about kernels and numbers."""
    model = "model"
    yield from keys(
        model,
        "v2.0",
        "refused",
        "the fused softmax here is causal: use scaled_upper_triang_masked_softmax_fusion",
        ("scaled_masked_softmax_fusion", "bool", False),
    )
    yield from keys(
        model,
        "v2.0",
        "no effect",
        "bias, dropout and residual are not one kernel here; the results are the same",
        ("bias_dropout_fusion", "bool", False),
    )
    yield from keys(
        model,
        "v2.0",
        "refused",
        "the cross entropy is computed in fp32; leave it out",
        ("fp16_lm_cross_entropy", "bool", False),
    )
    yield from keys(
        model,
        "v2.0",
        "no effect",
        "initial weights are the same on every device and for every degree",
        ("use_cpu_initialization", "bool", False),
    )
    yield from keys(
        model,
        "v2.0",
        "no effect",
        "every attention here computes its softmax in fp32",
        ("attention_softmax_in_fp32", "bool", False),
    )
    yield from keys(
        model,
        "later",
        "no effect",
        "not a kernel of its own here; the results are the same",
        ("layernorm_fusion", "bool", False),
        ("rmsnorm_fusion", "bool", False),
        ("rope_fusion", "bool", False),
        ("use_flashattn_swiglu", "bool", False),
    )
    yield from keys(
        model,
        "later",
        "no effect",
        "kernels are compiled by Triton into its own cache",
        ("fused_kernels_build_path", "str", None),
    )
    yield from keys(
        model,
        "later",
        "refused",
        "rotary frequencies are computed, not stored; checkpoints load with and without them",
        ("rotary_save_freqs_buffer", "bool", False),
    )
    yield from keys(
        model,
        "later",
        "refused",
        "Transformer Engine is not used",
        ("te_columnparallel", "bool", False),
        ("te_rowparallel", "bool", False),
        ("te_layernorm_mlp", "bool", False),
        ("te_mha", "bool", False),
        ("te_fp8_mha", "bool", False),
    )
    yield from keys(
        model,
        "later",
        "dormant",
        "used with Transformer Engine",
        ("te_fp8_format", "str", "hybrid"),
        ("te_fp8_wgrad", "bool", True),
        ("te_fp8_amax_history_len", "int", 1),
        ("te_fp8_amax_compute_algo", "str", "most_recent"),
        ("te_fp8_margin", "int", 0),
    )
    yield from keys(
        "parallelism", "later", "refused", "sequences are not divided over ranks", ("sequence_parallel", "bool", False)
    )
