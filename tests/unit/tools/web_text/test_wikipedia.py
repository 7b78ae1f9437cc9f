"""Articles of Wikipedia dumps."""

from __future__ import annotations

import bz2
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest

from neox.corpus import Position
from neox.errors import DataError
from tests.errors import raises_naming
from tools.web_text import run_step
from tools.web_text.wikipedia import WIKIPEDIA, WikipediaSettings, read_dump

RIVER = """{{Infobox river|name=Ilm|length={{convert|128|km}}}}
[[File:Ilm.jpg|thumb|The [[river]] in ''spring'']]
The '''Ilm''' ({{lang|de|die Ilm}}) is a {{convert|128|km|mi}} long [[river]] in [[Thuringia|Thuringian]] lands.<ref>
A [[book]] about {{lang|de|Flüsse}}.</ref> It rises {{as of|1990}} near the town.{{citation needed}}

== Course ==
It flows to the north.
* First, the [[Town A]]
* then [https://example.com Town B]

{| class="wikitable"
! Year !! Depth
|-
| 1990 || 3 m
|}

=== Bridges ===
There are two &amp; no more.

== See also ==
* [[Other river]]

=== Sub ===
Listed.

== Later ==
Text after it.
[[Category:Rivers]]
"""
TEXT = """The Ilm (die Ilm) is a 128 km long river in Thuringian lands. It rises as of 1990 near the town.

Course

It flows to the north.
First, the Town A
then Town B

Bridges

There are two & no more.

Later

Text after it."""


def dump(path: Path, pages: list[tuple[str, str, str]]) -> Path:
    """Write pages: title, namespace, markup."""
    parts = ['<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo><sitename>Wikipedia</sitename>']
    parts += ["<base>https://en.wikipedia.org/wiki/Main_Page</base></siteinfo>"]
    for number, (title, namespace, markup) in enumerate(pages):
        redirect = '<redirect title="x" />' if markup.startswith("#REDIRECT") else ""
        text = f'<revision><id>7</id><text xml:space="preserve">{escape(markup)}</text></revision>'
        head = f"<title>{escape(title)}</title><ns>{namespace}</ns><id>{number}</id>"
        parts.append(f"<page>{head}{redirect}{text}</page>\n")
    data = "".join([*parts, "</mediawiki>"]).encode()
    path.write_bytes(bz2.compress(data) if path.name.endswith(".bz2") else data)
    return path


def articles(source: Path, output: Path, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    report = run_step(WIKIPEDIA, WikipediaSettings(input=(source,), output=output, **settings))
    return report, [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["dump.xml", "dump.xml.bz2"])
def test_articles(tmp_path: Path, name: str) -> None:
    pages = [("Ilm (Thuringia)", "0", RIVER), ("Talk:Ilm", "1", "Hello"), ("Old", "0", "#REDIRECT [[Ilm]]")]
    report, found = articles(dump(tmp_path / name, [*pages, ("Empty", "0", "{{stub}}")]), tmp_path / "out.jsonl")
    assert [article["text"] for article in found] == [TEXT]
    assert found[0]["url"] == "https://en.wikipedia.org/wiki/Ilm_%28Thuringia%29"
    assert found[0]["id"] == "0"
    dropped = {reason: count for reason, (count, _) in report["dropped"].items()}
    assert dropped == {"no article": 1, "redirect": 1, "no text": 1}


def test_sections_are_chosen(tmp_path: Path) -> None:
    source = dump(tmp_path / "dump.xml", [("Ilm", "0", RIVER)])
    _, found = articles(source, tmp_path / "out.jsonl", drop_sections=("course",), headings=False)
    text = found[0]["text"]
    assert "Town A" not in text
    assert "Bridges" not in text
    assert "Other river" in text
    assert "Later" not in text


def test_reading_resumes_and_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.web_text.wikipedia._CHUNK_BYTES", 3000)
    source = dump(tmp_path / "dump.xml.bz2", [(f"Page {i}", "0", f"{RIVER} {i}") for i in range(20)])
    chunks = list(read_dump((str(source),), (0, Position()), 1 << 20, lambda size: None))
    titles = [[record["title"] for record in chunk.content or ()] for chunk in chunks]
    assert sum(map(len, titles)) == 20
    for number, chunk in enumerate(chunks):
        rest = list(read_dump((str(source),), chunk.next, 1 << 20, lambda size: None))
        assert [[record["title"] for record in c.content or ()] for c in rest] == titles[number + 1 :]
    assert articles(source, tmp_path / "one.jsonl")[1] == articles(source, tmp_path / "two.jsonl", workers=2)[1]


def test_damage_is_named(tmp_path: Path) -> None:
    whole = dump(tmp_path / "dump.xml.bz2", [(f"Page {i}", "0", RIVER) for i in range(5)])
    (tmp_path / "cut.xml.bz2").write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "cut.xml").write_bytes(bz2.decompress(whole.read_bytes())[:-300])
    for name in ("cut.xml.bz2", "cut.xml"):
        with raises_naming(DataError, "cut.xml"):
            articles(tmp_path / name, tmp_path / "out.jsonl")
    assert len(articles(tmp_path / "cut.xml", tmp_path / "out.jsonl", skip_bad=1)[1]) == 4
    assert articles(
        dump(tmp_path / "x.xml", [("P", "0", "x" * (2 << 20))]), tmp_path / "o.jsonl", skip_bad=1, max_line_mb=1
    )
