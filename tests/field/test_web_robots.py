"""Rules of robots.txt as others met them."""

from __future__ import annotations

import pytest
from protego import Protego

from tools.web_text.fetch import _CONTACT, _robots_text

NAME = _CONTACT.sub("", "neox-web-text/1.0 (+https://example.com/contact)")


@pytest.mark.parametrize(
    ("rules", "allowed", "refused"),
    [
        ("User-agent: *\nDisallow: /*s=\n", ["", "s/"], ["?s=asd"]),
        ("User-agent: *\nAllow: /en/geo/\nAllow: /en/$\nDisallow: /en/\n", ["en/", "en/geo/1"], ["en/x"]),
        (
            "User-agent: neox-web-text\nDisallow: /a\n\nUser-agent: *\nDisallow: /b\n\n"
            "User-agent: NEOX-WEB-TEXT\nDisallow: /c\n",
            ["b"],
            ["a", "c"],
        ),
        ("User-agent: example\nDisallow:\n\nUser-agent: *\nDisallow: /\n", [], ["a"]),
        ("User-agent: *\nDisallow: /%7Ejoe/\n", ["joe/"], ["~joe/x", "%7ejoe/x"]),
        ("<html><body>Not found</body></html>", ["a"], []),
        ("\ufeffUser-agent: *\nDisallow: /\n", [], ["a"]),
    ],
)
def test_rules(rules: str, allowed: list[str], refused: list[str]) -> None:
    """protego#29, scrapy#3637, httrack PR 1702; a group with the name of a contact's host is not ours."""
    parsed = Protego.parse(_robots_text(rules.encode()))
    for path in allowed:
        assert parsed.can_fetch(f"https://site.example/{path}", NAME), path
    for path in refused:
        assert not parsed.can_fetch(f"https://site.example/{path}", NAME), path


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_forms(codec: str, end: str) -> None:
    """scrapy#6195: byte order marks, UTF-16 and any end of lines."""
    text = _robots_text(f"User-agent: *{end}Disallow: /{end}".encode(codec))
    assert not Protego.parse(text).can_fetch("https://site.example/a", NAME)
