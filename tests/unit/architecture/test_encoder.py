"""Bidirectional encoders on paper: layers, parameters, operations and memory."""

from __future__ import annotations

from neox.architecture import forward_flops_per_token
from neox.config import NeoXConfig
from neox.plan import architecture_of, yaml_keys
from neox.plan.memory.activations import activation_bytes
from tests.plans import ENCODERS, SMALL, small_plan

BASE = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 512}


def bert(name: str = "bert", **keys):
    return small_plan(padded_vocab_size=keys.pop("rows", 30522), **{**ENCODERS[name], **keys})


def test_parameters_of_bert_base_are_the_published_ones():
    plan = bert(**BASE, max_position_embeddings=512)
    assert plan.layers.numel == 110_106_428  # google-bert/bert-base-uncased with both heads
    assert plan.architecture.token_types == 2
    assert plan.config.model.predicted_tokens == 4
    assert bert(**BASE, max_position_embeddings=512, max_preds_per_seq=None).config.model.predicted_tokens == 80


def test_layers_have_gpt_neox_s_numbers_and_a_final_norm_where_blocks_read_normalised_states():
    for name, ends in (
        ("bert", ["identity", "identity", "masked_lm_head", "sentence_head"]),
        ("megatron_bert", ["identity", "norm", "masked_lm_head", "sentence_head"]),
        ("rotary without sentences", ["identity", "norm", "masked_lm_head"]),
    ):
        layers = bert(name).layers
        assert [layer.kind for layer in layers][4:] == ends
        assert layers.head.index == 6
        assert layers.head.tied_to == 0


def test_keys_come_back_from_the_architecture():
    for name in ENCODERS:
        network = bert(name).architecture
        assert network.bidirectional
        assert architecture_of(NeoXConfig.from_flat(yaml_keys(network))) == network


def test_operations_count_the_masked_tokens_alone_in_the_head():
    plan = bert()
    hidden, rows, length, predicted = 32, 30522, 16, 4
    _, head = forward_flops_per_token(plan.layers, length, predicted)
    pooler = 2 * hidden * (hidden + 2)
    assert head == 2 * hidden * (hidden + rows) * predicted // length + pooler // length
    assert forward_flops_per_token(plan.layers, length)[1] > 3 * head


def test_memory_follows_the_predicted_tokens():
    rows, sequences = 2**17, SMALL["train_micro_batch_size_per_gpu"]
    plans = [bert(rows=rows, max_preds_per_seq=n) for n in (1, 16)]
    # of the head alone: the peak of so small a network is where the gradients of the tied weight are added
    one, sixteen = (activation_bytes(plan.workload, plan.stages[0]).head_pass for plan in plans)
    fp32_logits = 15 * sequences * rows * 4  # of the 15 tokens more
    assert fp32_logits <= sixteen - one <= 1.01 * fp32_logits


def test_stages_hold_each_parameter_and_a_copy_of_the_tied_weight():
    plan = bert(world_size=2, pipe_parallel_size=2)
    assert sum(stage.parameters for stage in plan.stages) >= plan.layers.numel + 30522 * 32
    assert plan.stages[-1].holds(plan.layers.head.index)
