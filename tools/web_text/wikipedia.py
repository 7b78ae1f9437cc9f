"""Step `wikipedia`: articles of a dump (XML, bz2) as documents."""

from __future__ import annotations

import bz2
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import quote, urlsplit

from neox.corpus import BadInput, Position
from neox.errors import DataError, os_errors
from neox.storage import name_of, open_file
from tools.web_text.chunks import Chunk, Place
from tools.web_text.documents import ChunkWork, map_documents
from tools.web_text.filter_urls import expand_suffixes
from tools.web_text.step import DocumentFunction, Job, Outcome, Record, Settings, Step, without
from tools.web_text.wiki_templates import template_text

_CHUNK_BYTES = 1 << 20
# Dumps mark redirects; these words are for old ones that do not.
_REDIRECT = re.compile(
    r"\s*#\s*(?:redirect(?:ion)?|weiterleitung|redirección|redirecionamento|rinvia|doorverwijzing|patrz|przekieruj"
    r"|перенаправление|перенаправлення|転送|リダイレクト|重定向|넘겨주기|تحويل|הפניה|yönlendi̇?r|omdirigering|ohjaus"
    r"|uudelleenohjaus|přesměruj|đổi|alih|átirányítás)\s*:?\s*\[\[",
    re.IGNORECASE,
)
_BLANK_LINES = re.compile(r"\n\s*\n+")
_STYLE = re.compile("'{2,5}")
_EMPTY_BRACKETS = re.compile(r"\s*\((?:[\s,;:]|&nbsp;)*\)")
# Tags whose contents are no running text.
_TAGS = frozenset(
    {"ref", "references", "gallery", "table", "math", "chem", "ce", "timeline", "syntaxhighlight", "source", "score"}
    | {"graph", "mapframe", "imagemap", "templatestyles", "hiero", "categorytree", "inputbox", "section"}
)
# Names of namespaces of images and categories, whose links are no text; dumps name those of their own language.
_FILES = (
    "file image bild datei fichier archivo imagen immagine ficheiro imagem bestand afbeelding plik grafika файл "
    "изображение зображення ファイル 画像 文件 档案 檔案 图像 圖像 파일 "
    "그림 tiedosto kuva fil billede soubor obrázek fájl kép dosya "
    "resim berkas gambar ملف صورة קובץ תמונה चित्र ไฟล์ ภาพ پرونده تصویر"
)
_CATEGORIES = (
    "category kategorie catégorie categoría categoria categorie kategoria kategori kategória kategorija категория "
    "категорія 分类 分類 カテゴリ 분류 تصنيف קטגוריה श्रेणी หมวดหมู่ رده luokka thể_loại κατηγορία"
)
_HIDDEN = frozenset(name.replace("_", " ") for name in (*_FILES.split(), *_CATEGORIES.split()))
_HIDDEN_KEYS = ("6", "14")
# Codes of Wikipedias: a link with one of them is a link in the margin to the same page in another language.
_CODES = (
    "aa ab ace af ak als alt am an ang ar arc ary arz as ast atj av avk awa ay az azb ba ban bar bcl be be-tarask "
    "be-x-old bg bh bi bm bn bo bpy br bs bug bxr ca cbk-zam cdo ce ceb ch chr chy ckb co cr crh cs csb cu cv cy da "
    "de din diq dsb dty dv dz ee el eml en eo es et eu ext fa ff fi fj fo fr frp frr fur fy ga gag gan gcr gd gl glk "
    "gn gom gor got gu gv ha hak haw he hi hif hr hsb ht hu hy hyw ia id ie ig ik ilo inh io is it iu ja jam jbo jv "
    "ka kaa kab kbd kbp kg ki kk kl km kn ko koi krc ks ksh ku kv kw ky la lad lb lbe lez lfn lg li lij lld lmo ln lo "
    "lrc lt ltg lv mai map-bms mdf mg mhr mi min mk ml mn mnw mr mrj ms mt mwl my myv mzn na nah nap nb nds nds-nl ne "
    "new nl nn no nov nqo nrm nso nv ny oc olo om or os pa pag pam pap pcd pdc pfl pi pih pl pms pnb pnt ps pt qu rm "
    "rmy rn ro roa-rup roa-tara ru rue rw sa sah sat sc scn sco sd se sg sh shn si simple sk sl sm smn sn so sq sr "
    "srn ss st stq su sv sw szl szy ta tcy te tet tg th ti tk tl tn to tpi tr ts tt tum tw ty tyv udm ug uk ur uz ve "
    "vec vep vi vls vo wa war wo wuu xal xh xmf yi yo za zea zh zh-classical zh-min-nan zh-yue zu"
)
_LANGUAGES = frozenset(_CODES.split())
_MAGIC_WORD = re.compile(r"__[^\W\d_]+__")
_VARIANTS = re.compile(r"-\{([^{}]*)\}-")


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


@dataclass(frozen=True)
class Site:
    """Wiki of a dump.

    Attributes:
        language: Code of its language.
        hidden: Names, in lower case, of its namespaces of files and categories.
    """

    language: str = "en"
    hidden: frozenset[str] = _HIDDEN

    def link_text(self, link: Any) -> str | None:
        """Return the text of a link, or None if it has none: an image, a category, a page in another language."""
        target = str(link.title).replace("_", " ").strip()
        shown = target.removeprefix(":")
        if target == shown:
            prefix, colon, _ = target.partition(":")
            prefix = prefix.strip().lower()
            if colon and (prefix in self.hidden or prefix in _LANGUAGES):
                return None
        if link.text is None or not str(link.text).strip():
            return shown.strip()
        return str(link.text)


def build_wikipedia(settings: WikipediaSettings) -> DocumentFunction:
    """Return the function from a page of a dump to a document."""
    titles = frozenset(title.strip().lower() for title in settings.drop_sections)

    def convert(record: Record) -> list[Outcome]:
        kept = without(record, "ns", "redirect", "site")
        if record["ns"] != "0":
            return [Outcome(kept, "no article")]
        if record["redirect"] or _REDIRECT.match(record["text"]):
            return [Outcome(kept, "redirect")]
        site = record.get("site") or Site()
        try:
            text = plain_text(record["text"], titles, headings=settings.headings, site=site, title=record["title"])
        except RecursionError:
            return [Outcome(kept, "markup nested too deeply")]
        dropped = None if text else "no text"
        return [Outcome({**kept, "text": text}, dropped)]

    return convert


def plain_text(
    markup: str, titles: frozenset[str], *, headings: bool, site: Site | None = None, title: str = ""
) -> str:
    """Return the running text of wiki markup.

    Args:
        markup: Text of a page.
        titles: Titles, in lower case, of sections to leave out.
        headings: Whether to keep headings.
        site: Wiki of the page; None for the English Wikipedia.
        title: Title of the page.
    """
    import mwparserfromhell

    site = site or Site()
    code = mwparserfromhell.parse(_VARIANTS.sub(_first_variant, markup), skip_style_tags=True)
    for section in code.get_sections(include_lead=False, include_headings=True):
        found = section.filter_headings(recursive=False)
        if found and str(found[0].title).strip().lower() in titles:
            _remove(code, section)
    for tag in code.filter_tags(recursive=True, matches=lambda node: str(node.tag).strip().lower() in _TAGS):
        _remove(code, tag)
    for link in code.filter_wikilinks(recursive=True):
        text = site.link_text(link)
        if text is None:
            _remove(code, link)
        elif link.text is None and text != str(link.title):
            link.text = text
    for template in reversed(code.filter_templates(recursive=True)):  # inner ones first
        _replace(code, template, template_text(template, site.language, title))
    for heading in code.filter_headings(recursive=False):
        words = heading.title.strip_code().strip()
        _replace(code, heading, f"\n\n{words}\n\n" if headings else "\n\n")
    text = _MAGIC_WORD.sub("", _STYLE.sub("", code.strip_code(normalize=True, collapse=True)))
    lines = [line.strip().lstrip("*#:;").strip() for line in _EMPTY_BRACKETS.sub("", text).splitlines()]
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


def _first_variant(found: re.Match[str]) -> str:
    """Return the text of a mark of language conversion, as `-{zh-hans:计算机; zh-hant:電腦}-`: the first variant."""
    flags, bar, text = found[1].rpartition("|")
    if bar and set(flags) & set("HT-"):  # rules and titles, which are not shown
        return ""
    first = text.partition(";")[0]
    name, colon, variant = first.partition(":")
    if colon and re.fullmatch(r"\s*[a-z]{2,3}(?:-[a-z]+)*\s*", name):
        return variant.strip()
    return text


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
    from lxml import etree

    for number in range(start[0], len(files)):
        first = start[1].line if number == start[0] else 1
        reading = os_errors(DataError, f"{files[number]} cannot be read")
        with reading, open_file(files[number]) as raw, bz2.open(raw) as plain:
            file = plain if name_of(files[number]).endswith(".bz2") else raw
            records: list[Record] = []
            size = 0  # of their pages
            bad: list[BadInput] = []
            page = first
            reported = 0
            try:
                for page, record in enumerate(islice(_pages(file), first - 1, None), start=first):
                    length = len(record["text"].encode())
                    if length > max_bytes:
                        reason = f"the page {record['title']!r} has {length:,} bytes"
                        bad.append(BadInput(files[number], page, None, reason))
                        continue
                    records.append(record)
                    size += length
                    if size >= _CHUNK_BYTES:
                        consumed(raw.tell() - reported)
                        reported = raw.tell()
                        yield Chunk(tuple(records), tuple(bad), (number, Position(page + 1, page)))
                        records = []
                        size = 0
                        bad = []
            except (etree.XMLSyntaxError, EOFError, OSError, ValueError) as error:
                reason = str(error).strip()[:200] or type(error).__name__
                defect = f"the rest of the dump is damaged or no XML ({reason})"
                bad.append(BadInput(files[number], page, None, defect))
            if records:
                yield Chunk(tuple(records), (), (number, Position(page + 1, page)))
            yield Chunk(None, tuple(bad), (number + 1, Position()))


def _pages(file: Any) -> Iterator[Record]:
    """Yield the pages of an XML dump in bounded memory."""
    from lxml import etree

    base = ""
    site = Site()
    tags = ("{*}base", "{*}namespaces", "{*}page")
    events = etree.iterparse(file, tag=tags, resolve_entities=False, huge_tree=True, no_network=True)
    for _, element in events:
        kind = etree.QName(element).localname
        if kind == "base":
            parts = urlsplit(element.text or "")
            base = f"{parts.scheme}://{parts.netloc}{os.path.dirname(parts.path)}/"
            site = replace(site, language=parts.netloc.partition(".")[0])
            continue
        if kind == "namespaces":
            names = [entry.text for entry in element if entry.get("key") in _HIDDEN_KEYS and entry.text]
            site = replace(site, hidden=site.hidden | {name.lower().replace("_", " ") for name in names})
            continue
        title = element.findtext("{*}title") or ""
        yield {
            "text": element.findtext("{*}revision/{*}text") or "",
            "title": title,
            "url": base + quote(title.replace(" ", "_")) if base else None,
            "id": element.findtext("{*}id"),
            "ns": element.findtext("{*}ns") or "0",
            "redirect": element.find("{*}redirect") is not None,
            "site": site,
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
