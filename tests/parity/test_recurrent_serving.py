"""Imported recurrent networks behind the server and in evaluations: texts and scores are transformers' slow paths'."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from neox.checkpoint import find_checkpoint
from neox.convert import from_hf
from neox.evaluation.scoring import Span, score_spans
from neox.generation.load import load_model
from neox.generation.request_fields import RequestLimits
from neox.generation.startup import one_process
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve
from tests.parity.family_configs import COMMON
from tests.parity.test_hf_families import CASES, FURTHER_CASES, transformers_model
from tests.transformers_versions import compared_with_later
from tests.unit.generation.toy import ToyCodec

pytest.importorskip("starlette", reason="starlette (requirements/requirements-serve.txt) is not installed")
httpx = pytest.importorskip("httpx", reason="httpx, which the tests speak to the server with, is not installed")

from neox.generation.server import make_app  # noqa: E402 (after the skips)

CODEC = ToyCodec()
PROMPTS = ["h", "abcdefghijklm", "qwe"]  # shorter and longer than the convolutions
NEW = 8
KINDS = [
    "bamba",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mamba", "mamba2", "qwen3_next", "olmo_hybrid")),
]


def both(directory: Path, model_type: str) -> tuple[Any, Any]:
    """Our model and that of transformers, with the same weights."""
    theirs = transformers_model(model_type, **{**CASES, **FURTHER_CASES}[model_type]).eval()
    with torch.no_grad():  # so that what comes next depends on everything before
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 2 and "A_log" not in name:
                parameter *= 4
    theirs.save_pretrained(directory / "hf")
    imported = from_hf(directory / "hf", directory / "neox")
    config = one_process(config_from_files([imported.config_file]).updated({"train_micro_batch_size_per_gpu": 1}))
    plan = resolve(config, 1, COMMON["vocab_size"])
    ours = load_model(plan, find_checkpoint(directory / "neox"), ParallelGrid.single(), torch.device("cpu"))
    return ours, theirs


@compared_with_later
@pytest.mark.parametrize("model_type", KINDS)
def test_texts_of_the_server_and_scores_of_evaluations(tmp_path: Path, model_type: str) -> None:
    ours, theirs = both(tmp_path, model_type)

    async def post(body: dict[str, Any]) -> Any:
        app = make_app(ours, CODEC, name="recurrent", limits=RequestLimits())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await http.post("/v1/completions", json=body)

    asked = {"prompt": PROMPTS, "max_tokens": NEW, "min_tokens": NEW, "temperature": 0}
    answer = asyncio.run(post(asked))
    assert answer.status_code == 200, answer.text
    for prompt, choice in zip(PROMPTS, answer.json()["choices"], strict=True):
        row = torch.tensor([CODEC.encode(prompt)])
        settings = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
        alone = theirs.generate(row, eos_token_id=0, **settings)[0, row.shape[1] :]
        assert choice["text"] == CODEC.decode(alone.tolist()), prompt

    generator = torch.Generator().manual_seed(4)
    lengths = [(5, 1), (12, 4), (3, 2), (20, 11)]
    spans = []
    for length, first in lengths:
        tokens = torch.randint(1, COMMON["vocab_size"], (length,), generator=generator)
        spans.append(Span(tuple(tokens.tolist()), first))
    scores = score_spans(ours, spans, batch_size=4)
    for span, score in zip(spans, scores, strict=True):
        row = torch.tensor([span.tokens])
        with torch.no_grad():
            expected = theirs(row).logits.log_softmax(-1)[0, :-1].gather(-1, row[0, 1:, None])
        assert score.log_probability == pytest.approx(expected[span.first - 1 :].sum().item(), rel=1e-4)
