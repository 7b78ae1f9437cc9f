"""MediaWiki's markup as others met it: links with colons, templates inside sentences, other languages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.web_text.chunks import START
from tools.web_text.wikipedia import Site, WikipediaSettings, build_wikipedia, plain_text, read_dump


def text(markup: str, language: str = "en", title: str = "") -> str:
    return plain_text(markup, frozenset(), headings=True, site=Site(language), title=title)


@pytest.mark.parametrize(
    ("markup", "shown"),
    [
        ("[[Star Trek: Voyager]]", "Star Trek: Voyager"),
        ("[[2001: A Space Odyssey (film)|2001]]", "2001"),
        ("[[Mission: Impossible|the films]]", "the films"),
        ("[[:Category:Films]]", "Category:Films"),
        ("[[:File:X.jpg|the picture]]", "the picture"),
        ("[[wikt:actor|actor]]", "actor"),
        ("[[Help:Contents|help]]", "help"),
        ("[[:fr:Chat|French]]", "French"),
        ("x[[fr:Chat]]", "x"),
        ("x[[zh-min-nan:Niau]]", "x"),
        ("x[[Category:Actors]]", "x"),
        ("x[[ category : Actors|Key]]", "x"),
        ("x[[File:X.jpg|thumb|A [[caption]] here]]", "x"),
        ("x[[Image:X.jpg|thumb]]", "x"),
        ("x[[Datei:X.jpg|mini|Text]]", "x"),
        ("x[[Файл:X.jpg|мини]]", "x"),
        ("x[[Catégorie:Chats]]", "x"),
        ("[[bus]]es", "buses"),
    ],
)
def test_links(markup: str, shown: str) -> None:
    """wtf_wikipedia#459: a colon in a title is no namespace; links of MediaWiki's namespaces."""
    assert text(markup) == shown


@pytest.mark.parametrize(
    ("markup", "shown"),
    [
        ("It is {{convert|5|-|10|km}} long.", "It is 5-10 km long."),
        ("At {{convert|1300|mi|km}}, it", "At 1,300 mi, it"),
        ("over {{cvt|1,000,000|ha|acre}} of", "over 1,000,000 ha of"),
        ("{{convert|6|ft|2|in|m}} tall", "6 ft 2 in tall"),
        ("{{convert|3|by|4|m}}", "3 by 4 m"),
        ("weighs {{convert|70|kg}}.", "weighs 70 kg."),
        ("Population {{formatnum:12345}}.", "Population 12,345."),
        ("{{formatnum:12,345|R}}", "12345"),
        ("{{nihongo|Tokyo Tower|東京タワー|Tōkyō tawā}} is", "Tokyo Tower (東京タワー, Tōkyō tawā) is"),
        ("{{nihongo|'''League'''|日本|lead=yes|extra=''x''}}", "League (日本)"),
        ("L'{{japonais|'''aïkibudo'''|合気武道|aikibudō}} est", "L'aïkibudo (合気武道, aikibudō) est"),
        ("{{langx|fr|Jean le Grand}} means", "Jean le Grand means"),
        ("{{lang-de|Johann}} is", "Johann is"),
        ("{{lang|nap|Abbrùzzu}}", "Abbrùzzu"),
        ("{{native name|fr|Paris}}", "Paris"),
        ("{{Nihongo2|東京都}}", "東京都"),
        ("in {{w|nuclear weapon|nuclear weapons}} and {{w|power}}.", "in nuclear weapons and power."),
        ("He said {{quote|text=All is well.}}", "He said All is well."),
        ("{{circa|1900}} left", "c. 1900 left"),
        ("H{{sub|2}}O and {{val|3.5|u=m}} and {{frac|1|2}} cup", "H2O and 3.5 m and 1/2 cup"),
        ("{{frac|3|1|4}} {{sfrac|2}}", "3 1/4 1/2"),
        ("a{{nbsp}}{{ndash}} b{{'}}s {{\"|quoted}} text", 'a \u2013 b\'s "quoted" text'),
        ("1990{{snd}}2000", "1990 \u2013 2000"),
        ("{{nowrap|{{convert|5|km|mi}} away}}", "5 km away"),
        ("{{nowrap|{{lang|de|{{sc|Haus}}}}}} x", "Haus x"),
        ("{{ill|Anna Karlsdotter|sv|Anna|lt=Anna K.}}", "Anna K."),
        ("the {{USS|Enterprise|CV-6}} sailed", "the USS Enterprise (CV-6) sailed"),
        ("{{as of|2019|5}}", "as of May 2019"),
        ("({{reign|1558|1603}})", "(r. 1558\u20131603)"),
        ("{{transliteration|ar|ALA|kitāb}}", "kitāb"),
        ("costs {{US$|5}}", "costs US$5"),
        ("le {{date|14|juillet|1789}}, {{unité|5|km}}", "le 14 juillet 1789, 5 km"),
        ("{{lc:ABC}} {{ucfirst:abc}}", "abc Abc"),
        ("x{{sfn|Smith|2000|p=5}}{{citation needed|date=May 2020}} y", "x y"),
        ('x<ref name="a" /> y<ref>{{cite web|title=t}}</ref><!-- not\nshown --> z', "x y z"),
        ("__NOTOC__a <nowiki>[[b]]</nowiki>", "a [[b]]"),
    ],
)
def test_templates_inside_sentences(markup: str, shown: str) -> None:
    """WikiExtractor#98, #32, #189, #275; wikipedia-extractor#1; wtf_wikipedia#254; textacy#227; dbpedia PR 828."""
    assert " ".join(text(markup).split()) == " ".join(shown.split())


def test_other_languages() -> None:
    assert text("{{formatnum:1234567}}", "de") == "1.234.567"
    assert text("{{formatnum:12345}}", "fr") == "12\u00a0345"
    assert text("'''{{PAGENAME}}''' is", title="Ilm") == "Ilm is"
    assert (
        text("-{zh-hans:计算机; zh-hant:電腦;}-和-{A|zh-cn:软件;zh-tw:軟體}-，-{H|zh:x}--{字}-") == "计算机和软件，字"
    )


def test_a_list_is_no_redirect() -> None:
    convert = build_wikipedia(WikipediaSettings(input=("x",), output=Path("y")))
    record = {"ns": "0", "redirect": False, "title": "t"}
    reasons = {
        "#First, the [[town]]": None,
        "#REDIRECT [[Ilm]]": "redirect",
        "#WEITERLEITUNG [[Ilm]]": "redirect",
        "#重定向 [[Ilm]]": "redirect",
        "# redirect: [[Ilm]]": "redirect",
    }
    for markup, reason in reasons.items():
        (outcome,) = convert({**record, "text": markup})
        assert outcome.dropped == reason, markup


def test_a_dump_names_its_namespaces(tmp_path: Path) -> None:
    names = "".join(
        f'<namespace key="{key}">{name}</namespace>' for key, name in ((0, ""), (6, "Skrá"), (14, "Flokkur"))
    )
    head = f"<siteinfo><base>https://is.wikipedia.org/wiki/F</base><namespaces>{names}</namespaces></siteinfo>"
    markup = "a [[Skrá:X.jpg|b]][[Flokkur:C]] d"
    page = f"<page><title>T</title><ns>0</ns><id>1</id><revision><text>{markup}</text></revision></page>"
    (tmp_path / "d.xml").write_text(
        f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{head}{page}</mediawiki>'
    )
    convert = build_wikipedia(WikipediaSettings(input=("x",), output=Path("y")))
    (record,) = [
        record
        for chunk in read_dump((str(tmp_path / "d.xml"),), START, 1 << 20, lambda _: None)
        for record in chunk.content or ()
        if isinstance(record, dict)
    ]
    (outcome,) = convert(record)
    assert outcome.record == {"text": "a  d", "title": "T", "url": "https://is.wikipedia.org/wiki/T", "id": "1"}


@pytest.mark.parametrize(
    ("markup", "shown"),
    [
        ("The ferry {{MV|Senopati Nusantara}} sinks", "The ferry MV Senopati Nusantara sinks"),
        ("aboard {{ship|HMS|Victory}} in", "aboard HMS Victory in"),
        ("the {{ship|German battleship|Bismarck||2}} was", "the Bismarck was"),
        ("on {{ship||Lenin}} and {{MS|Estonia}}", "on Lenin and MS Estonia"),
        ("an {{sclass|Iowa|battleship}} of", "an Iowa-class battleship of"),
    ],
)
def test_ships(markup: str, shown: str) -> None:
    """wtf_wikipedia#512: names of ships stand in templates."""
    assert text(markup) == shown
