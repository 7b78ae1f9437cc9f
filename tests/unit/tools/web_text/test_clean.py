"""Cleaning of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from neox.errors import ConfigError
from tests.errors import raises_naming
from tools.web_text import run_step
from tools.web_text.clean import CLEAN, CleanSettings, build_clean
from tools.web_text.rules import c4_lines, gopher_quality, gopher_repetition
from tools.web_text.step import Outcome

ENGLISH = (
    "The river rises in the hills to the north of the town and flows past the old mill, which was built with stone "
    "that the people of the valley had cut by hand. In spring it floods the meadows, and farmers have to move their "
    "sheep to higher ground. Nobody remembers a year in which the bridge was closed for more than a week."
)
GERMAN = "Der Fluss entspringt in den Hügeln nördlich der Stadt und fließt an der alten Mühle vorbei, die man baute."
LONG = "\n".join(f"{i}. {ENGLISH}" for i in range(3))


def clean(text: str, **settings: Any) -> Outcome:
    (outcome,) = build_clean(CleanSettings(input=("x",), output=Path("y"), **settings))({"text": text, "url": "u"})
    return outcome


def test_defaults_keep_repaired_english() -> None:
    outcome = clean(LONG + " It\u00e2\u20ac\u2122s here.")  # UTF-8 read as Windows-1252
    assert outcome.dropped is None
    assert outcome.changed == ("ftfy",)
    assert outcome.record["text"] == LONG + " It\u2019s here."
    assert outcome.record["url"] == "u"


@pytest.mark.parametrize(
    ("text", "settings", "reason"),
    [
        (GERMAN * 8, {}, "language: de"),
        (GERMAN * 8, {"language": "de"}, None),
        (GERMAN * 8, {"language": "any"}, None),
        (ENGLISH, {}, "too few tokens"),
        (ENGLISH, {"min_tokens": 60}, None),
        ("12345 67890 " * 200, {}, "language: ?"),
        (ENGLISH[:400], {"fixes": ("remove_512",), "min_tokens": 0}, "remove_512"),
        (
            "Enable JavaScript to view this page, please.",
            {"fixes": ("remove_256_javascript",), "language": "any", "min_tokens": 0},
            "remove_256_javascript",
        ),
        (GERMAN, {"fixes": ("remove_512_non_english",), "language": "any", "min_tokens": 0}, "remove_512_non_english"),
        (LONG.replace("sheep", "Damned sheep"), {"bad_words": "words.txt"}, "bad words"),
        (LONG.replace("sheep", "undamned sheep"), {"bad_words": "words.txt"}, None),
    ],
)
def test_reasons(
    text: str, settings: dict[str, Any], reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("damned\nlong phrase\n")
    assert clean(text, **settings).dropped == reason


def test_old_fixes_change_texts_as_before() -> None:
    outcome = clean("one  two\n\nthree.\n four", fixes=("general_cleaning",), min_tokens=0, language="any")
    assert outcome.record["text"] == "one two three.\n four"  # after a full stop there is no end of a word
    assert outcome.changed == ("general_cleaning",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LONG, None),
        ("word " * 40, "gopher: number of words"),
        ("a b c d " * 30, "gopher: mean length of words"),
        ("#tag " * 10 + LONG[:300], "gopher: symbols for words"),
        ("\n".join("- the cheese and bread with butter" for _ in range(20)), "gopher: lines that start with a bullet"),
        ("\n".join("The cheese and bread with butter..." for _ in range(20)), "gopher: symbols for words"),
        ("\n".join(ENGLISH + "..." for _ in range(3)), "gopher: lines that end with an ellipsis"),
        ("the and 1234 5678 9012 " * 30, "gopher: words without a letter"),
        ("cheese bread butter knife plate " * 12, "gopher: stop words"),
    ],
)
def test_gopher_quality(text: str, reason: str | None) -> None:
    assert gopher_quality(text) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ENGLISH, None),
        ("same line\n" * 5 + ENGLISH, "gopher: repeated lines"),
        ("\n".join([*ENGLISH.split(". "), *ENGLISH.split(". ")[:1]]), "gopher: characters in repeated lines"),
        ("buy now " * 50, "gopher: the most frequent 2-gram"),
        (f"{ENGLISH} {ENGLISH}", "gopher: repeated 5-grams"),
    ],
)
def test_gopher_repetition(text: str, reason: str | None) -> None:
    assert gopher_repetition(text) == reason


def test_c4() -> None:
    text = f"Home\nMenu of the page\n{ENGLISH}[12]\nPlease enable JavaScript to see all of it.\nWe use cookies on here."
    assert c4_lines(text) == (ENGLISH, None)
    assert c4_lines("Lorem ipsum dolor. " * 9)[1] == "c4: lorem ipsum"
    assert c4_lines(ENGLISH + " if (x) { y }")[1] == "c4: curly bracket"
    assert c4_lines("This line has five words. And more.")[1] == "c4: number of sentences"


def test_tokens_are_counted_with_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(path))  # one token for each text
    assert clean(LONG, tokenizer=path, min_tokens=2).dropped == "too few tokens"
    assert clean(LONG, tokenizer=path, min_tokens=1).dropped is None


def test_fasttext_where_installed(tmp_path: Path) -> None:
    fasttext = pytest.importorskip("fasttext", reason="fasttext is an optional detector that is not installed")
    lines = [f"__label__en {ENGLISH}", f"__label__de {GERMAN}"] * 30
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    try:
        model = fasttext.train_supervised(str(tmp_path / "train.txt"), thread=1, epoch=20, verbose=0, dim=8)
    except RuntimeError as error:
        pytest.skip(f"this build of fasttext cannot train ({error})")
    model.save_model(str(tmp_path / "model.bin"))
    settings = {"detector": "fasttext", "fasttext_model": tmp_path / "model.bin", "min_tokens": 0}
    assert clean(ENGLISH, **settings).dropped is None
    assert clean(GERMAN, **settings).dropped == "language: de"
    with pytest.raises(ValidationError):
        clean(ENGLISH, detector="fasttext")


def test_an_unknown_language_is_refused() -> None:
    with raises_naming(ConfigError, "'xx'", "ISO 639-1"):
        clean(ENGLISH, language="xx")


def test_the_step_writes_both_parts(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in (LONG, GERMAN * 8, "", "a b")))
    report = run_step(CLEAN, CleanSettings(input=(tmp_path / "in.jsonl",), output=tmp_path / "out.jsonl"))
    assert (report["documents_in"], report["documents_out"]) == (4, 1)
    assert {reason: count for reason, (count, _) in report["dropped"].items()}["language: de"] == 1
    dropped = [json.loads(line) for line in (tmp_path / "dropped/out.jsonl").read_text().splitlines()]
    assert [d["text"] for d in dropped] == [GERMAN * 8, "", "a b"]
