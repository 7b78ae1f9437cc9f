"""Hook of mkdocs: the reference of all keys as one page for each section, with an anchor for each key.

`configs/neox_arguments.md`, which people read on the repository's site, holds the same as tables. Code in tables of
all pages breaks at blanks only.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from neox.config.neox_config import section_classes
from neox.config.reference import key_index, section_pages

INDEX = "reference/neox_arguments.md"
FOLDER = "reference/keys"
LONGEST_WORD = 34
"""Characters of a word of code in a table that is not broken; a longer one could make the table wider than a laptop."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of sections below the index in the navigation."""
    sections: list[dict[str, Any]] = [{"All": INDEX}]
    sections += [{name: f"{FOLDER}/{name}.md"} for name in section_classes()]
    for part in config.nav or []:
        for pages in part.values():
            for entry in pages if isinstance(pages, list) else []:
                if entry.get("Every key") == INDEX:
                    entry["Every key"] = sections
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of sections."""
    for name, text in section_pages().items():
        linked = re.sub(r"docs/([\w-]+\.md)", r"[\1](../../\1)", text)
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=linked))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace the page of tables by an index of the keys."""
    if page.file.src_uri == INDEX:
        return key_index(lambda section, anchor: f"keys/{section}.md{anchor}")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Mark the words of code in tables, which then break at blanks only: no key, flag or path ends in the middle."""
    word = rf"[^\s<]{{1,{LONGEST_WORD}}}(?!\S)"

    def mark(code: re.Match[str]) -> str:
        return re.sub(rf"(?<!\S){word}", r'<span class="word">\g<0></span>', code[0])

    return re.sub(
        r"<table>.*?</table>",
        lambda table: re.sub(r"(?<=<code>)[^<]+(?=</code>)", mark, table[0]),
        html,
        flags=re.DOTALL,
    )
