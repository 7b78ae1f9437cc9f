"""BERT's tokenizers, compared with those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from neox.convert.hf_tokenizer import TokenizerSource, write_tokenizer
from neox.data.masked.masking import MaskingVocabulary
from neox.errors import DataError, TokenizerError
from neox.families import FAMILIES
from neox.tokenizer import build_tokenizer, train_tokenizer
from tests.errors import raises_naming
from tests.transformers_versions import of_the_locked_version

TEXTS = (
    "The quick brown fox jumps over the lazy dog. Fox's dens aren't far!",
    "Ünïcödé accents, naïve cafés; Ελληνικά и русский текст",
    "中文文本没有空格，每个字都是一个词。",
    "tabs\tand\nnewlines \u00a0 and \u2028 spaces; [MASK] in a text, ##ing",
    "supercalifragilisticexpialidocious " * 3,
    "",
)


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wordpiece")
    for name, kind in (("lower", "wordpiece"), ("cased", "wordpiece-cased")):
        train_tokenizer(list(TEXTS) * 5, 400, root / f"{name}.txt", kind)
    return root


@of_the_locked_version
@pytest.mark.parametrize(("name", "kind"), [("lower", "BertWordPieceLowerCase"), ("cased", "BertWordPieceCase")])
def test_ids_are_those_of_transformers(vocabularies: Path, name: str, kind: str) -> None:
    from transformers import BertTokenizerFast

    ours = build_tokenizer(kind, vocabularies / f"{name}.txt")
    words = (vocabularies / f"{name}.txt").read_text(encoding="utf-8").split("\n")[:-1]
    theirs = BertTokenizerFast(vocab={w: i for i, w in enumerate(words)}, do_lower_case=name == "lower")
    for text in TEXTS:
        assert ours.encode(text.replace("[MASK]", "x")) == theirs.encode(
            text.replace("[MASK]", "x"), add_special_tokens=False
        )
    assert ours.vocab_size == len(words) <= 400
    assert ours.eod == words.index("[SEP]")
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]


def test_masking_vocabulary(vocabularies: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocabularies / "lower.txt")
    vocabulary = MaskingVocabulary.of(tokenizer)
    assert (vocabulary.pad, vocabulary.cls, vocabulary.sep, vocabulary.mask) == (0, 2, 3, 4)
    pieces = tokenizer.encode("supercalifragilisticexpialidocious zzz")
    continued = vocabulary.continues[pieces]
    assert not continued[0]
    assert continued.any()
    assert isinstance(continued, np.ndarray)
    with raises_naming(DataError, "--kind wordpiece"):
        MaskingVocabulary.of(build_tokenizer("CharLevelTokenizer", None))
    (tmp_path / "vocab.txt").write_text("the\nfox\n")
    with raises_naming(TokenizerError, tmp_path / "vocab.txt", "[UNK]"):
        build_tokenizer("BertWordPieceCase", tmp_path / "vocab.txt")
    with raises_naming(TokenizerError, "vocab_size 20"):
        train_tokenizer(TEXTS, 20, tmp_path / "small.txt", "wordpiece")


def test_a_tokenizer_json_gives_the_same_ids(vocabularies: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocabularies / "lower.txt")
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    for kind in ("HFTokenizer", "BertWordPieceLowerCase"):
        read = build_tokenizer(kind, tmp_path / "tokenizer.json")
        assert [read.encode(t.replace("[MASK]", "")) for t in TEXTS] == [
            tokenizer.encode(t.replace("[MASK]", "")) for t in TEXTS
        ]


@pytest.mark.parametrize(("name", "kind"), [("lower", "BertWordPieceLowerCase"), ("cased", "BertWordPieceCase")])
def test_an_export_adds_cls_and_sep(vocabularies: Path, tmp_path: Path, name: str, kind: str) -> None:
    from transformers import AutoTokenizer

    path = vocabularies / f"{name}.txt"
    ours = build_tokenizer(kind, path)
    write_tokenizer(TokenizerSource(ours, kind, path, None), tmp_path, FAMILIES["bert"], max_length=128)
    read = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    first, second = ours.encode(TEXTS[0]), ours.encode(TEXTS[2])
    cls, sep = ours.token_id("[CLS]"), ours.token_id("[SEP]")
    fields = read(TEXTS[0], TEXTS[2])
    assert fields["input_ids"] == [cls, *first, sep, *second, sep]
    assert fields["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert (read.mask_token, read.pad_token_id, read.model_max_length) == ("[MASK]", 0, 128)
