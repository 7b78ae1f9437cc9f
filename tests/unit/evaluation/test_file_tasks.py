"""Scores of text files with a model whose probabilities are known, and their formulas with known numbers."""

import json
import math
import subprocess

import pytest

from neox.config import NeoXConfig
from neox.data import IndexedDatasetBuilder, Sidecar, write_sidecar
from neox.errors import DataError, EvaluationError
from neox.evaluation.evaluate import evaluate_tasks
from neox.evaluation.lambada import lambada
from neox.evaluation.perplexity import (
    adjusted_perplexity,
    bits_per_byte,
    corpus_perplexity,
    detokenize_wikitext,
    wikitext,
    wikitext_words,
)
from neox.evaluation.results import flat_metrics, perplexity_of
from neox.evaluation.scoring import Scorer
from neox.evaluation.tasks import file_task_scalars, parse_tasks, token_documents, unknown_harness_tasks
from neox.parallel import ParallelGrid
from tests.errors import raises_naming
from tests.unit.evaluation.table_model import ByteTokenizer, TableModel

WIKI = " \n = Robert Boulter = \n \n He is an English film , television and theatre actor . He had a @-@ role .\n" * 4
MODEL = TableModel()


def scoring(stride=None, window=16, model=MODEL):
    return Scorer(model, ByteTokenizer(), ParallelGrid.single(), window, stride)


@pytest.mark.parametrize("stride", [None, 5])
def test_wikitext(tmp_path, stride):
    path = tmp_path / "wiki.test.raw"
    path.write_text(WIKI)
    result = wikitext(path, scoring(stride))
    text = detokenize_wikitext(WIKI)
    assert "a-role" in text
    loss = -MODEL.total(ByteTokenizer().encode(text))
    tokens, words = len(text.encode()), len(WIKI.strip().split(" "))
    assert result.counts == {"tokens": tokens, "scored": tokens - 1, "words": words, "bytes": len(WIKI)}
    assert result.metrics["ppl"] == pytest.approx(math.exp(loss / (tokens - 1)), rel=1e-5)
    assert result.metrics["word_ppl"] == pytest.approx(math.exp(loss / (words - 1)), rel=1e-5)
    assert result.metrics["bits_per_byte"] == pytest.approx(loss / math.log(2) / len(WIKI), rel=1e-5)


def test_a_corpus_and_its_token_file_score_alike(tmp_path):
    texts = ["first document, longer than one window", "b", "the third: äöü"]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    builder = IndexedDatasetBuilder(str(tmp_path / "c_text_document"), "uint16")
    for text in texts:
        builder.add_document([*text.encode(), 256])
    builder.add_document([256])  # of a document without text, which is none
    builder.finalize()
    documents = corpus_perplexity(tmp_path / "c.jsonl", scoring())
    tokens = corpus_perplexity(tmp_path / "c_text_document", scoring())
    loss = -sum(MODEL.total([256, *text.encode()]) for text in texts)
    scored = sum(len(text.encode()) for text in texts)
    assert documents.metrics["loss"] == tokens.metrics["loss"] == pytest.approx(loss / scored, rel=1e-5)
    assert documents.metrics["ppl"] == tokens.metrics["ppl"] == pytest.approx(math.exp(loss / scored), rel=1e-5)
    assert documents.counts["documents"] == tokens.counts["documents"] == 3
    assert documents.counts["scored"] == tokens.counts["scored"] == scored
    assert set(documents.metrics) - set(tokens.metrics) == {"word_ppl", "byte_ppl", "bits_per_byte"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("one two three\n  four five six\n\tseven  eight nine ten\n", 10),
        ("one", 1),
        (" ", 0),
    ],
)
def test_words_of_own_text_are_those_of_wc(tmp_path, text, words):
    """Not those of wikitext, whose words and line ends stand between single blanks."""
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": text}) + "\n")
    result = corpus_perplexity(tmp_path / "c.jsonl", scoring())
    loss = -MODEL.total([256, *text.encode()])
    (tmp_path / "c.txt").write_text(text)
    counted = subprocess.run(["wc", "-w", tmp_path / "c.txt"], capture_output=True, check=True).stdout.split()[0]
    assert result.counts["words"] == words == int(counted)
    if words:
        assert result.metrics["word_ppl"] == pytest.approx(math.exp(loss / words), rel=1e-5)
    else:
        assert "word_ppl" not in result.metrics
    assert result.metrics["byte_ppl"] == pytest.approx(math.exp(loss / len(text)), rel=1e-5)


def test_documents_of_a_token_file_are_whole_and_small(tmp_path):
    """Four bytes a token; documents without text are left out, and so are ends, but not those that are text."""
    builder = IndexedDatasetBuilder(str(tmp_path / "c"), "uint16")
    builder.add_document([1, 2, 3, 256])
    builder.add_document([])
    builder.add_document([5])
    builder.finalize()
    documents = list(token_documents(tmp_path / "c", ByteTokenizer()))
    assert [ids.tolist() for ids in documents] == [[256, 1, 2, 3], [256, 5]]
    assert {ids.dtype.name for ids in documents} == {"int32"}
    write_sidecar(tmp_path / "c", Sidecar("bytes", "bytes", 257, 256, False, documents=3, tokens=5, max_id=256))
    documents = list(token_documents(tmp_path / "c", ByteTokenizer()))
    assert [ids.tolist() for ids in documents] == [[256, 1, 2, 3, 256], [256, 5]]


def test_a_limit_holds_for_every_kind_of_task(tmp_path):
    article = WIKI[: len(WIKI) // 4]
    (tmp_path / "wiki.raw").write_text(WIKI)
    (tmp_path / "l.txt").write_text("one two three\n" * 4)
    (tmp_path / "c.jsonl").write_text('{"text": "some text"}\n' * 4)
    builder = IndexedDatasetBuilder(str(tmp_path / "t"), "uint16")
    for _ in range(4):
        builder.add_document([1, 2, 256])
    builder.finalize()
    tasks = [f"{kind}={tmp_path / name}" for kind, name in (("wikitext", "wiki.raw"), ("lambada", "l.txt"))]
    tasks += [f"perplexity={tmp_path / name}" for name in ("c.jsonl", "t")]
    for limit, examples in ((3, 3), (9, 4), (None, 4)):
        config = NeoXConfig.from_flat({"seq_length": 16, "eval_tasks": tasks, "eval_limit": limit})
        wiki, passages, *corpora = evaluate_tasks(tasks, MODEL, ByteTokenizer(), ParallelGrid.single(), config)
        assert wiki.counts["bytes"] == examples * len(article) + 2 * (examples < 4)  # the empty line before a title
        assert passages.counts["passages"] == examples
        assert [corpus.counts["documents"] for corpus in corpora] == [examples, examples]
    reported = {name for name in flat_metrics([wiki, passages, *corpora]) if not name.endswith("_stderr")}
    assert reported == set(file_task_scalars(parse_tasks(tasks)[0]))


def test_token_files_of_another_tokenizer_are_refused(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "c"), "uint16")
    builder.add_document([1, 2, 257])
    builder.finalize()
    with raises_naming(EvaluationError, tmp_path / "c", "token 257"):
        corpus_perplexity(tmp_path / "c.bin", scoring())


def test_lambada(tmp_path):
    best = MODEL.log_probabilities.argmax(-1).tolist()
    # The first passage's last token follows greedily from the one before.
    start = next(n for n in range(97, 123) if 97 <= best[n] < 123)
    passages = [f"one two x{chr(start)}{chr(best[start])}", "three four qq", "z"]
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    result = lambada(path, scoring())

    def greedy(tokens, first):
        return all(best[a] == b for a, b in zip(tokens[first - 1 :], tokens[first:], strict=False))

    last_tokens, words = [], []
    for text in passages:
        ids = [256, *text.encode()]
        last_tokens.append(greedy(ids, len(ids) - 1))
        head, _, word = text.rpartition(" ")
        words.append(((list(head.encode()) or [256]), list(f" {word}".encode())))
    assert last_tokens[0]
    assert result.metrics["acc"] == sum(last_tokens) / 3
    assert result.metrics["strict_acc"] == sum(greedy(c + w, len(c)) for c, w in words) / 3
    loss = -sum(MODEL.total(c + w, len(c)) for c, w in words) / 3
    assert result.metrics["ppl"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert result.counts == {"passages": 3, "truncated": 0}
    (tmp_path / "lambada.txt").write_text("\n".join(passages) + "\n")
    assert lambada(tmp_path / "lambada.txt", scoring()).metrics == result.metrics


def test_long_passages_lose_their_beginning_and_are_counted(tmp_path):
    path = tmp_path / "l.txt"
    path.write_text("word " * 30 + "end\nshort one\n")
    result = lambada(path, scoring())
    assert result.counts == {"passages": 2, "truncated": 1}


@pytest.mark.parametrize(
    ("task", "name", "content", "error"),
    [
        (wikitext, "w.txt", b"", EvaluationError),
        (wikitext, "w.txt", b"word", EvaluationError),
        (wikitext, "w.txt", b"\xff\xfe", EvaluationError),
        (lambada, "l.txt", b"\n\n", EvaluationError),
        (lambada, "l.jsonl", b'{"text": ', DataError),
        (corpus_perplexity, "c.jsonl", b"", DataError),
        (corpus_perplexity, "c.jsonl", b'{"text": ""}\n', EvaluationError),
        (corpus_perplexity, "c.jsonl", b'{"content": "a"}\n', DataError),
    ],
)
def test_bad_files_are_named(tmp_path, task, name, content, error):
    (tmp_path / name).write_bytes(content)
    with raises_naming(error, tmp_path / name):
        task(tmp_path / name, scoring())


def test_the_adjusted_perplexity_spreads_the_same_loss_over_words():
    assert adjusted_perplexity(30 * math.log(7), 16) == pytest.approx(49)


def test_perplexities_of_large_losses_differ_and_do_not_overflow():
    """Losses per word are often above 20, where gpt-neox's and Megatron's perplexity ends."""
    assert adjusted_perplexity(25.0, 2) == pytest.approx(math.exp(25))
    assert perplexity_of(1e9) == adjusted_perplexity(1e9, 2) == math.exp(700)


def test_bits_per_byte():
    assert bits_per_byte(80 * math.log(2), 40) == pytest.approx(2)


def test_words_of_wikitext_are_split_at_single_spaces_of_the_stripped_text():
    assert wikitext_words(" \n a  b\nc d \n") == 4  # "a", "", "b\nc", "d"


@pytest.mark.parametrize(
    ("spaced", "joined"),
    [
        ("Chronicles 3 @.@ 0 , sold 1 @,@ 000 well @-@ made .", "Chronicles 3.0, sold 1,000 well-made ."),
        ("it 's the boys ' game : yes ; no ! what ? done . end", "it's the boys' game: yes; no! what? done. end"),
        ("( lit . Valkyria ) [ 1 ] { x }", "(lit. Valkyria) [1] {x}"),
        ('the " Nameless " unit', 'the "Nameless" unit'),
        (" = = = Plot = = = \n a 40 ° b", " === Plot ===\na 40°b"),
    ],
)  # fmt: skip
def test_wikitext_reads_like_text_again(spaced, joined):
    assert detokenize_wikitext(spaced) == joined


def test_misspelt_names_of_the_harness_are_known_without_importing_it():
    pytest.importorskip("lm_eval")
    names = ["lambada_openai", "lambada_opnai", "lambada_opena", "mmlu*", "own.yaml"]
    assert unknown_harness_tasks(names) == ["lambada_opnai", "lambada_opena"]
