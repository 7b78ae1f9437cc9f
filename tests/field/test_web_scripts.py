"""Texts in scripts without blanks, and in other forms of Unicode, in cleaning and decontamination."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tools.web_text import run_step
from tools.web_text.clean import CleanSettings, build_clean
from tools.web_text.decontaminate import DECONTAMINATE, DecontaminateSettings, EvaluationGrams, cut_intervals
from tools.web_text.rules import c4_lines, gopher_quality, gopher_repetition, word_pattern
from tools.web_text.words import Words

CHINESE = (
    "下列关于细胞呼吸作用的叙述中哪一项是正确的？"
    "有氧呼吸的第一阶段发生在线粒体基质中，葡萄糖被分解成丙酮酸并释放少量能量。"
)
JAPANESE = (
    "次の文章を読んで、後の問いに答えなさい。日本で一番高い山は富士山であり、標高は三千七百七十六メートルである。"
)
HINDI = "भारत की राजधानी नई दिल्ली है और यहाँ संसद भवन तथा राष्ट्रपति भवन जैसी अनेक प्रसिद्ध इमारतें स्थित हैं"
THAI = "ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำแน่นอนหรือวรรณยุกต์เช่นเดียวกับภาษาจีนและออกเสียงแยกคำต่อคำ"
FRENCH = "La première élève a récité très fièrement le poème préféré de sa grand-mère décédée l'été dernier."
TURKISH = (
    "İstanbul İli sınırları içinde yer alan bu eski köprü on altıncı yüzyılda ünlü mimar tarafından yaptırılmıştır."
)
KOREAN = "대한민국의 수도는 서울이며 한강이 도시를 가로질러 흐르고 많은 사람들이 이곳에서 살고 일하며 공부하고 있다"
ENGLISH = "The quick copper kettle whistled while seven astronomers argued about the orbit of a distant icy comet."
PADDING = "这是别的内容。 Nothing else is here. "


def spans(evaluation: str, text: str) -> list[str]:
    grams = EvaluationGrams(13)
    assert grams.add("e", evaluation)
    return [text[first:last] for first, last, _ in grams.find(text)]


@pytest.mark.parametrize(
    ("evaluation", "variant"),
    [
        *((text, text) for text in (CHINESE, JAPANESE, HINDI, THAI, FRENCH, TURKISH, KOREAN, ENGLISH)),
        (FRENCH, unicodedata.normalize("NFD", FRENCH)),
        (unicodedata.normalize("NFD", FRENCH), FRENCH),
        (KOREAN, unicodedata.normalize("NFD", KOREAN)),
        (JAPANESE, unicodedata.normalize("NFD", JAPANESE)),
        (TURKISH, TURKISH.replace("İ", "i")),
        (ENGLISH, ENGLISH.replace("astronomers", "astro\u00adnomers")),
        (ENGLISH, ENGLISH.replace(" argued", " \u200bargued")),
        (ENGLISH, ENGLISH.upper()),
        (ENGLISH, ENGLISH.replace("seven", "**seven**").replace("icy", "_icy_")),
        (ENGLISH, ENGLISH.replace("i", "\uff49")),  # of full width
        (CHINESE, CHINESE.replace("，", " , ").replace("？", "?")),
        (CHINESE, "".join(f"{character}\u200b" for character in CHINESE)),
    ],
)
def test_evaluation_texts_are_found_in_any_form(evaluation: str, variant: str) -> None:
    """mteb PR 4860, deja-vu#1098: scripts without blanks, NFD, soft hyphens."""
    text = f"{PADDING * 3}{variant}{PADDING * 3}"
    found = spans(evaluation, text)
    assert found
    assert all(part in text for part in found)
    core = variant.strip("。.\u200b")
    start, stop = text.index(found[0]), text.rindex(found[-1]) + len(found[-1])
    assert core in text[start : stop + 1]
    assert spans(evaluation, PADDING * 9) == []


def test_words_are_the_same_in_texts_of_one_and_of_several_scripts() -> None:
    text = "Naïve Ünïcode — «слово» λόγος snake_case __dunder__ 1.5 l’été “quoted” don't 𝒳"
    assert [*Words.of(text).words, "中"] == Words.of(f"{text} 中").words


def test_a_short_run_of_characters_is_no_match() -> None:
    """A name of an office has 13 characters, which are about seven words."""
    grams = EvaluationGrams(13)
    assert grams.add("e", f"中华人民共和国中央人民政府{CHINESE}")
    assert list(grams.find(f"{PADDING}中华人民共和国中央人民政府今天宣布了一项新的政策。")) == []


def test_short_evaluation_texts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """mteb PR 4860: a text that is too short to be found is said to be."""
    (tmp_path / "e.txt").write_text(CHINESE)
    (tmp_path / "short.jsonl").write_text('{"text": "西红柿是水果吗？"}\n{"text": "Who wrote it?"}\n')
    (tmp_path / "in.jsonl").write_text('{"text": "x"}\n')
    settings = DecontaminateSettings(
        input=(tmp_path / "in.jsonl",),
        output=tmp_path / "out.jsonl",
        evaluation=(tmp_path / "e.txt", tmp_path / "short.jsonl"),
    )
    assert run_step(DECONTAMINATE, settings)["details"]["evaluation_too_short"] == {"short.jsonl": 2}
    assert any("short.jsonl" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("mark", ["。", "！", "？", "।", "؟", "۔", "።", "။", "．"])
def test_cuts_end_with_sentences_of_any_script(mark: str) -> None:
    text = f"一二三{mark}四五六七八九{mark}十"
    assert cut_intervals(text, [(5, 7)], 0) == [(4, 11)]


def clean(text: str, **settings: Any) -> tuple[str, str | None]:
    values = {"language": "any", "min_tokens": 0, **settings}
    (outcome,) = build_clean(CleanSettings(input=("x",), output=Path("y"), **values))({"text": text})
    return outcome.record["text"], outcome.dropped


@pytest.mark.parametrize(
    "text",
    [
        "他说：“今天天气很好，我们去公园吧！”你觉得怎么样？（当然可以）价格是１００元；电话：１２３。",
        "彼は「ﾃｽﾄ」と言った。（本当に？）はい、そうです！価格：１００円～２００円。",
        "In HTML, write &lt;b&gt; for a literal tag and &amp;lt; for an escaped one; the entity &eacute; is é.",
        "“Don’t,” she said – the ﬁrst and only time…",
    ],
)
def test_cleaning_leaves_what_the_author_wrote(text: str) -> None:
    """mozilla/translations#1030: FineWeb's settings of ftfy; entities are read once, by the extraction."""
    assert clean(text) == (text, None)
    assert clean("sch\u00c3\u00b6n " + text)[0].startswith("schön ")


def test_bad_words_in_scripts_without_blanks() -> None:
    """t5's C4: words of Chinese, Japanese and Thai are found inside of others, those of other scripts are not."""
    pattern = word_pattern(["坏话", "damn", "คำหยาบ"])
    assert pattern is not None
    assert pattern.search("他说了坏话然后走了")
    assert pattern.search("นี่คือคำหยาบในประโยค")
    assert not pattern.search("undamned goodness")
    assert pattern.search("Damn it")


def test_rules_of_quality_in_scripts_without_blanks(tmp_path: Path) -> None:
    """datatrove's rules split such texts into words; by blanks, each line of Chinese is one long word."""
    text = "\n".join(CHINESE.replace("一", number) for number in "一二三四五六七八")
    assert gopher_quality(text, frozenset({"的", "是"})) is None
    assert gopher_quality(text, frozenset({"the", "of"})) == "gopher: stop words"
    assert c4_lines(text) == (text, None)
    assert c4_lines("短句。\n" + text)[0] == text
    assert gopher_repetition(CHINESE * 9) is not None
    (tmp_path / "stop.txt").write_text("的\n是\n")
    settings = {"language": "zh", "rules": ("gopher-quality",)}
    assert clean(text, **settings, stop_words=tmp_path / "stop.txt") == (text, None)
    with pytest.raises(ValidationError):
        clean(text, **settings)
    assert clean(text, rules=("gopher-quality",))[1] == "gopher: stop words"
    assert c4_lines("भारत एक बड़ा और सुंदर देश है। यहाँ बहुत लोग रहते हैं। वे मिलकर काम करते हैं।")[1] is None


def test_tokens_of_scripts_without_blanks() -> None:
    """A text of 500 characters has more than 128 tokens, though GPT-2 cuts it at a few places only."""
    assert clean(CHINESE * 10, min_tokens=128)[1] is None
    assert clean(CHINESE, min_tokens=128)[1] == "too few tokens"
