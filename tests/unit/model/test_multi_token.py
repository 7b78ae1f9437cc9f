"""Multi-token prediction against a transcription of DeepSeek-V3's formulas (arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from neox.architecture import training_flops_per_token
from neox.engine.build_engine import multiply_in_fp8
from neox.model import GPT, Context
from neox.model.context import BlockContext
from neox.objectives import Objective, build_objective, evaluated_objective, unpack_rows, with_tokens_ahead
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from tests.losses import score_rows
from tests.plans import small_plan

TOKENS = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))
LABELS = torch.cat((TOKENS[:, 1:], torch.tensor([[5], [7]])), 1)
WEIGHTS = torch.ones(TOKENS.shape) / TOKENS.numel()

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "rms_norm_epsilon": 1e-6, "mtp_loss_scaling_factor": 0.3}
RWKV = {"attention_config": [[["rwkv"], "all"]], "pos_emb": "none", "head_size": 8}
EXPERTS = {
    **LLAMA,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_aux_loss_coeff": 0.1,
}


def trained_loss(plan: RunPlan, model: GPT, objective: Objective, **fields: Any) -> Tensor:
    """Return the objective's packed scores of the batch, the trained loss first."""
    batch: dict[str, Tensor] = {"tokens": TOKENS, "labels": LABELS, "loss_mask": WEIGHTS, **fields}
    if plan.architecture.mtp_num_layers:
        batch = with_tokens_ahead(batch, plan.architecture.mtp_num_layers, "loss_mask")
    inputs = objective.inputs(batch)
    tokens = inputs.pop("tokens")
    return model(tokens, Context(**inputs), lambda output: objective.scores(output, objective.targets(batch)))


def paper_loss(model: GPT, tokens: Tensor, labels: Tensor, depths: int) -> Tensor:
    """Return the mean over depths of -1/T sum log P(t), term by term as in equations 21 to 25.

    Only `model`'s embedding, network and head are used as they are, and the transformer block of each module, on the
    positions 1 to T - k, so that nothing behind them can have an effect.
    """

    def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale

    samples, length = tokens.shape
    hidden = model.hidden(tokens)  # h of depth 0
    words = model.stage.layers[0]
    head = model.stage.head
    total = torch.zeros(())
    for depth in range(1, depths + 1):
        module = model.stage.layers[len(model.stage.layers) - depths + depth - 1]
        kept = length - depth
        embedded = words(tokens[:, depth:])
        both = torch.cat((rms_norm(embedded, module.enorm.scale), rms_norm(hidden[:, :kept], module.hnorm.scale)), -1)
        x = both @ module.eh_proj.weight.t()
        stage_range = model.stage.ranges[0]
        context: BlockContext = stage_range.block_context(x, kept, Context())
        x, _ = module.block(x, context)
        hidden = rms_norm(x, module.shared_head.norm.scale)
        logits = head.logits(hidden)
        for sample in range(samples):
            for i in range(kept):
                target = labels[sample, i + depth]
                total = total - F.log_softmax(logits[sample, i], -1)[target] / (length * samples)
    return total / depths


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize("keys", [LLAMA, {**LLAMA, "no_weight_tying": False}], ids=["untied", "tied"])
def test_loss_and_gradients_are_those_of_the_published_formula(keys: dict[str, Any], depths: int):
    plan = small_plan(**keys, mtp_num_layers=depths)
    model = GPT(plan, ParallelGrid.single())
    objective = build_objective(plan)
    assert objective.names == ("total_loss", "lm_loss", "mtp_loss")
    scores = trained_loss(plan, model, objective)
    scores[0].backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    logits = model(TOKENS)
    main = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    ahead = paper_loss(model, TOKENS, LABELS, depths)
    (main + 0.3 * ahead).backward()
    expected = {"total_loss": main + 0.3 * ahead, "lm_loss": main, "mtp_loss": ahead}
    assert score_rows(objective, scores) == pytest.approx(
        {name: loss.item() for name, loss in expected.items()}, rel=1e-5
    )
    for name, parameter in model.named_parameters():
        largest = parameter.grad.abs().max().item()
        assert largest > 0, name
        assert (found[name] - parameter.grad).abs().max().item() < 1e-5 * largest, name


def test_distillation_adds_the_published_loss_to_the_teachers():
    """total = w t^2 KL + (1 - w) cross entropy + 0.3 x the modules' loss, which learn from labels alone."""
    keys = {"teacher_logits": "teacher", "distillation_temperature": 1.5, "distillation_weight": 0.7}
    plan = small_plan(**LLAMA, **keys, mtp_num_layers=2)
    model = GPT(plan, ParallelGrid.single())
    objective = build_objective(plan)
    assert objective.names == ("total_loss", "loss", "kl", "lm_loss", "mtp_loss")
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(*TOKENS.shape, 100, generator=generator).topk(5).indices
    teacher = torch.randn(*TOKENS.shape, 5, generator=generator)
    scores = trained_loss(plan, model, objective, teacher_ids=ids, teacher_logits=teacher)
    scores[0].backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    logits = model(TOKENS)
    entropy = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    p = (teacher / 1.5).softmax(-1)
    log_q = (logits / 1.5).log_softmax(-1).gather(-1, ids)
    kl = 1.5**2 * (p * (p.log() - log_q)).sum(-1).mean()
    ahead = paper_loss(model, TOKENS, LABELS, 2)
    distilled = 0.7 * kl + 0.3 * entropy
    (distilled + 0.3 * ahead).backward()
    expected = (distilled + 0.3 * ahead, distilled, kl, entropy, ahead)
    assert list(score_rows(objective, scores).values()) == pytest.approx([loss.item() for loss in expected], rel=1e-5)
    for name, parameter in model.named_parameters():
        largest = parameter.grad.abs().max().item()
        assert (found[name] - parameter.grad).abs().max().item() < 1e-5 * largest, name


def test_blocks_of_modules_multiply_in_fp8():
    """The loss is that of the formula, whose blocks multiply in fp8 too: rows have scales of their own."""
    plan = small_plan(**LLAMA, mlp_width=96, precision="bf16", fp8="rowwise", mtp_num_layers=2)
    objective = build_objective(plan)
    losses = []
    for multiplies in (False, True):
        model = GPT(plan, ParallelGrid.single()).to(torch.bfloat16)
        if multiplies:
            multiply_in_fp8(model, plan, torch.device("cpu"))
        losses.append(score_rows(objective, trained_loss(plan, model, objective))["mtp_loss"])
        expected = paper_loss(model, TOKENS, LABELS, 2).item()
        assert losses[-1] == pytest.approx(expected, rel=5e-3)
    in_bf16, in_fp8 = losses
    assert in_fp8 != in_bf16
    assert in_fp8 == pytest.approx(in_bf16, rel=2e-2)
    module = model.stage.layers[len(model.stage.layers) - 1]
    assert module.block.attention.query_key_value.multiply != module.eh_proj.multiply


def test_labels_stay_in_their_document():
    """Rows of two documents give the losses of the documents by themselves; a masked label is nobody's target."""
    plan = small_plan(**LLAMA, mtp_num_layers=2, reset_attention_mask=True)
    model = GPT(plan, ParallelGrid.single())
    starts = torch.tensor([[0] * 5 + [5] * 7] * 2)
    mask = WEIGHTS.clone()
    mask[:, 4] = 0.0  # predicts the other document
    mask[:, 9] = 0.0  # not a part of an answer
    objective = build_objective(plan)
    scores = trained_loss(plan, model, objective, loss_mask=mask, document_starts=starts)
    expected = 0.0
    for first, stop in ((0, 5), (5, 12)):
        part = slice(first, stop)
        batch = {"tokens": TOKENS[:, part], "labels": LABELS[:, part], "loss_mask": mask[:, part]}
        batch = with_tokens_ahead(batch, 2, "loss_mask")
        packed = model(
            batch["tokens"], Context(), lambda output, given=batch: objective.scores(output, objective.targets(given))
        )
        expected += unpack_rows(packed)[1, 0].item()  # the weighted sum
    assert unpack_rows(scores)[1, 0].item() == pytest.approx(expected, rel=1e-5)

    batch = with_tokens_ahead(
        {"tokens": TOKENS, "labels": LABELS, "loss_mask": mask, "label_documents": starts}, 2, "loss_mask"
    )
    assert "label_documents" not in batch
    counted = batch["weights_ahead"][0] > 0  # [S, D]
    assert counted[:, 0].nonzero().flatten().tolist() == [0, 1, 2, 5, 6, 7, 9, 10]
    assert counted[:, 1].nonzero().flatten().tolist() == [0, 1, 5, 6, 8, 9]


def test_block_losses_of_the_modules_are_trained_and_statistics_are_those_of_the_network():
    plain = small_plan(**EXPERTS)
    plan = small_plan(**EXPERTS, mtp_num_layers=1)
    model = GPT(plan, ParallelGrid.single())
    objective = build_objective(plan)
    packed = trained_loss(plan, model, objective)
    scores = score_rows(objective, packed)
    alone = GPT(plain, ParallelGrid.single())
    objective_alone = build_objective(plain)
    scores_alone = score_rows(objective_alone, trained_loss(plain, alone, objective_alone))
    for name in ("lm_loss", "moe_largest_share"):
        assert scores[name] == pytest.approx(scores_alone[name], rel=1e-6)
    # A module's block adds a loss about as large as each of the two blocks'.
    assert 1.3 < scores["moe_balance_loss"] / scores_alone["moe_balance_loss"] < 1.7
    parts = scores["lm_loss"] + scores["moe_balance_loss"] + 0.3 * scores["mtp_loss"]
    assert scores["total_loss"] == pytest.approx(parts, rel=1e-6)
    assert packed[0].item() == pytest.approx(parts, rel=1e-6)
    packed[0].backward()
    assert model.stage.layers[7].block.mlp.router.weight.grad.abs().max() > 0


@pytest.mark.parametrize("keys", [LLAMA, EXPERTS, RWKV], ids=["dense", "experts", "rwkv"])
def test_evaluations_report_the_network_alone(keys: dict[str, Any]):
    plain = small_plan(**keys)
    plan = small_plan(**keys, mtp_num_layers=2)
    objective = evaluated_objective(build_objective(plan))
    assert objective == build_objective(plain)
    model = GPT(plan, ParallelGrid.single()).eval()
    for module in model.stage.ranges[0].multi_token:
        module.register_forward_hook(lambda *_: pytest.fail("an evaluation computes a module"))
    found = trained_loss(plan, model, objective)
    torch.testing.assert_close(found, trained_loss(plain, GPT(plain, ParallelGrid.single()).eval(), objective))


@pytest.mark.parametrize("keys", [LLAMA, EXPERTS], ids=["dense", "experts"])
def test_recomputation_gives_the_same_gradients(keys: dict[str, Any]):
    results = []
    for recompute in (False, True):
        plan = small_plan(**keys, mtp_num_layers=2, hidden_dropout=0.2, checkpoint_activations=recompute)
        grid = ParallelGrid.single()
        model = GPT(plan, grid)
        grid.seed(3)
        trained_loss(plan, model, build_objective(plan))[0].backward()
        results.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))


def test_operations_are_those_that_torch_counts() -> None:
    """All but the gradients of the head's weight, which are added up by an operation that torch does not count."""
    for depths in (0, 2):
        plan = small_plan(**LLAMA, mtp_num_layers=depths, attention_config=["global", "global"])
        model = GPT(plan, ParallelGrid.single())
        with FlopCounterMode(display=False) as operations:
            trained_loss(plan, model, build_objective(plan))[0].backward()
        uncounted = (1 + depths) * 2 * plan.architecture.hidden_size * plan.padded_vocab_size
        counted = operations.get_total_flops() + TOKENS.numel() * uncounted
        assert counted == TOKENS.numel() * training_flops_per_token(plan.layers, TOKENS.shape[1])
