"""Text to ids and back, in each position, with tokenizers of many forms.

Right values come from the library `tokenizers`, from transformers, TRL and lm-evaluation-harness, or from sums of known
log-probabilities.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.data.samples.fill_in_middle import check_encodes_parts
from neox.errors import DataError
from neox.evaluation.lambada import lambada
from neox.evaluation.needle import Cell, hidden_key
from neox.evaluation.perplexity import corpus_perplexity, wikitext
from neox.evaluation.scoring import Scorer
from neox.features.char_perplexity.run import CharacterCounter
from neox.generation.chat_format import ChatFormat
from neox.generation.completion import generate
from neox.generation.completions_api import parse_request
from neox.generation.request import SamplingParams
from neox.generation.request_fields import RequestLimits
from neox.generation.text_stream import TextStream
from neox.parallel import ParallelGrid
from neox.preprocess import PreferenceSettings, PreprocessSettings, TokenizerSpec, preprocess
from neox.tokenizer import build_tokenizer, positions
from neox.tokenizer.chat import ChatTemplate
from tests.field.text_tokenizers import FORMS, save
from tests.unit.evaluation.table_model import TableModel
from tests.unit.generation.toy import ToyModel

TEXTS = [
    "The capital of France is Paris and a river.",
    "how many  people\ntoday: ",
    "yes 漢🙂é music",
    "漢字漢字漢字漢字🙂",
]
LOSSY = ("word_piece", "unigram_first", "unigram_always", "unigram_never")
"""Forms whose decoded text is not the encoded one: unknown characters, lower case, removed blanks."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    return {name: save(make(), tmp_path_factory.mktemp(name)) for name, make in FORMS.items()}


@pytest.fixture(scope="module")
def tokenizers_(files):
    return {name: build_tokenizer("HFTokenizer", file) for name, file in files.items()}


def scripted(ids: list[int], prompt: int, vocabulary: int) -> ToyModel:
    """A model that goes on after a prompt of some length with given ids."""

    def rule(read: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(ids[len(read) - prompt]), vocabulary).float()

    return ToyModel(rule, vocabulary, max_length=200)


@pytest.mark.parametrize("form", FORMS)
def test_text_after_a_prompt_is_what_all_ids_have_more(tokenizers_, form):
    """transformers#22710, #28776, text-generation-inference#333, mlx-lm PR 1754: whole, streamed, from each place."""
    tokenizer = tokenizers_[form]
    for text in TEXTS:
        ids = tokenizer.encode_bare(text)
        whole = tokenizer.backend.decode(ids)
        for cut in range(1, len(ids)):
            known = tokenizer.backend.decode(ids[:cut])
            if not whole.startswith(known):
                known = known.rstrip("\ufffd")  # the prompt ends inside a character, which is new as a whole
            assert positions.text_after(tokenizer, ids[:cut], ids[cut:]) == whole[len(known) :]
            stream = TextStream(tokenizer, ("never",), ids[:cut])
            pieces = [stream.push(token) for token in ids[cut:]]
            assert "".join([*pieces, stream.finish()]) == stream.text == whole[len(known) :]
            assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("form", ["llama2", "gemma", "neox", "both_ends"])
def test_a_character_that_ends_too_early_does_not_break_others(tokenizers_, form):
    """exo PR 1691, text-generation-inference#333: the end of a text may be cut inside a character."""
    tokenizer = tokenizers_[form]
    prompt = tokenizer.encode_bare("yes 漢")
    new = tokenizer.encode_bare("yes 漢字漢🙂")[len(prompt) : -1]
    text = positions.text_after(tokenizer, prompt, new)
    assert text.rstrip("\ufffd") == "字漢"
    assert text.endswith("\ufffd")
    stream = TextStream(tokenizer, (), prompt)
    pieces = [stream.push(token) for token in new]
    assert "".join(pieces) == "字漢"
    assert "".join([*pieces, stream.finish()]).rstrip("\ufffd") == "字漢"


@pytest.mark.parametrize("form", FORMS)
def test_a_document_begins_once_and_a_prompt_does_not_end(tokenizers_, form):
    """lm-evaluation-harness#3333, trlx PR 287: ids before a text are those of the tokenizer, those after it are not."""
    tokenizer = tokenizers_[form]
    backend = tokenizer.backend
    has_start = form in ("llama2", "llama3", "gemma", "both_ends")
    start = [backend.token_to_id("<s>")] * has_start
    text = "how many people"
    bare = backend.encode(text, add_special_tokens=False).ids
    assert positions.document(tokenizer, text) == positions.prompt(tokenizer, text) == [*start, *bare]
    before = positions.before_first(tokenizer)
    assert list(positions.scored_documents(tokenizer, [text, ""])) == [((*before, *bare), 1), (before, 1)]
    assert list(positions.scored_documents(tokenizer, [text])) == [positions.scored(tokenizer, "", text)]
    assert positions.prompt(tokenizer, "") == [backend.token_to_id("<s>")], "the configuration names it"
    written = backend.encode(f"<s>{text}", add_special_tokens=False).ids
    assert positions.document(tokenizer, f"<s>{text}") == written, "not a second one"
    assert list(positions.scored_documents(tokenizer, [f"<s>{text}"])) == [(tuple(written), 1)]


def test_without_a_beginning_the_end_of_a_document_stands_before_a_text(files, tmp_path):
    made = Tokenizer.from_file(str(files["neox"]))
    tokenizer = build_tokenizer("HFTokenizer", save(made, tmp_path, bos_token=None))
    assert positions.prompt(tokenizer, "") == [tokenizer.eod]
    assert positions.scored(tokenizer, "", "how").ids[0] == tokenizer.eod


@pytest.mark.parametrize("form", [form for form in FORMS if form not in LOSSY])
def test_a_continuation_has_no_blank_of_its_own(tokenizers_, form):
    """transformers#26273: the parts of a text, encoded one after the other, decode to the text."""
    tokenizer = tokenizers_[form]
    for text in TEXTS:
        for cut in range(1, len(text)):
            ids = [*tokenizer.encode_bare(text[:cut]), *positions.continuation(tokenizer, text[cut:])]
            whole = tokenizer.decode_shown(tokenizer.encode_bare(text))
            assert tokenizer.decode_shown(ids) == whole
    assert positions.continuation(tokenizer, "</s>") == [tokenizer.eod]
    check_encodes_parts(tokenizer)


def test_parts_that_change_are_refused(tokenizers_):
    with pytest.raises(DataError):
        check_encodes_parts(tokenizers_["word_piece"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("context", "text"),
    [("how many", " people"), ("how many ", "people"), ("how ma", "ny"), ("mus", "ic"), ("how many people", "today")],
)
def test_a_scored_text_has_tokens_of_its_own(tokenizers_, form, context, text):
    """lm-evaluation-harness#1053, PR 4055: also where it ends the last token of the context."""
    tokenizer = tokenizers_[form]
    backend = tokenizer.backend
    ids, first = positions.scored(tokenizer, context, text)
    before = positions.document(tokenizer, context.rstrip())
    assert ids[:first] == tuple(before)
    assert len(ids) > first
    both = positions.document(tokenizer, context + text)
    if both[: len(before)] == before and len(both) > len(before):
        assert ids == tuple(both)
    elif form not in LOSSY:
        assert backend.decode(list(ids)) == backend.decode(both)
    assert tokenizer.eod not in ids


def byte_like_model(tokenizer) -> TableModel:
    return TableModel(vocab=tokenizer.vocab_size, max_length=64, seed=3)


def scorer_of(tokenizer, model=None) -> Scorer:
    return Scorer(model or byte_like_model(tokenizer), tokenizer, ParallelGrid.single(), 32)


@pytest.mark.parametrize("form", ["llama2", "llama3", "gemma", "neox", "both_ends"])
def test_lambada_scores_the_last_word_as_encoded_with_its_context(tokenizers_, tmp_path, form):
    """lm-evaluation-harness#526, PR 531."""
    tokenizer = tokenizers_[form]
    backend = tokenizer.backend
    passages = ["talk about the old town", "how many people see Paris", "the dog ran over music"]
    (tmp_path / "lambada.txt").write_text("\n".join(passages))
    model = byte_like_model(tokenizer)
    result = lambada(tmp_path / "lambada.txt", scorer_of(tokenizer, model))
    best = model.log_probabilities.argmax(-1).tolist()
    start = list(tokenizer.before_text)
    loss = 0.0
    hits = 0
    last = 0
    for passage in passages:
        ids = [*start, *backend.encode(passage, add_special_tokens=False).ids]
        before = [*start, *backend.encode(passage[: passage.rfind(" ")], add_special_tokens=False).ids]
        assert ids[: len(before)] == before
        loss -= model.total(ids, len(before))
        hits += all(best[ids[at - 1]] == ids[at] for at in range(len(before), len(ids)))
        last += best[ids[-2]] == ids[-1]
    assert result.metrics["ppl"] == pytest.approx(math.exp(min(20, loss / len(passages))), rel=1e-4)
    assert result.metrics["strict_acc"] == hits / len(passages)
    assert result.metrics["acc"] == last / len(passages)


@pytest.mark.parametrize("form", ["llama2", "llama3", "both_ends", "neox"])
def test_perplexity_predicts_all_of_a_text_but_neither_its_beginning_nor_its_end(tokenizers_, tmp_path, form):
    """lm-evaluation-harness#1586, #3333."""
    tokenizer = tokenizers_[form]
    model = byte_like_model(tokenizer)
    texts = ["how many people", "the river"]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    result = corpus_perplexity(tmp_path / "c.jsonl", scorer_of(tokenizer, model))
    rows = [[tokenizer.bos, *tokenizer.encode_bare(text)] for text in texts]
    loss = -sum(map(model.total, rows))
    assert result.counts["scored"] == sum(map(len, rows)) - 2
    assert result.metrics["loss"] == pytest.approx(loss / (sum(map(len, rows)) - 2), rel=1e-5)
    builder = IndexedDatasetBuilder(str(tmp_path / "c_text_document"), "int32")
    for text in texts:
        builder.add_document([*tokenizer.encode(text), tokenizer.eod])
    builder.finalize()
    again = corpus_perplexity(tmp_path / "c_text_document", scorer_of(tokenizer, model))
    assert again.metrics["loss"] == pytest.approx(result.metrics["loss"])
    (tmp_path / "w.raw").write_text(texts[0])
    whole = wikitext(tmp_path / "w.raw", scorer_of(tokenizer, model))
    assert whole.metrics["loss"] * whole.counts["scored"] == pytest.approx(
        -model.total([*tokenizer.before_text, *tokenizer.encode_bare(texts[0])]), rel=1e-5
    )


@pytest.mark.parametrize("form", ["llama2", "both_ends", "neox"])
def test_a_needle_stands_inside_one_text(tokenizers_, form):
    tokenizer = tokenizers_[form]
    span = hidden_key(Cell(400, 50), 0, tokenizer)
    start = list(tokenizer.before_text)
    assert len(span.tokens) == 401
    assert list(span.tokens[: len(start)]) == start
    ids = list(span.tokens[len(start) :])
    assert not {*start, tokenizer.eod} & set(ids)
    text = tokenizer.decode_shown(ids)
    assert "  " not in text
    assert text.endswith(f" pass key is{tokenizer.decode_shown(list(span.tokens))[-6:]}")


@pytest.mark.parametrize("form", ["llama2", "both_ends", "neox"])
def test_preferences_begin_and_end_as_documents(tokenizers_, files, tmp_path, form):
    """trl#907, #1073, axolotl#1616."""
    tokenizer = tokenizers_[form]
    pairs = [
        {"prompt": "how many people", "chosen": " talk about music.", "rejected": " see the river."},
        {"prompt": "<s>how many people", "chosen": " talk about music.</s>", "rejected": " see the river."},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = PreferenceSettings(None)
    spec = TokenizerSpec("HFTokenizer", str(files[form]), None, True)
    run = PreprocessSettings(
        inputs=(str(tmp_path / "in.jsonl"),),
        output_prefix=str(tmp_path / "out"),
        tokenizer=spec,
        keys=settings.datasets,
        workers=1,
        accelerator="off",
        preferences=settings,
    )
    preprocess(run)
    start = list(tokenizer.before_text)
    for (ids, labels), pair in zip(
        zip(IndexedDataset(run.prefix("chosen")), IndexedDataset(run.prefix("chosen_label")), strict=True),
        pairs,
        strict=True,
    ):
        prompt = pair["prompt"]
        whole = tokenizer.encode_bare(f"{prompt}{pair['chosen'].removesuffix('</s>')}</s>")
        whole = whole if whole[: len(start)] == start and start else [*start, *whole]
        assert ids.tolist() == whole
        assert whole.count(tokenizer.eod) == 1
        known = len(positions.document(tokenizer, prompt))
        assert labels.tolist() == [-100] * known + whole[known:]


def test_special_tokens_are_found_by_stop_strings_and_not_shown(tokenizers_):
    """vllm#2123, #792, koboldcpp#791."""
    tokenizer = tokenizers_["llama2"]
    prompt = positions.prompt(tokenizer, "how many")
    end = tokenizer.token_id("<|end|>")
    ids = [*positions.continuation(tokenizer, " people"), end, *positions.continuation(tokenizer, " talk")]
    model = scripted([*ids, tokenizer.eod], len(prompt), tokenizer.vocab_size)
    pieces: list[str] = []

    def text(stop: tuple[str, ...] = ()) -> str:
        pieces.clear()
        params = SamplingParams(max_new_tokens=50, stop=stop)
        (done,) = generate(model, ["how many"], params, tokenizer, on_text=lambda _, piece: pieces.append(piece))
        assert "".join(pieces) == done.text
        (silent,) = generate(model, ["how many"], params, tokenizer)
        assert silent.text == done.text
        assert done.finished
        return done.text

    assert text() == " people talk"
    assert text(("<|end|>",)) == " people"
    assert text(("end|> t",)) == " people"
    assert text((" people",)) == ""
    assert text(("e<|end|>",)) == " peopl"
    assert text(("never", "<|end|>!")) == " people talk"


@pytest.mark.parametrize("form", FORMS)
def test_an_echo_and_its_continuation_are_one_text(tokenizers_, form):
    tokenizer = tokenizers_[form]
    model = scripted([tokenizer.eod], 0, tokenizer.vocab_size)
    limits = RequestLimits(sequences=4, max_tokens=16)

    def echoes(prompt):
        return parse_request({"prompt": prompt, "echo": True}, model, tokenizer, limits).answers.echoes

    assert echoes("The capital of France is") == ("The capital of France is",)
    assert echoes("") == ("",)
    ids = positions.prompt(tokenizer, "how many")
    assert echoes([ids]) == (tokenizer.backend.decode(ids),)


def test_characters_are_those_of_the_text(tokenizers_):
    """gpt-neox's `char_level_ppl` with HFTokenizer: special tokens have no characters."""
    tokenizer = tokenizers_["llama2"]
    ids = [*positions.document(tokenizer, "how many"), tokenizer.eod]
    counter = CharacterCounter(tokenizer)
    batch = {"labels": torch.tensor([ids]), "loss_mask": torch.ones(1, len(ids))}
    assert list(counter.evaluation_batches(iter([batch]))) == [batch]
    assert counter.tokens_per_character(SimpleNamespace(gather=lambda counts: [counts])) == len(ids) / len("how many")


def test_a_conversation_begins_as_its_template_says(tokenizers_):
    """vllm#9519, #16853, llama-cpp-python#1501: no second beginning for a template that writes one."""
    tokenizer = tokenizers_["llama3"]
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    chat = ChatFormat(ChatTemplate(source, {"bos_token": "<s>"}), tokenizer)
    written = "<s>user: how many\n"
    ids = chat.encode([{"role": "user", "content": "how many"}])
    assert ids == tokenizer.backend.encode(written, add_special_tokens=False).ids
    assert positions.prompt(tokenizer, written) == ids


def test_sentencepiece_itself(tmp_path):
    """A text after another, and ends of documents, with a `.model` file."""
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece (requirements-corpus.txt) is not installed")
    from neox.tokenizer import END_OF_DOCUMENT
    from tests.field.text_tokenizers import corpus

    (tmp_path / "corpus.txt").write_text("\n".join(corpus()))
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "m"), vocab_size=90, minloglevel=2,
        user_defined_symbols=[END_OF_DOCUMENT], byte_fallback=False,
    )  # fmt: skip
    tokenizer = build_tokenizer("SPMTokenizer", tmp_path / "m.model")
    ids = tokenizer.encode("how many people")
    before = tokenizer.encode("how many")
    assert [*before, *positions.continuation(tokenizer, " people")] == ids
    assert positions.text_after(tokenizer, before, ids[len(before) :]) == " people"
    assert positions.text_after(tokenizer, before, [*ids[len(before) :], tokenizer.eod]) == " people"
    assert positions.scored(tokenizer, "how many ", "people") == (tuple(ids), len(before))
    assert np.array_equal(positions.prompt(tokenizer, ""), [tokenizer.eod])


def test_rows_of_a_new_token_are_means_of_pieces_without_a_beginning(tokenizers_):
    tokenizer = tokenizers_["llama2"]
    assert tokenizer.before_text[0] not in positions.continuation(tokenizer, "music")
    assert tokenizer.decode_shown(positions.continuation(tokenizer, "music")) == "music"
    assert tokenizer.encode("music")[0] == tokenizer.before_text[0]
