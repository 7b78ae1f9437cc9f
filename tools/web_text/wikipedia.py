"""Step `wikipedia`: articles of a dump (XML, bz2) as documents."""

from __future__ import annotations

import bz2
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import IO, Any
from urllib.parse import quote, urlsplit

from neox.corpus import BadInput, Position
from neox.errors import DataError, os_errors
from neox.storage import name_of, open_file
from tools.web_text.chunks import Chunk, Place
from tools.web_text.documents import ChunkWork, map_documents
from tools.web_text.filter_urls import expand_suffixes
from tools.web_text.step import DocumentFunction, Job, Outcome, Record, Settings, Step, without

_CHUNK_BYTES = 1 << 20
_REDIRECT = re.compile(r"\s*#\w+[^\n\[]*\[\[")
_SPECIAL_LINK = re.compile(r"^\s*:?\s*[^:\[\]|]+:", re.IGNORECASE)
_BLANK_LINES = re.compile(r"\n\s*\n+")
_STYLE = re.compile("'{2,5}")
_EMPTY_BRACKETS = re.compile(r"\s*\((?:[\s,;:]|&nbsp;)*\)")
# Tags whose contents are no running text.
_TAGS = frozenset(
    {"ref", "references", "gallery", "table", "math", "chem", "ce", "timeline", "syntaxhighlight", "source", "score"}
    | {"graph", "mapframe", "imagemap", "templatestyles", "hiero", "categorytree", "inputbox", "section"}
)
# Templates that are part of a sentence -> number of the parameter that holds the text.
_INLINE = {
    **dict.fromkeys(("nowrap", "nobr", "small", "big", "abbr", "tooltip", "ill", "interlanguage link", "sic", "em"), 1),
    **dict.fromkeys(("strong", "smallcaps", "sc", "sup", "sub", "mvar", "math", "linktext", "quote", "blockquote"), 1),
    **dict.fromkeys(("lang", "transl", "transliteration", "color", "script"), 2),
    **dict.fromkeys(("as of", "circa", "c.", "formatnum", "num"), 1),
}
_PREFIXES = {"as of": "as of ", "circa": "c. ", "c.": "c. "}
_UNITS = ("convert", "cvt")


class WikipediaSettings(Settings):
    """Extract the articles of a Wikipedia dump, `pages-articles.xml[.bz2]`.

    Templates inside sentences (language, unit, quotation) become text. Other templates, tables, references, images, and
    sections that are only lists are removed. Headings remain as lines.
    """

    drop_sections: tuple[str, ...] = (
        "references",
        "notes",
        "footnotes",
        "citations",
        "sources",
        "bibliography",
        "further reading",
        "external links",
        "see also",
        "gallery",
    )
    """Titles of the sections that are removed with everything below them."""

    headings: bool = True
    """Whether headings of sections are kept."""


def build_wikipedia(settings: WikipediaSettings) -> DocumentFunction:
    """Return the function from a page of a dump to a document."""
    titles = frozenset(title.strip().lower() for title in settings.drop_sections)

    def convert(record: Record) -> list[Outcome]:
        kept = without(record, "ns", "redirect")
        if record["ns"] != "0":
            return [Outcome(kept, "no article")]
        if record["redirect"] or _REDIRECT.match(record["text"]):
            return [Outcome(kept, "redirect")]
        try:
            text = plain_text(record["text"], titles, headings=settings.headings)
        except RecursionError:
            return [Outcome(kept, "markup nested too deeply")]
        dropped = None if text else "no text"
        return [Outcome({**kept, "text": text}, dropped)]

    return convert


def plain_text(markup: str, titles: frozenset[str], *, headings: bool) -> str:
    """Return the running text of wiki markup.

    Args:
        markup: Text of a page.
        titles: Titles, in lower case, of sections to leave out.
        headings: Whether to keep headings.
    """
    import mwparserfromhell

    code = mwparserfromhell.parse(markup, skip_style_tags=True)
    for section in code.get_sections(include_lead=False, include_headings=True):
        found = section.filter_headings(recursive=False)
        if found and str(found[0].title).strip().lower() in titles:
            _remove(code, section)
    for tag in code.filter_tags(recursive=True, matches=lambda node: str(node.tag).strip().lower() in _TAGS):
        _remove(code, tag)
    for link in code.filter_wikilinks(recursive=True, matches=lambda node: bool(_SPECIAL_LINK.match(str(node.title)))):
        _remove(code, link)
    for template in code.filter_templates(recursive=True):
        _replace(code, template, _template_text(template))
    for heading in code.filter_headings(recursive=False):
        title = heading.title.strip_code().strip()
        _replace(code, heading, f"\n\n{title}\n\n" if headings else "\n\n")
    text = _STYLE.sub("", code.strip_code(normalize=True, collapse=True))
    lines = [line.strip().lstrip("*#:;").strip() for line in _EMPTY_BRACKETS.sub("", text).splitlines()]
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


def _remove(code: Any, node: Any) -> None:
    try:
        code.remove(node)
    except ValueError:  # it was in something that has been removed
        return


def _replace(code: Any, node: Any, text: str) -> None:
    try:
        code.replace(node, text)
    except ValueError:  # as above
        return


def _template_text(template: Any) -> str:
    """Return the text that a template stands for; empty for boxes, notes and unknown templates."""
    name = str(template.name).strip().lower().replace("_", " ")

    def parameter(number: int) -> str:
        if not template.has(number):
            return ""
        return str(template.get(number).value).strip()

    if name in _UNITS:
        return f"{parameter(1)} {parameter(2)}"
    if name.startswith("lang-"):
        return parameter(1)
    if name in _INLINE:
        return _PREFIXES.get(name, "") + parameter(_INLINE[name])
    return ""


def read_dump(files: tuple[str, ...], start: Place, max_bytes: int, consumed: Callable[[int], Any]) -> Iterator[Chunk]:
    """Yield the pages of dumps in chunks: `title`, `url`, `id`, `ns`, `redirect`, `text` (markup).

    Args:
        files: Paths of `.xml` or `.xml.bz2` files.
        start: Number of the first file, and a position whose line is the number of the first page. The pages before it
            are read again, because a compressed file has no positions.
        max_bytes: Longest text of a page; a longer one is a bad input.
        consumed: Function that is called with the number of bytes newly read.

    Raises:
        DataError: If a file cannot be read.
    """
    for number in range(start[0], len(files)):
        first = start[1].line if number == start[0] else 1
        reading = os_errors(DataError, f"{files[number]} cannot be read")
        with reading, open_file(files[number]) as raw, bz2.open(raw) as plain:
            file = plain if name_of(files[number]).endswith(".bz2") else raw
            yield from _chunks(files[number], file, raw, number, first, max_bytes, consumed)


def _chunks(
    path: str, file: Any, raw: IO[bytes], number: int, first: int, max_bytes: int, consumed: Callable[[int], Any]
) -> Iterator[Chunk]:
    from lxml import etree

    held: list[Record] = []
    size = 0  # of the pages held
    bad: list[BadInput] = []
    page = first
    reported = 0
    pages = _pages(file)
    try:
        for page, record in enumerate(islice(pages, first - 1, None), start=first):
            length = len(record["text"].encode())
            if length > max_bytes:
                bad.append(BadInput(path, page, None, f"the page {record['title']!r} has {length:,} bytes"))
                continue
            held.append(record)
            size += length
            if size >= _CHUNK_BYTES:
                consumed(raw.tell() - reported)
                reported = raw.tell()
                yield Chunk(tuple(held), tuple(bad), (number, Position(page + 1, page)))
                held = []
                size = 0
                bad = []
    except (etree.XMLSyntaxError, EOFError, OSError, ValueError) as error:
        reason = str(error).strip()[:200] or type(error).__name__
        bad.append(BadInput(path, page, None, f"the rest of the dump is damaged or no XML ({reason})"))
    if held:
        yield Chunk(tuple(held), (), (number, Position(page + 1, page)))
    yield Chunk(None, tuple(bad), (number + 1, Position()))


def _pages(file: Any) -> Iterator[Record]:
    """Yield the pages of an XML dump in bounded memory."""
    from lxml import etree

    base = ""
    events = etree.iterparse(file, tag=("{*}base", "{*}page"), resolve_entities=False, huge_tree=True, no_network=True)
    for _, element in events:
        if etree.QName(element).localname == "base":
            parts = urlsplit(element.text or "")
            base = f"{parts.scheme}://{parts.netloc}{os.path.dirname(parts.path)}/"
            continue
        title = element.findtext("{*}title") or ""
        yield {
            "text": element.findtext("{*}revision/{*}text") or "",
            "title": title,
            "url": base + quote(title.replace(" ", "_")) if base else None,
            "id": element.findtext("{*}id"),
            "ns": element.findtext("{*}ns") or "0",
            "redirect": element.find("{*}redirect") is not None,
        }
        element.clear()
        while element.getprevious() is not None:
            del element.getparent()[0]


def wikipedia(job: Job[WikipediaSettings]) -> None:
    """Write the articles of a job's dumps."""
    map_documents(job, ChunkWork(build_wikipedia, job.settings, keep_text=False), read_dump)


WIKIPEDIA = Step(
    "wikipedia",
    WikipediaSettings,
    wikipedia,
    build=build_wikipedia,
    expand=partial(expand_suffixes, suffixes=(".xml", ".xml.bz2")),
    packages=("mwparserfromhell", "lxml"),
)
