"""Memory of the head and the loss on one rank: what it keeps, and the logits of one chunk of tokens.

The formulas use the words of `activations.py`, and

    chunk   logits of one chunk: at most `LOSS_CHUNK`, of whole tokens, vocabulary / split of each
"""

from __future__ import annotations

from neox.architecture import LOSS_CHUNK, LayerPlan
from neox.plan.memory.setting import MemorySetting

_FP32 = 4
_INT64 = 8
# Bytes of a teacher's logit while the tokens of a chunk are compared: its id in three forms, and seven fp32 numbers.
_COMPARED = 3 * _INT64 + 7 * _FP32


def head_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes of head and loss, which hold the logits of one chunk of tokens at a time.

    Kept until the backward pass: gradients of the hidden states, predicted tokens x H x number, and of the head's
    weight in fp32, vocabulary / split x H x 4. In addition there are what a chunk needs or, if that is more, the
    weight's gradient in the weight's type. Preferences copy the hidden states of answers, at most all; and a teacher's
    ids and logits take 12 x tokens x their number.
    """
    if layers.architecture.score_head:
        return 0  # numbers of a few tokens
    number = setting.bytes_per_number
    hidden = layers.architecture.hidden_size
    tokens = setting.micro_batch_size * setting.predicted_tokens // setting.cp_size
    weight = layers.padded_vocab_size // setting.tp_size * hidden
    hidden_states = tokens * hidden * number
    if setting.scores_answers:
        hidden_states *= 2
    weight_gradient = weight * number if number < _FP32 else 0
    teacher = tokens * setting.teacher_logits * (_INT64 + _FP32)
    return hidden_states + teacher + _FP32 * weight + max(_chunk_bytes(layers, setting, tokens), weight_gradient)


def _chunk_bytes(layers: LayerPlan, setting: MemorySetting, tokens: int) -> int:
    """Return bytes of what the loss of one chunk of tokens needs."""
    vocabulary = layers.padded_vocab_size // setting.tp_size
    largest_chunk = LOSS_CHUNK["cpu" if setting.on_cpu else "cuda"]
    rows = min(tokens, max(1, largest_chunk // vocabulary))
    of_logit = setting.bytes_per_number
    if layers.architecture.logit_softcap:
        of_logit *= 2  # the slope of the bounded logits
    if setting.teacher_logits or setting.on_cpu:
        of_logit += _fp32_bytes(setting)
    return rows * (vocabulary * of_logit + setting.teacher_logits * _COMPARED)


def _fp32_bytes(setting: MemorySetting) -> int:
    """Return bytes that distillation, or any loss on a CPU, needs for a logit next to the logit itself.

    They compute in fp32: 4 unless logits are fp32, and 4 for those that are divided by a temperature. In addition there
    are on a GPU 4 for exponentials, which a CPU sums without keeping them, or else the gradient if it is not fp32.
    """
    number = setting.bytes_per_number
    total = 0
    if number < _FP32:
        total += _FP32
    if setting.tempered_logits:
        total += _FP32
    if not setting.on_cpu:
        return total + _FP32
    if number < _FP32:
        total += number
    return total
