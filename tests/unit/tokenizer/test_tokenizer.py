"""Building tokenizers by NeoX's names, and training small ones."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neox.errors import DataError, TokenizerError
from neox.tokenizer import TOKENIZER_TYPES, build_tokenizer, train_tokenizer
from tests.errors import raises_naming

GOLDEN = Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json"
LINES = ("the cat sat on the mat\n", "a dog and the cat é ü 猫 😀\r\n", "  indented\n\tline it's we'll\n")
TEXTS = [line * 20 for line in LINES]


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    vocab, merges = train_tokenizer(TEXTS, 300, tmp_path_factory.mktemp("gpt2"), "gpt2")
    return vocab, merges


def test_hf_tokenizer_reads_the_golden_file() -> None:
    tokenizer = build_tokenizer("HFTokenizer", GOLDEN)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (1000, 0, 1)
    assert tokenizer.decode(tokenizer.encode("naïve 猫 😀\r\n")) == "naïve 猫 😀\r\n"
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_end_of_text_inside_a_document_follows_gpt_neox(gpt2_files: tuple[Path, Path]) -> None:
    text = "a<|endoftext|>b"
    hf, gpt2 = build_tokenizer("HFTokenizer", GOLDEN), build_tokenizer("GPT2BPETokenizer", *gpt2_files)
    assert hf.eod in hf.encode(text)
    assert gpt2.eod not in gpt2.encode(text)
    other_hf = build_tokenizer("HFTokenizer", GOLDEN, special_in_text=False)
    other_gpt2 = build_tokenizer("GPT2BPETokenizer", *gpt2_files, special_in_text=True)
    assert other_hf.eod not in other_hf.encode(text)
    assert other_gpt2.eod in other_gpt2.encode(text)
    assert hf.content_hash == other_hf.content_hash != gpt2.content_hash == other_gpt2.content_hash


def test_gpt2_files_round_trip(gpt2_files: tuple[Path, Path]) -> None:
    gpt2 = build_tokenizer("GPT2BPETokenizer", *gpt2_files)
    assert (gpt2.vocab_size, gpt2.eod) == (300, 299)
    for text in TEXTS:
        assert gpt2.decode(gpt2.encode(text)) == text
    hugging = build_tokenizer("HFGPT2Tokenizer", gpt2_files[0].parent)
    assert (hugging.vocab_size, hugging.eod, hugging.pad) == (301, 299, 300)
    assert hugging.encode(TEXTS[1]) == gpt2.encode(TEXTS[1])
    assert build_tokenizer("HFGPT2Tokenizer", *gpt2_files).content_hash == hugging.content_hash


@pytest.mark.parametrize("kind", ["byte-level-bpe", "gpt2", "sentencepiece-char", "wordpiece"])
def test_fewer_ids_than_were_asked_for_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    train_tokenizer(TEXTS, 5000, tmp_path / "out", kind)  # type: ignore[arg-type]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    found = re.findall(r"[\d,]+\d", warning)
    assert found[1] == "5,000"
    if kind == "gpt2":
        assert int(found[0]) == len(json.loads((tmp_path / "out" / "vocab.json").read_text()))


def test_training_is_repeatable_and_20b_styled(tmp_path: Path) -> None:
    (first,) = train_tokenizer(TEXTS, 290, tmp_path / "a" / "tokenizer.json")
    (second,) = train_tokenizer(iter(TEXTS), 290, tmp_path / "b.json")
    assert first.read_bytes() == second.read_bytes()
    trained = build_tokenizer("HFTokenizer", first)
    assert (trained.vocab_size, trained.eod, trained.pad) == (290, 0, 1)
    state = json.loads(first.read_text())
    assert state["normalizer"] == {"type": "NFC"}
    assert state["pre_tokenizer"]["type"] == "ByteLevel"
    assert trained.decode(trained.encode("漢字 unseen\0")) == "漢字 unseen\0"
    assert not list(tmp_path.rglob("*.partial"))


def test_content_hash_ignores_layout_of_the_file(tmp_path: Path) -> None:
    state = json.loads(GOLDEN.read_text())
    compact = tmp_path / "t.json"
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    compact.write_text(json.dumps(state))
    first, second = build_tokenizer("HFTokenizer", GOLDEN), build_tokenizer("HFTokenizer", compact)
    assert first.content_hash == second.content_hash
    assert len(second.encode("many more than four tokens in this one")) > 4
    state["normalizer"] = None
    compact.write_text(json.dumps(state))
    assert build_tokenizer("HFTokenizer", compact).content_hash != first.content_hash


def test_characters() -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, 0, 1)
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode([97, 195, 169, 0, 300]) == "aé\ufffd\ufffd"


def test_sentencepiece(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="the optional package sentencepiece is not installed")
    (model,) = train_tokenizer(TEXTS, 300, tmp_path / "spm.model", "sentencepiece")
    tokenizer = build_tokenizer("SPMTokenizer", model)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_characters_of_chinese_text_with_a_newline_symbol(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="the optional package sentencepiece is not installed")
    texts = ["今天天气很好。\n我们去公园玩吧！", "我爱北京天安门\n天安门上太阳升"] * 20
    (model,) = train_tokenizer(texts, 400, tmp_path / "spm.model", "sentencepiece-char")
    tokenizer = build_tokenizer("SPMTokenizer", model)
    assert 256 < tokenizer.vocab_size <= 400
    assert len(tokenizer.encode(texts[0])) == len(texts[0])  # one id for each character, and for the newline
    text = "天安门\n\n  x 龍 😀\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("HFTokeniser", GOLDEN), ("HFTokeniser", "HFTokenizer")),
        (("HFTokenizer", None), ("vocab_file",)),
        (("HFTokenizer", "missing.json"), ("missing.json", "tools/train_tokenizer.py")),
        (("HFTokenizer", GOLDEN.parent), (GOLDEN.parent, "tools/train_tokenizer.py")),
        (("HFTokenizer", __file__), (__file__, "tools/train_tokenizer.py")),
        (("GPT2BPETokenizer", GOLDEN), ("merge_file",)),
        (("GPT2BPETokenizer", GOLDEN, __file__), (GOLDEN, __file__)),
    ],
)
def test_errors_name_the_file_and_the_way_out(arguments: tuple, names: tuple) -> None:
    with raises_naming(TokenizerError, *names):
        build_tokenizer(*arguments)


def test_a_vocabulary_without_end_of_document_is_refused(tmp_path: Path) -> None:
    state = json.loads(GOLDEN.read_text().replace("<|endoftext|>", "<|other|>"))
    path = tmp_path / "t.json"
    path.write_text(json.dumps(state))
    with raises_naming(TokenizerError, path, "<|endoftext|>", "eos_token"):
        build_tokenizer("HFTokenizer", path)


def test_training_refuses_nothing_and_too_small(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError):
        train_tokenizer(["", ""], 300, tmp_path / "t.json")
    with raises_naming(TokenizerError, "vocab_size 257"):
        train_tokenizer(TEXTS, 257, tmp_path / "t.json")


@pytest.mark.parametrize("kind", ["byte-level-bpe", "gpt2"])
def test_the_output_is_checked_before_a_text_is_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    unread = iter(TEXTS)
    with raises_naming(TokenizerError, tmp_path / "file" / "t.json"):
        train_tokenizer(unread, 300, tmp_path / "file" / "t.json", kind)  # type: ignore[arg-type]
    with raises_naming(TokenizerError, tmp_path):
        train_tokenizer(unread, 300, tmp_path if kind == "byte-level-bpe" else tmp_path / "file", kind)  # type: ignore[arg-type]
    assert next(unread) == TEXTS[0]


def test_an_error_of_the_documents_arrives(tmp_path: Path) -> None:
    def documents() -> Iterator[str]:
        yield "good"
        raise DataError("line 2 is broken")

    with raises_naming(DataError, "line 2"):
        train_tokenizer(documents(), 300, tmp_path / "t.json")


def test_missing_packages_are_named() -> None:
    script = (
        "import sys\n"
        "sys.modules['sentencepiece'] = sys.modules['tiktoken'] = None\n"
        "from neox.tokenizer import build_tokenizer\n"
        "from neox.errors import TokenizerError\n"
        "assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
        "for kind in ('SPMTokenizer', 'TiktokenTokenizer'):\n"
        "    try: build_tokenizer(kind, 'x')\n"
        "    except TokenizerError as error: assert 'requirements-corpus' in str(error)\n"
        "    else: raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_listed_type_is_built_or_explained() -> None:
    for kind in TOKENIZER_TYPES:
        if kind != "CharLevelTokenizer":
            with pytest.raises(TokenizerError):
                build_tokenizer(kind, None)
