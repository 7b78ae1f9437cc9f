"""The runner on golden checkpoints, in one process: logits, scores, cache and no cache, beams."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from neox.checkpoint import CheckpointReader
from neox.errors import CheckpointError
from neox.generation.completion import generate
from neox.generation.load import load_model, plan_for_checkpoint
from neox.generation.request import SamplingParams
from neox.generation.startup import choose_checkpoint, one_process
from neox.parallel import ParallelGrid
from neox.plan import Topology, config_from_files, resolve
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming

GOLDEN = Path(__file__).parents[2] / "golden"
RUNS = ["v2_pp1_mp1_dp1_fp32", "v2_pp2_mp1_dp1_fp32", "v2_pp2_mp2_dp1_fp32"]
# Biases that are the sum of two tensor ranks; tables of relative positions that drifted apart.
PARTS_DIFFER = ["v2_alibi_relu_pp2_mp2", "v2_rpe_swish_scalenorm_pp2"]
PROMPTS = ["def main(", "The quick brown fox jumps over", "a", "Ünïcode 漢字"]
TOKENIZER = build_tokenizer("HFTokenizer", GOLDEN / "data" / "tokenizer.json")


def golden_plan(name, **changes):
    overrides = [f"{key}={value}" for key, value in changes.items()]
    config = one_process(config_from_files([GOLDEN / name / f"{name}.yml"], overrides=overrides))
    return resolve(config, 1, TOKENIZER.vocab_size)


def golden_model(name, step=30, **changes):
    checkpoint = GOLDEN / name / f"global_step{step}"
    return load_model(golden_plan(name, **changes), checkpoint, ParallelGrid.single(), torch.device("cpu"))


@pytest.mark.parametrize("name", [*RUNS, *PARTS_DIFFER])
def test_logits_and_scores_are_the_golden_ones_whatever_the_checkpoints_degrees(name):
    model = golden_model(name)
    golden = np.load(GOLDEN / name / "logits_step30.npz")
    tokens, logits = torch.from_numpy(golden["tokens"]).long(), torch.from_numpy(golden["logits"])
    with torch.inference_mode():
        assert torch.allclose(model.network.head.logits(model.hidden(tokens)), logits, atol=1e-5, rtol=0)
    scores, top = model.score(tokens[:, :-1], tokens[:, 1:])
    expected = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    assert torch.allclose(scores, expected, atol=1e-5, rtol=0)
    assert torch.equal(top, logits[:, :-1].argmax(-1) == tokens[:, 1:])


def test_a_vocabulary_that_the_tensor_ranks_cannot_divide_is_refused():
    plan = replace(golden_plan(RUNS[0]), padded_vocab_size=1026, grid=Topology(tp_size=3))
    with raises_naming(CheckpointError, 1024, "model_parallel_size"):
        plan_for_checkpoint(plan, GOLDEN / RUNS[0] / "global_step30")


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}, {"num_beams": 3}])
def test_cache_batch_and_padding_change_nothing(settings):
    params = SamplingParams(max_new_tokens=24, min_new_tokens=8, **settings)
    model = golden_model("v2_pp2_mp1_dp1_fp32")
    together = [c.tokens for c in generate(model, PROMPTS, params, TOKENIZER)]
    alone = [generate(model, [p], params, TOKENIZER, sequence_ids=[n])[0].tokens for n, p in enumerate(PROMPTS)]
    model.recompute = True
    recomputed = [c.tokens for c in generate(model, PROMPTS, params, TOKENIZER)]
    assert together == alone == recomputed
    assert all(8 <= len(tokens) <= 24 for tokens in together)


def test_generation_up_to_the_end_of_the_context():
    model = golden_model("v2_pp2_mp1_dp1_fp32")
    prompt = TOKENIZER.decode([400] * 120)
    room = model.max_length - len(TOKENIZER.encode(prompt))
    params = SamplingParams(max_new_tokens=1000, min_new_tokens=200, temperature=1.0)
    long, short = generate(model, [prompt, "a"], params, TOKENIZER)
    assert long.length == room
    assert short.length == model.max_length - 1


def test_half_precision_on_request():
    scores = golden_model("v2_pp2_mp1_dp1_fp32", inference_precision="bf16").score(
        torch.tensor([[5, 6]]), torch.tensor([[6, 7]])
    )
    exact = golden_model("v2_pp2_mp1_dp1_fp32").score(torch.tensor([[5, 6]]), torch.tensor([[6, 7]]))
    assert torch.allclose(scores[0], exact[0], atol=0.1)
    assert not torch.equal(scores[0], exact[0])


def test_a_checkpoint_of_another_model_is_refused():
    with raises_naming(CheckpointError, "3 blocks"):
        golden_model("v2_pp2_mp1_dp1_fp32", num_layers=3)
    with pytest.raises(CheckpointError):
        golden_model("v2_pp2_mp1_dp1_fp32", hidden_size=128)


@pytest.mark.parametrize(
    ("changes", "named", "lines"),
    [
        ({"save": "null"}, ("`load`", "`save`", "--set load=DIRECTORY"), 1),
        ({"save": "no/where"}, ("save", "no/where", "--set load=DIRECTORY"), 1),
        ({"load": GOLDEN / "data"}, (GOLDEN / "data", "--set load=DIRECTORY"), 3),
        ({"load": GOLDEN / RUNS[2], "num_attention_heads": 8}, ("num_attention_heads",), 4),
    ],
)
def test_a_checkpoint_that_cannot_be_read_says_what_to_set(changes, named, lines):
    with raises_naming(CheckpointError, *named, lines=lines):
        choose_checkpoint(golden_plan(RUNS[2], **changes), TOKENIZER)


def test_the_checkpoint_is_found_by_iteration_and_its_hashes_are_looked_at_unless_told_otherwise(tmp_path):
    assert choose_checkpoint(golden_plan(RUNS[0], load=GOLDEN / RUNS[0], iteration=0), TOKENIZER).name == "global_step0"
    broken = tmp_path / "global_step30"
    shutil.copytree(GOLDEN / RUNS[0] / "global_step30", broken)
    layer = next(broken.glob("*.pt"))
    damaged = bytearray(layer.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    layer.write_bytes(damaged)
    with raises_naming(CheckpointError, "global_step30", lines=3):
        choose_checkpoint(golden_plan(RUNS[0], load=tmp_path), TOKENIZER)
    assert choose_checkpoint(golden_plan(RUNS[0], load=tmp_path, checkpoint_verify="false"), TOKENIZER) == broken


@pytest.mark.parametrize(
    ("stored", "known"),
    [({"vocab_size": 999, "padded_vocab_size": 1024}, "999"), ({"padded_vocab_size": 768}, "at most 768")],
)
def test_a_tokenizer_of_another_size_than_the_checkpoints_is_refused(stored, known, monkeypatch):
    plan = golden_plan(RUNS[0], load=GOLDEN / RUNS[0])
    monkeypatch.setattr(CheckpointReader, "args", stored)
    with raises_naming(CheckpointError, known, 1000):
        choose_checkpoint(plan, TOKENIZER)


def test_every_step_tells_the_launcher_that_it_got_on(tmp_path, monkeypatch):
    """A batch may take longer than `hang_timeout` without printing anything."""
    model, told = golden_model(RUNS[0]), tmp_path / "progress"
    monkeypatch.setenv("NEOX_PROGRESS_FILE", str(told))
    decoding = model.begin([2], 4)
    for tokens in ([[5, 6]], [[7]]):
        decoding.feed(torch.tensor(tokens))
        told.unlink()
    model.score(torch.tensor([[5, 6]]), torch.tensor([[6, 7]]))
    told.unlink()
