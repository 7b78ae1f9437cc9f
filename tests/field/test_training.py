"""Reports about training's own meanings: experts, padding, validation, schedules, mismatched answers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from neox.config import NeoXConfig, apply_decisions
from neox.data import GPTDataset, IndexedDataset, IndexedDatasetBuilder
from neox.data.answer_pairs.answers import JudgedAnswers, PromptAnswer
from neox.data.batches import BatchIterator
from neox.data.run_data import build_data_iterators
from neox.data.samples.packing import Packing
from neox.decisions.schedule import decide_warmup
from neox.errors import DataError
from neox.model import BlockContext, ExpertMLP
from neox.ops import balance_loss, route, sinkhorn
from neox.ops.routing import log_sinkhorn
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve, static_problems
from neox.plan.run_identity import RUN_FILE, identity_text, run_identity
from neox.plan.schedule import schedule_of
from tests.plans import SMALL, small_plan
from tests.resumed_runs import DecidedRun, decided_run


def equal_shares(logits: Tensor) -> Tensor:
    """Return the logarithm of the assignment with equal shares in fp64, after as many rounds as it takes."""
    logits = logits.double()
    tokens, experts = logits.shape
    columns = torch.zeros(1, experts, dtype=torch.float64)
    for _ in range(20_000):
        rows = -math.log(tokens) - (logits + columns).logsumexp(1, keepdim=True)
        scaled = -math.log(experts) - (logits + rows).logsumexp(0, keepdim=True)
        change = (scaled - columns).abs().max()
        columns = scaled
        if change < 1e-9:
            return logits + rows + columns
    raise AssertionError("the reference does not converge")


@pytest.mark.parametrize("scale", [1, 6, 10, 30, 60])
def test_sinkhorn_chooses_finally_at_any_logits(scale):
    """Megatron-LM#716: the factors of unwanted experts wander for ever in the last digits of fp32, or overflow."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 8, generator=generator) * 0.3 * scale
    logits += torch.randn(8, generator=generator) * scale * 0.5
    found = log_sinkhorn(logits)
    wanted = equal_shares(logits)
    assert torch.equal(found.topk(2, dim=1).indices, wanted.topk(2, dim=1).indices)
    torch.testing.assert_close(sinkhorn(logits).sum(0), torch.full((8,), 1 / 8), rtol=1e-3, atol=0)


@pytest.mark.parametrize("offset", [93.0, -93.0, 1e4])
def test_sinkhorn_does_not_depend_on_a_number_that_all_logits_have(offset):
    """Megatron-LM#716: exp of a logit of 93 is infinite in fp32."""
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) * 4
    assert torch.equal(sinkhorn(logits + offset).argmax(1), sinkhorn((logits + offset) - offset).argmax(1))


def test_sinkhorn_ends_when_no_equal_shares_exist():
    """Megatron-LM#716: factors that grow with each round must not keep a step from ending."""
    logits = torch.zeros(3, 3)
    logits[:, 0] = 1e5
    logits[0, 1] = -1e5
    assert log_sinkhorn(logits).isfinite().all()


MIXTURE = {
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_ffn_hidden_size": 12,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_layers": 1,
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.25,
}
ROUTERS = {
    "softmax": {},
    "per sample": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "capacity": {"moe_expert_capacity_factor": 0.75},
    "sinkhorn": {"moe_router_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "router biases": {"moe_router_type": "sigmoid", "moe_router_enable_expert_bias": True},
}
LENGTHS = torch.tensor([9, 2, 5, 0])


def mixture(keys: dict) -> ExpertMLP:
    module = ExpertMLP(small_plan(**{**MIXTURE, **keys}).architecture, 0, ParallelGrid.single())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return module


@pytest.mark.parametrize("kind", ROUTERS)
def test_padding_does_not_count_in_experts(kind):
    """transformers#28505, Megatron-LM PR 2121, torchtitan PR 4594: padded rows are routed as their text alone is."""
    x = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    is_text = torch.arange(9) < LENGTHS.unsqueeze(1)

    def outcome(rows: Tensor, **context) -> tuple[Tensor, dict[str, float], list[int] | None, Tensor]:
        module = mixture(ROUTERS[kind])
        output, aux = module(rows, BlockContext(torch.arange(rows.shape[1]), **context))
        counts = None if module.router.token_counts is None else module.router.token_counts.tolist()
        losses = sum(loss for loss in aux.values() if loss.requires_grad)
        (gradient,) = torch.autograd.grad(output.square().sum() + losses, x)
        return output, {name: float(value.detach()) for name, value in aux.items()}, counts, gradient

    output, aux, counts, gradient = outcome(x, is_text=is_text)
    assert not output[~is_text].any()
    if kind == "per sample":
        balances = []
        for row, length in zip(x[:3], LENGTHS[:3].tolist(), strict=True):
            balances.append(outcome(row[:length].unsqueeze(0))[1]["moe_balance_loss"])
        assert aux["moe_balance_loss"] == pytest.approx(sum(balances) / len(LENGTHS), rel=1e-6)
        return
    alone, wanted, wanted_counts, wanted_gradient = outcome(x[is_text].unsqueeze(0))
    torch.testing.assert_close(output[is_text], alone.squeeze(0), rtol=1e-5, atol=1e-6)
    assert aux == pytest.approx(wanted, rel=1e-6)
    assert counts == wanted_counts
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-5)


def test_the_balance_of_text_is_that_of_transformers():
    """transformers#28505: with the attention mask, its balancing loss is K times ours over tokens of text."""
    logits = torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(2))
    is_text = torch.arange(9) < LENGTHS.unsqueeze(1)
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), 6, 2, is_text.long())
    routes = route(logits, small_plan(**MIXTURE).architecture, is_text=is_text)
    ours = balance_loss(routes.probabilities, routes.experts, per_sample=False, is_text=is_text)
    assert 2 * ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_rows_without_text_give_no_nan():
    """Megatron-LM PR 2121: a micro batch of padding only."""
    x = torch.randn(1, 3, 16)
    for keys in ROUTERS.values():
        output, aux = mixture(keys)(x, BlockContext(torch.arange(3), is_text=torch.zeros(1, 3, dtype=torch.bool)))
        assert not output.any()
        assert not any(float(value.detach()) for value in aux.values())


def dataset_of(prefix: Path, documents: list[list[int]], **options) -> GPTDataset:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for ids in documents:
            builder.add_document(ids)
    return GPTDataset(IndexedDataset(prefix), range(len(documents)), 12, seq_length=7, seed=1, **options)


@pytest.mark.parametrize("impl", ["pack_until_overflow", "unpacked", "best_fit"])
def test_batches_say_where_padding_begins(impl, tmp_path):
    """transformers#28505: lengths come from the documents, because the id of padding can be text too."""
    lengths = [3, 6, 3, 19]
    visible = dataset_of(tmp_path / "visible", [[5] * length for length in lengths], packing=Packing(impl))
    same = dataset_of(tmp_path / "same", [[0] * length for length in lengths], packing=Packing(impl))
    batch = next(BatchIterator(same, 12, num_workers=0, mark_padding=True))
    wanted = (visible.read(range(12))[:, :-1] == 5).sum(1)
    assert batch["lengths"].tolist() == wanted.tolist()
    assert min(wanted) < 7


BASE = {key: value for key, value in SMALL.items() if key != "lr_decay_iters"}
WSD = {
    "train_iters": 20,
    "lr_decay_style": "WSD",
    "lr_wsd_decay_iters": 5,
    "lr_wsd_decay_style": "linear",
    "warmup": 0.2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}


def resumed(folder: Path, saved: dict, now: dict, steps: tuple[int, ...] = (15,), **keys) -> DecidedRun:
    """Return the configuration of a run that goes on after checkpoints of `saved` at some steps."""
    before = NeoXConfig.from_flat({**BASE, **saved})
    for step in steps:
        configs = folder / f"global_step{step}" / "configs"
        configs.mkdir(parents=True)
        (configs / "config.yml").write_text(json.dumps(before.to_flat()))
        (configs.parent / RUN_FILE).write_text(identity_text(run_identity(before)))
        (configs.parent / "mp_rank_00_model_states.pt").touch()
    (folder / "latest").write_text(f"global_step{steps[-1]}")
    flat = {**BASE, **saved, **now, "load": str(folder), "save": str(folder), **keys}
    return decided_run(NeoXConfig.from_flat(flat))


@pytest.mark.parametrize("style", ["WSD", "constant"])
def test_a_run_that_is_extended_on_its_plateau_stays_there(style, tmp_path):
    """gpt-neox PR 1375: `warmup` is a fraction, so a longer run would begin to warm up again."""
    saved = {**WSD, "lr_decay_style": style}
    if style == "constant":
        saved = {key: value for key, value in saved.items() if not key.startswith("lr_wsd")}
    decided = resumed(tmp_path, saved, {"train_iters": 200})
    schedule = schedule_of(decided.config)
    assert [schedule.lr(step) for step in (4, 15, 40, 100, 194)] == pytest.approx([1e-3] * 5)
    assert not any("next step" in note for note in decided.notes)
    again = tmp_path / "again"
    before = schedule.lr(2)
    kept = {**saved, "train_iters": 200, "lr_warmup_iters": decided.config.schedule.lr_warmup_iters}
    chained = resumed(again, kept, {"train_iters": 400, "lr_warmup_iters": None})
    assert schedule_of(chained.config).lr(2) == pytest.approx(before)


def test_a_run_that_is_shortened_within_its_warmup_warms_up_faster(tmp_path):
    """Twenty steps of warm-up leave nothing of a run of ten steps."""
    saved = {"train_iters": 100, "warmup": 0.2, "optimizer": WSD["optimizer"]}
    decided = resumed(tmp_path, saved, {"train_iters": 10}, (5,))
    assert not static_problems(decided.config)
    assert decided.config.schedule.warmup_iterations(10) == 2


@pytest.mark.parametrize(("length", "noted"), [(100, False), (200, True)])
def test_the_warmup_of_a_length_that_is_counted(length, noted, tmp_path):
    """Epochs become steps only after the checkpoint has been found."""
    saved = {"train_iters": 100, "warmup": 0.2, "optimizer": WSD["optimizer"]}
    own = resumed(tmp_path, saved, {"train_iters": None, "num_train_epochs": 2})
    assert not any("warm-up" in note for note in own.notes)
    kept = decide_warmup(own.config, own.loaded, length)
    assert apply_decisions(own.config, kept.decisions).schedule.warmup_iterations(length) == 20
    assert any("warm-up" in note for note in kept.notes) == noted


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential"])
def test_an_extended_decay_keeps_its_warmup_and_says_where_it_jumps(style, tmp_path):
    """gpt-neox PR 1375: the longer decay is followed, and the note has the numbers of the checkpoint that is loaded."""
    saved = {"train_iters": 20, "lr_decay_style": style, "warmup": 0.2, "optimizer": WSD["optimizer"]}
    decided = resumed(tmp_path, saved, {"train_iters": 200}, (10, 15), iteration=10)
    now = schedule_of(decided.config)
    assert now.lr(1) == pytest.approx(2.5e-4)
    (note,) = [note for note in decided.notes if "next step" in note]
    before = schedule_of(NeoXConfig.from_flat({**BASE, **saved}))
    assert f"{now.lr(10):.3g}" in note
    assert f"{before.lr(10):.3g}" in note


@pytest.mark.parametrize("change", [{"warmup": 0.1}, {"lr_warmup_iters": 30}, {"override_lr_scheduler": True}])
def test_a_warmup_that_is_asked_for_is_followed(change, tmp_path):
    """gpt-neox PR 1375: keys that were changed on purpose win."""
    decided = resumed(tmp_path, WSD, {"train_iters": 200, **change})
    wanted = {"warmup": 20, "lr_warmup_iters": 30, "override_lr_scheduler": 40}[next(iter(change))]
    assert decided.config.schedule.warmup_iterations(200) == pytest.approx(wanted)


def test_more_steps_with_a_fixed_decay_change_nothing(tmp_path):
    """gpt-neox PR 1375: `lr_decay_iters` sets the schedule, whatever `train_iters` is."""
    saved = {**WSD, "lr_decay_style": "cosine", "lr_decay_iters": 40, "lr_wsd_decay_iters": None}
    saved = {key: value for key, value in saved.items() if not key.startswith("lr_wsd")}
    decided = resumed(tmp_path, saved, {"train_iters": 200})
    before = schedule_of(NeoXConfig.from_flat({**BASE, **saved}))
    assert [schedule_of(decided.config).lr(step) for step in range(60)] == [before.lr(step) for step in range(60)]


class Answers:
    """Judged answers in memory: prompts and answers of ids."""

    def __init__(self, documents: list[tuple[list[int], list[int]]]) -> None:
        self.documents = documents
        self.sizes = np.array([len(prompt) + len(answer) for prompt, answer in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def name(self, number: int) -> str:
        return f"answers, document {number}"

    def ids(self, number: int) -> np.ndarray:
        prompt, answer = self.documents[number]
        return np.array(prompt + answer)

    def document(self, number: int) -> PromptAnswer:
        prompt, _ = self.documents[number]
        ids = self.ids(number)
        return PromptAnswer(ids, np.arange(len(ids)) >= len(prompt))


def test_a_mismatched_answer_is_to_another_prompt():
    """trl#1911: lines of one prompt follow each other, and the first line's run may go on from the end."""
    prompts = [[1], [1], [2, 2], [2, 2], [2, 2], [3], [1]]
    documents = [(prompt, [10 + number] * (number + 1)) for number, prompt in enumerate(prompts)]
    pairs = JudgedAnswers(Answers(documents), np.ones(len(prompts), dtype=bool), 64)
    for number, other in enumerate([5, 5, 1, 1, 1, 4, 5]):
        own, mismatched = pairs.documents(number)
        assert own.ids.tolist() == [*documents[number][0], *documents[number][1]]
        assert mismatched.ids.tolist() == prompts[number] + documents[other][1]
        assert pairs.sizes[number].tolist() == [len(own.ids) - 1, len(mismatched.ids) - 1]
    with pytest.raises(DataError, match="one prompt"):
        JudgedAnswers(Answers(documents[:2]), np.ones(2, dtype=bool), 64)


@pytest.mark.parametrize("order", ["fixed", "gpt-neox"])
def test_each_evaluation_reads_the_same_samples(order, tmp_path):
    """Megatron-Bridge PR 5076: before the first step, later, and in a resumed run."""
    golden = Path(__file__).parents[1] / "golden"
    run = golden / "v2_pp1_mp1_dp1_fp32" / "v2_pp1_mp1_dp1_fp32.yml"
    keys = [f"data_path={golden}/data/small_text_document", f"vocab_file={golden}/data/tokenizer.json"]
    keys += ["eval_interval=3", "eval_iters=1", "train_iters=9", "num_workers=0", f"eval_order={order}"]
    plan = resolve(config_from_files([run], overrides=keys), 1, 1000)
    first, later = (
        build_data_iterators(plan, consumed_iterations=done, cache_dir=tmp_path).valid[0] for done in (0, 7)
    )
    assert first.start == later.start == (0 if order == "fixed" else None)
    tokens = [next(item.batches)["tokens"] for item in (first, later)]
    assert torch.equal(*tokens) == (order == "fixed")


@pytest.mark.parametrize("impl", ["unpacked", "pack_until_overflow", "best_fit"])
def test_a_set_that_fits_into_an_evaluation_is_read_once(impl, tmp_path):
    """Megatron-Bridge PR 5076: of four documents in a batch of four, each is read once."""
    with IndexedDatasetBuilder(tmp_path / "four", np.uint16) as builder:
        for number in range(4):
            builder.add_document([10 + number] * (12 + number))
    keys = {"train_data_paths": [str(tmp_path / "four")], "valid_data_paths": [str(tmp_path / "four")]}
    keys |= {"eval_iters": 1, "eval_interval": 1, "train_micro_batch_size_per_gpu": 4, "pack_impl": impl}
    golden = Path(__file__).parents[1] / "golden" / "data" / "tokenizer.json"
    plan = small_plan(vocab_size=1000, vocab_file=str(golden), tokenizer_type="HFTokenizer", num_workers=0, **keys)
    (item,) = build_data_iterators(plan, cache_dir=tmp_path / "maps").valid
    batch = next(item.batches)
    assert sorted(batch["tokens"][:, 0].tolist()) == [10, 11, 12, 13]
