"""Memory of the head and the loss on one rank: tensors kept for the backward pass, and the logits of one chunk.

The formulas use the terms of `activations.py`, and

    chunk   logits of a chunk of whole tokens: at most `LOSS_CHUNK`, vocabulary / tp_size for each token
"""

from __future__ import annotations

from neox.architecture import LOSS_CHUNK
from neox.devices import family_has
from neox.plan.layout import Workload

_FP32 = 4
_INT64 = 8
# Bytes per teacher logit while a chunk is computed: its id in three int64 tensors, and seven fp32 numbers.
_TEACHER_TEMPORARIES = 3 * _INT64 + 7 * _FP32


def head_bytes(run: Workload) -> int:
    """Return the bytes of head and loss, which hold the logits of one chunk of tokens at a time.

    Kept until the backward pass: the gradients of the hidden states, predicted tokens x H x number, and of the head's
    weight in fp32, vocabulary / tp_size x H x 4, if it is trained. Added to them is the larger of the temporaries of a
    chunk, with what it adds to the weight's gradient, and of that gradient in the weight's dtype. Preference losses
    copy the hidden states of answers, at worst of all tokens. A teacher's ids and logits take 12 x tokens x logits per
    token. Each module of multi-token prediction goes through the head, too, and has gradients of its own until the
    backward pass adds them up.
    """
    if run.network.score_head:
        return 0  # scores of a few tokens only
    number = run.bytes_per_number
    hidden = run.network.hidden_size
    tokens = run.layout.micro_batch_size * run.predicted_tokens // run.layout.cp_size
    weight = 0
    if run.layers.trains_head:
        weight = run.layers.padded_vocab_size // run.layout.tp_size * hidden
    hidden_states = tokens * hidden * number
    if run.config.preferences.on_preferences:
        hidden_states *= 2
    weight_gradient = weight * number if number < _FP32 else 0
    teacher = tokens * run.config.distillation.logits_of_token * (_INT64 + _FP32)
    heads = 1 + run.network.mtp_num_layers
    kept = heads * (hidden_states + _FP32 * weight)
    return kept + teacher + max(_chunk_bytes(run, tokens, weight_gradient), weight_gradient)


def _chunk_bytes(run: Workload, tokens: int, product: int) -> int:
    """Return the bytes of the temporaries of one chunk of tokens.

    Args:
        run: The run.
        tokens: Predicted tokens on this rank.
        product: Bytes of what the chunk adds to the weight's gradient, next to the gradient of its logits; some devices
            add it inside the product.
    """
    vocabulary = run.layers.padded_vocab_size // run.layout.tp_size
    largest_chunk = LOSS_CHUNK["cpu" if run.on_cpu else "accelerator"]
    rows = min(tokens, max(1, largest_chunk // vocabulary))
    bytes_per_logit = run.bytes_per_number
    if run.network.logit_softcap:
        bytes_per_logit *= 2  # the derivative of the softcap
    if run.config.distillation.logits_of_token or run.on_cpu:
        bytes_per_logit += _fp32_bytes(run)
    of_gradient = 0
    if not family_has(run.family, "product_added_to_fp32"):
        of_gradient = rows * vocabulary * run.bytes_per_number + product
    of_loss = rows * (vocabulary * bytes_per_logit + run.config.distillation.logits_of_token * _TEACHER_TEMPORARIES)
    return max(of_loss, of_gradient)


def _fp32_bytes(run: Workload) -> int:
    """Return the additional bytes per logit of distillation, and of any loss on a CPU, which compute in fp32.

    4 for a copy in fp32 unless the logits are fp32, and 4 for the logits divided by a temperature. On a GPU, 4 for the
    exponentials. A CPU adds exponentials up without keeping them; there the gradient counts if it is not fp32.
    """
    number = run.bytes_per_number
    total = 0
    if number < _FP32:
        total += _FP32
    if run.config.distillation.tempers_all_logits:
        total += _FP32
    if not run.on_cpu:
        return total + _FP32
    if number < _FP32:
        total += number
    return total
