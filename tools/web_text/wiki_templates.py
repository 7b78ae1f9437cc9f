"""Text of MediaWiki's templates that stand inside sentences."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from typing import Any

# Template -> number of the parameter that holds its text.
_PARAMETER = {
    **dict.fromkeys(
        ("nowrap", "nobr", "small", "smaller", "big", "larger", "abbr", "tooltip", "sic", "em", "strong"), 1
    ),
    **dict.fromkeys(
        ("smallcaps", "sc", "sc1", "sup", "sub", "mvar", "math", "linktext", "visible anchor", "vanchor"), 1
    ),
    **dict.fromkeys(("italic", "bold", "underline", "mono", "code", "tt", "kbd", "samp", "var", "nts", "num"), 1),
    **dict.fromkeys(
        ("quote", "blockquote", "quotation", "cquote", "not a typo", "as written", "flag", "flagcountry"), 1
    ),
    **dict.fromkeys(("lc", "uc", "char", "angbr", "ipa", "script/arabic", "script/hebrew", "nihongo2", "citation"), 1),
    **dict.fromkeys(("lang", "langx", "langue", "color", "script", "font color", "native name", "ruby-ja-p"), 2),
}
_NAMES_OF_TEXT = ("text", "quote", "content")  # parameters that hold a text by name
_LAST = ("transl", "transliteration", "w")  # the last parameter is what is shown
_PREFIXES = {"circa": "c. ", "c.": "c. ", "ca.": "c. ", "floruit": "fl. ", "fl.": "fl. ", "born": "b. ", "died": "d. "}
_SIGNS = {
    **dict.fromkeys(("nbsp", "space", "thin space", "thinsp", "hair space", "0ws", "spaces"), " "),
    **dict.fromkeys(("ndash", "en dash", "endash", "dash"), "\u2013"),
    **dict.fromkeys(("snd", "spnd", "spaced ndash", "spaced en dash", "snds"), " \u2013 "),
    **dict.fromkeys(("mdash", "em dash", "emdash"), "\u2014"),
    **dict.fromkeys(("'", "apostrophe"), "'"),
    **dict.fromkeys(("·", "middot", "dot", "•", "bullet"), " \u00b7 "),
    **dict.fromkeys(("!", "pipe"), "|"),
    **dict.fromkeys(("br", "clear", "-"), "\n"),
    **{"'s": "'s", "=": "=", "co2": "CO2", "h2o": "H2O", "zwsp": "", "shy": "", "wbr": "", "minus": "\u2212", "–": "–"},
}
_SHIPS = (
    "uss",
    "hms",
    "rms",
    "ss",
    "mv",
    "hmas",
    "hmcs",
    "ins",
    "usns",
    "sms",
    "ms",
    "mt",
    "gts",
    "usat",
    "uscgc",
    "hmnzs",
)
_MONEY = {
    "us$": "US$",
    "usd": "US$",
    "gbp": "£",
    "£": "£",
    "eur": "€",
    "€": "€",
    "jpy": "¥",
    "¥": "¥",
    "inr": "₹",
    "a$": "A$",
}
_BETWEEN_VALUES = {
    **dict.fromkeys(("-", "–", "—"), "-"),
    **dict.fromkeys(("to", "to(-)", "to about"), " to "),
    **{"and": " and ", "or": " or ", "by": " by ", "x": " x ", "×": " × ", "xx": " × ", "+/-": " ± ", "±": " ± "},
}
_NUMBER = re.compile(r"[-+−]?[\d,.]*\d(?:[+ ]?\d+/\d+)?")
# Separator of thousands by language; others write a comma.
_THOUSANDS = {
    **dict.fromkeys(("de", "es", "it", "nl", "pt", "id", "tr", "da", "el", "ro", "vi", "ca", "gl", "hr", "sr"), "."),
    **dict.fromkeys(
        ("fr", "ru", "uk", "pl", "cs", "sk", "sv", "fi", "nb", "no", "nn", "hu", "bg", "et", "lv"), "\u00a0"
    ),
}


class Parameters:
    """Parameters of a template as text."""

    def __init__(self, template: Any) -> None:
        self.positional: list[str] = []
        self.named: dict[str, str] = {}
        for parameter in template.params:
            name = str(parameter.name).strip()
            value = str(parameter.value).strip()
            self.named[name] = value
            if not parameter.showkey:
                self.positional.append(value)

    def get(self, *names: str) -> str:
        """Return the first parameter of some names that is not empty; empty if there is none."""
        for name in names:
            if self.named.get(name):
                return self.named[name]
        return ""


def template_text(template: Any, language: str, title: str) -> str:
    """Return the text that a template stands for; empty for boxes, notes and unknown templates.

    Args:
        template: Template of mwparserfromhell, in whose parameters the templates are text already.
        language: Code of the language of the wiki.
        title: Title of the page.
    """
    name = " ".join(str(template.name).replace("_", " ").split()).lower().removeprefix("template:")
    parameters = Parameters(template)
    function, colon, argument = str(template.name).strip().partition(":")
    if colon and function.lower() in _FUNCTIONS:
        return _FUNCTIONS[function.lower()](argument.strip(), parameters, language)
    if name in ("pagename", "subst:pagename"):
        return title
    if name in _SIGNS:
        return _SIGNS[name]
    if name in _TEMPLATES:
        return _TEMPLATES[name](parameters, language)
    if name in _SHIPS:
        number = parameters.get("2")
        return f"{name.upper()} {parameters.get('1')}" + (f" ({number})" if number else "")
    if name in _MONEY:
        return _MONEY[name] + parameters.get("1")
    if name in _PREFIXES:
        return "–".join(_PREFIXES[name] + value for value in parameters.positional if value)
    if name in _LAST:
        return (parameters.positional or [""])[-1]
    if name in _PARAMETER:
        return parameters.get(str(_PARAMETER[name]), *_NAMES_OF_TEXT)
    if name.startswith("lang-"):
        return parameters.get("1")
    return ""


def _with_thousands(number: str, language: str) -> str:
    """Return a number as a language writes it: 12,345."""
    found = re.fullmatch(r"([-+−]?)(\d{4,})(\.\d+)?", number)
    if found is None:
        return number
    separator = _THOUSANDS.get(language, ",")
    decimals = found[3] or ""
    if separator != ",":
        decimals = decimals.replace(".", ",")
    return f"{found[1]}{int(found[2]):,}".replace(",", separator) + decimals


def _formatted(argument: str, parameters: Parameters, language: str) -> str:
    if parameters.positional:  # `R` takes separators away, `NOSEP` leaves them out
        return argument.replace(",", "")
    return _with_thousands(argument, language)


def _convert(parameters: Parameters, language: str) -> str:
    """Return the values and units before those into which they are converted: 5-10 km, 6 ft 2 in."""
    values = parameters.positional
    parts: list[str] = []
    index = 0
    while index < len(values) and _NUMBER.fullmatch(values[index]):
        parts.append(_with_thousands(values[index], language))
        following = values[index + 1] if index + 1 < len(values) else ""
        if following in _BETWEEN_VALUES and index + 2 < len(values):
            parts.append(_BETWEEN_VALUES[following])
            index += 2
            continue
        parts.append(f" {following} ")
        index += 2
    if not parts:
        return " ".join(values[:2])
    return "".join(parts).strip()


def _nihongo(parameters: Parameters, language: str) -> str:
    english, kanji, romaji = (parameters.get(number) for number in "123")
    inside = ", ".join(filter(None, (kanji, romaji)))
    if not english:
        english = romaji
        inside = kanji
    if not english or not inside:
        return english or inside
    return f"{english} ({inside})"


def _fraction(parameters: Parameters, language: str) -> str:
    values = parameters.positional
    if len(values) == 1:
        return f"1/{values[0]}"
    return " ".join([*values[:-2], "/".join(values[-2:])])


def _value(parameters: Parameters, language: str) -> str:
    """Return the text of `val`: number, uncertainty, power of ten, unit."""
    text = parameters.get("p") + _with_thousands(parameters.get("1"), language)
    if uncertainty := parameters.get("2"):
        text += f"±{uncertainty}"
    if power := parameters.get("e"):
        text += f"×10^{power}"
    if unit := parameters.get("u", "ul"):
        text += f" {unit}"
    return text + parameters.get("s")


def _as_of(parameters: Parameters, language: str) -> str:
    year, month, day = (parameters.get(number) for number in "123")
    if month.isdecimal() and 1 <= int(month) <= 12:
        month = calendar.month_name[int(month)]
    return " ".join(filter(None, ("as of", day, month, year)))


def _link(parameters: Parameters, language: str) -> str:
    return parameters.get("lt", "1")


def _quoted(parameters: Parameters, language: str) -> str:
    text = parameters.get("1", *_NAMES_OF_TEXT)
    return f'"{text}"' if text else '"'


def _reign(parameters: Parameters, language: str) -> str:
    return "r. " + "–".join(filter(None, parameters.positional[:2]))


def _joined(parameters: Parameters, language: str) -> str:
    return "".join(parameters.positional)


def _with_blanks(parameters: Parameters, language: str) -> str:
    return " ".join(filter(None, parameters.positional[:3]))


def _measured(parameters: Parameters, language: str) -> str:
    number, *unit = parameters.positional or [""]
    return " ".join([_with_thousands(number, language), *filter(None, unit[:1])])


def _chinese(parameters: Parameters, language: str) -> str:
    forms = (parameters.get(name) for name in ("c", "s", "t", "p"))
    return ", ".join(dict.fromkeys(filter(None, forms)))


def _ship(parameters: Parameters, language: str) -> str:
    """Return the text of `ship`: HMS Ark Royal (91); the form `2` shows the name alone."""
    prefix, ship, number, form = (parameters.get(key) for key in "1234")
    if form == "2":
        return ship
    shown = f" ({number})" if number and not form else ""
    return f"{prefix} {ship}".strip() + shown


def _ship_class(parameters: Parameters, language: str) -> str:
    return f"{parameters.get('1')}-class {parameters.get('2')}".strip()


_TEMPLATES: dict[str, Callable[[Parameters, str], str]] = {
    **dict.fromkeys(("convert", "cvt"), _convert),
    **dict.fromkeys(("nihongo", "japonais", "nihongo krt"), _nihongo),
    **dict.fromkeys(("frac", "fraction", "sfrac", "fract"), _fraction),
    **dict.fromkeys(("ill", "interlanguage link", "illm"), _link),
    **dict.fromkeys(('"', "'\"", "\"'", "quote inline"), _quoted),
    **dict.fromkeys(("chem", "chem2", "gaps", "lang-zh-hans"), _joined),
    **dict.fromkeys(("date", "date-", "date de naissance"), _with_blanks),
    **dict.fromkeys(("unité", "unit", "nombre", "formatnum", "ent"), _measured),
    **{"ship": _ship, "sclass": _ship_class, "sclass2": _ship_class},
    **{"val": _value, "as of": _as_of, "reign": _reign, "r.": _reign, "zh": _chinese},
}
_FUNCTIONS: dict[str, Callable[[str, Parameters, str], str]] = {
    "formatnum": _formatted,
    "lc": lambda argument, parameters, language: argument.lower(),
    "uc": lambda argument, parameters, language: argument.upper(),
    "lcfirst": lambda argument, parameters, language: argument[:1].lower() + argument[1:],
    "ucfirst": lambda argument, parameters, language: argument[:1].upper() + argument[1:],
}
