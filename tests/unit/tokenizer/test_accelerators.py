"""Accelerators give the ids of the tokenizer, or are rejected with a note."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from neox.errors import TokenizerError
from neox.tokenizer import Tokenizer, build_tokenizer, train_tokenizer
from neox.tokenizer.accelerators import _DIFFICULT_TEXTS, choose_encoder, first_difference, make_encoder
from neox.tokenizer.words import cut, cut_reason
from tests.errors import raises_naming

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "data" / "tokenizer.json"
ALPHABETS = (
    "ab cd'st  \n\r\t.,",
    "aZ09_-+ '\"sldmtrve\n",
    "e\u0301a\u0316 \u0323\u1e9bÅﬁ½²Ⅷ\u00a0\u3000\u2028\x85\x1c\x0b\x0c\n s'",
    "日本語、한글。，\u1112\u1161 العربية\u200dहिन्दी😀👩‍👧 a. \n",
    "<|endoftext|>padding <| \n",
)


def random_texts(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    texts = []
    for _ in range(count):
        letters = "".join(chance.sample(ALPHABETS, chance.randint(1, 3)))
        parts = [
            chance.choice([*letters, "<|endoftext|>", "   ", " the", "\n\n"]) for _ in range(chance.randint(0, 60))
        ]
        texts.append("".join(parts))
    return texts


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "neox" / "corpus").glob("*.py"))[:4]]


@pytest.fixture(scope="module", params=["HFTokenizer", "ordinary specials", "GPT2BPETokenizer", "runs of spaces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "HFTokenizer":
        return build_tokenizer("HFTokenizer", GOLDEN)
    if request.param == "ordinary specials":
        return build_tokenizer("HFTokenizer", GOLDEN, special_in_text=False)
    if request.param == "GPT2BPETokenizer":
        return build_tokenizer("GPT2BPETokenizer", *train_tokenizer(random_texts(1, 300), 600, folder, "gpt2"))
    state = json.loads(GOLDEN.read_text())  # GPT-NeoX-20B's tokenizer has runs of spaces as added tokens
    for i, length in enumerate(range(24, 1, -1)):
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
        state["added_tokens"].append({"id": 1000 + i, "content": " " * length, "normalized": True, **plain})
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(state))
    return build_tokenizer("HFTokenizer", path)


@pytest.mark.parametrize("name", ["off", "words", "fastokens"])
def test_same_ids(tokenizer: Tokenizer, name: str, sources: list[str]) -> None:
    if name == "fastokens":
        pytest.importorskip("fastokens", reason="the optional package fastokens is not installed")
    encoder = make_encoder(tokenizer, name)
    for texts in (random_texts(7, 200), sources, sources, list(_DIFFICULT_TEXTS), []):
        flat, lengths = encoder.encode_flat(texts)
        expected = [tokenizer.encode(text) for text in texts]
        assert lengths.tolist() == [len(ids) for ids in expected]
        assert flat.tolist() == [i for ids in expected for i in ids]
        assert flat.dtype == np.uint32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["words", "fastokens"])
def test_same_ids_on_many_texts(tokenizer: Tokenizer, name: str) -> None:
    if name == "fastokens":
        pytest.importorskip("fastokens", reason="the optional package fastokens is not installed")
    encoder = make_encoder(tokenizer, name)
    for seed in range(20):
        assert first_difference(encoder, tokenizer, random_texts(1000 + seed, 1000)) is None


def test_cutting_changes_nothing(sources: list[str]) -> None:
    tokenizer = build_tokenizer("HFTokenizer", GOLDEN)
    text = "".join(sources) + "".join(random_texts(3, 300))
    pieces = list(cut(text, 500))
    assert len(pieces) > 20
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)
    assert list(cut("x" * 5000, 500)) == ["x" * 5000]
    assert list(cut("", 500)) == [""]


def test_tokenizers_that_may_not_be_cut_are_recognized(tmp_path: Path) -> None:
    state = json.loads(GOLDEN.read_text())
    changes = [
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
        ("added_tokens", [{**state["added_tokens"][0], "rstrip": True}, state["added_tokens"][1]]),
        ("added_tokens", [*state["added_tokens"], {**state["added_tokens"][0], "id": 1000, "content": "a b"}]),
    ]
    assert cut_reason(build_tokenizer("HFTokenizer", GOLDEN)) is None
    for key, value in changes:
        path = tmp_path / "t.json"
        path.write_text(json.dumps({**state, key: value}))
        assert cut_reason(build_tokenizer("HFTokenizer", path)) is not None, key
    assert cut_reason(build_tokenizer("CharLevelTokenizer", None)) is not None


def test_a_wrong_accelerator_is_passed_over_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer("HFTokenizer", GOLDEN)
    wrong = "neox.tokenizer.accelerators.FastokensEncoder.encode_flat"

    def off_by_one(self: object, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = [tokenizer.encode(text) for text in texts]
        return np.array([i + 1 for each in ids for i in each], np.uint32), np.array([len(each) for each in ids])

    pytest.importorskip("fastokens", reason="the optional package fastokens is not installed")
    assert choose_encoder(tokenizer, "auto", ["some text"]).note is None
    monkeypatch.setattr(wrong, off_by_one)
    choice = choose_encoder(tokenizer, "auto", ["some text"])
    assert choice.encoder.name == "words"
    assert "fastokens" in (choice.note or "")
    with raises_naming(TokenizerError, "fastokens"):
        choose_encoder(tokenizer, "fastokens", [])
    assert choose_encoder(tokenizer, "off", []).encoder.name == "off"
    characters = choose_encoder(build_tokenizer("CharLevelTokenizer", None), "auto", ["x"])
    assert characters.encoder.name == "off"
    assert characters.note
