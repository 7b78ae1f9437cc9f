"""Text in each position beside transformers, TRL and lm-evaluation-harness, with imported models."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neox.convert import from_hf
from neox.data import IndexedDataset
from neox.evaluation.harness import harness_model
from neox.evaluation.scoring import Scorer
from neox.generation.completion import generate
from neox.generation.request import SamplingParams
from neox.generation.server import make_app
from neox.parallel import ParallelGrid
from neox.preprocess import PreferenceSettings, PreprocessSettings, TokenizerSpec, preprocess
from neox.tokenizer import build_tokenizer, positions
from tests.field.hf_models import write_llama
from tests.field.test_hf_generation import run_of
from tests.field.text_tokenizers import FORMS, save
from tests.unit.generation.served import served

pytestmark = pytest.mark.slow
PAIRS = [
    ("how many people", " talk about music"),
    ("how many people ", "talk about music"),
    ("how many people\n", "today"),
    ("", "the old town"),
    ("<s>how many", " people"),
]
ACROSS = [("how ma", "ny"), ("mus", "ic"), ("peop", "le talk")]
"""Contexts and texts with a token that holds characters of both."""


@pytest.fixture(scope="module", params=["llama2", "llama3", "gemma", "neox"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model and tokenizer in transformers and here."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp(request.param)
    made = FORMS[request.param]()
    save(made, directory / "hf", clean_up_tokenization_spaces=False)
    eos = made.token_to_id("</s>")
    write_llama(directory / "hf", made.get_vocab_size(), eos_token_id=eos, bos_token_id=made.token_to_id("<s>"))
    _, tokenizer, model = run_of(from_hf(directory / "hf", directory / "ck").config_file)
    theirs = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32).eval()
    return SimpleNamespace(
        directory=directory / "hf",
        form=request.param,
        tokenizer=tokenizer,
        model=model,
        scorer=Scorer(model, tokenizer, ParallelGrid.single(), 64),
        hf=theirs,
        hf_tokenizer=PreTrainedTokenizerFast.from_pretrained(directory / "hf"),
    )


def by_torch(pair: Any, ids: list[int], first: int) -> float:
    """Log-probability of the ids from a place on."""
    with torch.no_grad():
        logits = pair.hf(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(logits[at - 1, ids[at]].item() for at in range(first, len(ids)))


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_generated_text_is_that_of_transformers(pair):
    """transformers#22710, #28776."""
    prompts = ["The capital of France is", "how many people", "yes 漢"]
    params = SamplingParams(max_new_tokens=20)
    for prompt, done in zip(prompts, generate(pair.model, prompts, params, pair.tokenizer), strict=True):
        ids = pair.hf_tokenizer(prompt, return_tensors="pt").input_ids
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        out = pair.hf.generate(ids, max_new_tokens=20, **settings)[0].tolist()
        whole = pair.hf_tokenizer.decode(out, skip_special_tokens=True)
        known = pair.hf_tokenizer.decode(ids[0], skip_special_tokens=True)
        assert whole.startswith(known)
        assert done.text.rstrip("\ufffd") == whole[len(known) :].rstrip("\ufffd")


def test_scores_are_those_of_the_harness(pair):
    pytest.importorskip("accelerate", reason="the harness's own model class needs accelerate")
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=pair.hf, tokenizer=pair.hf_tokenizer, batch_size=1)
    ours = harness_model(pair.scorer)
    for found, right in zip(ours.loglikelihood(requests(*PAIRS)), theirs.loglikelihood(requests(*PAIRS)), strict=True):
        assert found[0] == pytest.approx(right[0], rel=1e-4)
        assert found[1] == right[1]


def test_scores_through_the_server_are_those_of_evaluation(pair):
    """lm-evaluation-harness' `local-completions` asks for `echo` and `logprobs`, by ids, and for one new token."""
    pytest.importorskip("tenacity", reason="the harness's clients of servers need tenacity")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with served(make_app(pair.model, pair.tokenizer, name="model")) as address:
        client = LocalCompletionsAPI(
            base_url=f"{address}v1/completions",
            model="model",
            tokenizer=str(pair.directory),
            tokenizer_backend="huggingface",
            max_length=64,
            add_bos_token=pair.form != "neox",
        )
        found = client.loglikelihood(requests(*PAIRS[:3]), disable_tqdm=True)
    right = harness_model(pair.scorer).loglikelihood(requests(*PAIRS[:3]))
    for (score, is_greedy), (expected, expected_greedy) in zip(found, right, strict=True):
        assert score == pytest.approx(expected, rel=1e-5)
        assert is_greedy == expected_greedy


def test_a_text_that_ends_the_last_token_of_its_context(pair):
    """lm-evaluation-harness#1053, #1297, PR 4055: the harness loses characters of the text; by torch then."""
    backend = pair.hf_tokenizer.backend_tokenizer
    ours = harness_model(pair.scorer)
    for (context, text), (found, _) in zip(ACROSS, ours.loglikelihood(requests(*ACROSS)), strict=True):
        before = pair.hf_tokenizer(context).input_ids
        if pair.form == "llama2":  # without the blank that begins a text
            whole = backend.encode(f"\n{text}", add_special_tokens=False)
            after = whole.ids[[offset[0] for offset in whole.offsets].index(1) :]
        else:
            after = backend.encode(text, add_special_tokens=False).ids
        assert pair.hf_tokenizer.decode([*before, *after], skip_special_tokens=True) == context + text
        assert found == pytest.approx(by_torch(pair, [*before, *after], len(before)), rel=1e-4)
        assert found < 0


def test_whole_texts_begin_once(pair):
    """lm-evaluation-harness#3333: the harness predicts `<s>` after `<s>`, which is no part of the text."""
    texts = ["how many people talk about music today", "the old town " * 30]
    ours = harness_model(pair.scorer).loglikelihood_rolling(requests(*((text,) for text in texts)))
    start = pair.hf_tokenizer.bos_token_id
    for text, found in zip(texts, ours, strict=True):
        ids = pair.hf_tokenizer(text, add_special_tokens=False).input_ids
        ids = [start, *ids]
        if len(ids) <= 65:
            assert found == pytest.approx(by_torch(pair, ids, 1), rel=1e-4)
        else:
            first = by_torch(pair, ids[:65], 1)
            assert found < first


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("flag", [None, True, False])
def test_prompts_are_encoded_as_by_transformers(form, flag, tmp_path):
    """transformers#30947, #22794, vllm#7491: the file decides, whatever the flags say; no end after a prompt."""
    from transformers import PreTrainedTokenizerFast

    flags = {} if flag is None else {"add_bos_token": flag, "add_eos_token": flag}
    tokenizer = build_tokenizer("HFTokenizer", save(FORMS[form](), tmp_path, **flags))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("how many people", " talk about\nmusic ", "漢 river"):
        ids = theirs(text).input_ids
        while ids and ids[-1] == theirs.eos_token_id:
            ids.pop()
        assert positions.prompt(tokenizer, text) == ids
        assert tokenizer.decode_shown(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("form", ["llama2", "llama3", "gemma", "neox", "prefix_space"])
def test_preferences_are_encoded_as_by_trl(form, tmp_path):
    """trl#907."""
    pytest.importorskip("trl", reason="trl (requirements/requirements-dev.txt) is not installed")
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import DPOTrainer

    made = FORMS[form]()
    vocab = save(made, tmp_path / "tok", clean_up_tokenization_spaces=False)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tok")
    rows = [
        {"prompt": "how many people", "chosen": " talk about music.", "rejected": " see the river."},
        {"prompt": "the old town: ", "chosen": "Paris is old", "rejected": "music"},
        {"prompt": "yes", "chosen": "\n漢 river</s>", "rejected": "\nno"},
    ]
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    trainer = SimpleNamespace(_tokenizer=theirs)
    right = DPOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), theirs, arguments, "train")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = PreferenceSettings(None)
    run = PreprocessSettings(
        inputs=(str(tmp_path / "in.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        tokenizer=TokenizerSpec("HFTokenizer", str(vocab), None, True),
        keys=settings.datasets,
        workers=1,
        accelerator="off",
        preferences=settings,
    )
    preprocess(run)
    for side in ("chosen", "rejected"):
        documents = IndexedDataset(run.prefix(side))
        labels = IndexedDataset(run.prefix(f"{side}_label"))
        for ids, own_labels, row in zip(documents, labels, right, strict=True):
            assert ids.tolist() == [*row["prompt_ids"], *row[f"{side}_ids"]]
            assert own_labels.tolist() == [-100] * len(row["prompt_ids"]) + row[f"{side}_ids"]
