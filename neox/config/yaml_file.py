"""Parser of YAML and JSON configuration files, with the line of every key.

NeoX's dialect: a mapping in block or flow style, `#` comments, trailing commas, `True`/`true`, `None`. Scalars follow
YAML 1.2 (`1e-5` is a number, `010` is ten, `12:30` is text) and keys may not repeat. Size and depth are limited, so
that a hostile file is an error and does not exhaust memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from neox.errors import ConfigError
from neox.problems import Problem, Source

_MAX_BYTES = 1_000_000
_MAX_NODES = 20_000
_MAX_DEPTH = 20
_TOO_LARGE = (
    f"too large or too deep for a configuration, which has at most {_MAX_NODES:,} values (aliases count expanded) on "
    f"{_MAX_DEPTH} levels"
)

# What PyYAML calls untagged mappings, sequences and scalars, and quoted scalars.
_TAGS = frozenset({*(f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str")), "!"})

_NULL = re.compile(r"^(?:~|null|Null|NULL|None|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$")
_SPECIAL = re.compile(r"^[-+]?\.?(?:inf|Inf|INF|nan|NaN|NAN)$")


class _TooLargeError(Exception):
    """More nodes or levels than a configuration has."""


class _Loader(yaml.SafeLoader):
    """PyYAML's composer without YAML 1.1's interpretation of plain scalars, and with limits on size and depth."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = 0
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node, counting it; an alias counts as one here and as what it stands for when it is built."""
        self.nodes += 1
        self.depth += 1
        if self.nodes > 2 * _MAX_NODES or self.depth > _MAX_DEPTH + 1:  # keys are nodes too
            raise _TooLargeError
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass(frozen=True)
class ParsedFile:
    """A parsed file.

    Attributes:
        name: Its name in messages.
        values: Its mapping.
        lines: Dotted path -> line of the key, or of the item of a list (by its index), from 1.
        problems: Keys given twice, and tags.
    """

    name: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def source(self, path: str) -> Source:
        """Return the place of a dotted path that the file has."""
        return Source.in_file(self.name, self.lines[path])


def parse_scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    if _SPECIAL.match(text):
        return float(text.replace(".", ""))
    return text


class _Builder:
    """Turns YAML nodes into values, and collects the lines of keys and problems.

    Args:
        name: Name of the file in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._nodes = 0

    def build(self, node: yaml.Node, path: str = "", depth: int = 0) -> Any:
        """Return the value of a node with this dotted path."""
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise _TooLargeError
        tag = str(node.tag)
        if tag not in _TAGS:
            self._report(path, f"the tag {tag} is not allowed; write the plain value", node)
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return self._sequence(node, path, depth)
        assert isinstance(node, yaml.ScalarNode)
        text = str(node.value)
        if node.style is None and tag != "!":
            return parse_scalar(text)
        if text == "None":
            return None
        return text

    def _sequence(self, node: yaml.SequenceNode, path: str, depth: int) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self.lines[f"{path}.{index}"] = _line(item)
            items.append(self.build(item, f"{path}.{index}", depth + 1))
        return items

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._report("", "a key must be a word, not a list or a mapping", key_node)
                continue
            written = str(key_node.value)
            if path:
                key = written
                dotted = f"{path}.{key}"
            else:
                key = written.replace("-", "_")
                dotted = key
            if key in result:
                twice = f"`{written}` is given twice"
                if self.name:
                    twice += f", first at {self.name}:{self.lines[dotted]}"
                if spelled[key] != written:
                    twice += f" (written `{spelled[key]}` there; `-` and `_` are the same)"
                self._report(dotted, f"{twice}; remove one", key_node)
                continue
            self.lines[dotted] = _line(key_node)
            spelled[key] = written
            result[key] = self.build(value_node, dotted, depth + 1)
        return result

    def _report(self, path: str, message: str, node: yaml.Node) -> None:
        """Add a problem with a dotted path (empty for none) at the place of a node."""
        keys = (path,) if path else ()
        self.problems.append(Problem(keys, message, Source.in_file(self.name, _line(node))))


def _line(node: yaml.Node) -> int:
    """Return the line of a node, from 1."""
    return int(node.start_mark.line) + 1


def parse_text(text: str, name: str) -> ParsedFile:
    """Parse YAML or JSON text whose top level is a mapping.

    Raises:
        ConfigError: The text is malformed, with `name` and line.
    """
    builder = _Builder(name)
    try:
        node = _compose_fragment(text) or yaml.compose(text, Loader=_Loader)
        if node is None:
            raise _error(name, "the file is empty; it should hold `key: value` pairs")
        if not isinstance(node, yaml.MappingNode):
            raise _error(name, _not_a_mapping(node), _line(node))
        values = builder.build(node)
    except yaml.YAMLError as error:
        line, problem = _syntax_problem(error, text)
        raise _error(name, problem, line) from None
    except _TooLargeError:
        raise _error(name, _TOO_LARGE) from None
    return ParsedFile(name, values, builder.lines, tuple(builder.problems))


def _compose_fragment(text: str) -> yaml.Node | None:
    """Compose lines `"key": value,` of a NeoX file that have lost their braces; None for any other text."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not lines or not re.match(r"[\"'][\w-]+[\"']\s*:", lines[0]) or not any(line.endswith(",") for line in lines):
        return None
    try:
        return yaml.compose("{" + text + "\n}", Loader=_Loader)
    except yaml.YAMLError:
        return None


def parse_value(text: str) -> Any:
    """Parse one value of the command line as written in a file (`1e-5`, `[1, 2]`, `{a: b}`, `None`, text).

    Raises:
        ConfigError: The value has a tag, a key twice, or too many values. Its problems have no place.
    """
    builder = _Builder("")
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return None
        value = builder.build(node)
    except yaml.YAMLError:
        return text
    except _TooLargeError:
        raise ConfigError(_TOO_LARGE) from None
    if builder.problems:
        raise ConfigError(problem.message for problem in builder.problems)
    return value


def read_file(path: Path) -> ParsedFile:
    """Read and parse a file.

    Raises:
        ConfigError: It is missing, no text, too large or malformed.
    """
    name = str(path)
    if path.is_dir():
        raise _error(name, "is a directory; name the file in it")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _error(name, f"cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise _error(name, f"is {len(data):,} bytes; a configuration has at most {_MAX_BYTES:,}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _error(name, f"is not UTF-8 (byte {error.start}); save it as UTF-8", line) from None
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # JSON allows tabs between tokens and forbids them inside strings
    return parse_text(text, name)


def _error(name: str, message: str, line: int = 0) -> ConfigError:
    """Return the error for a file that cannot be read, at a line of it or (0) as a whole."""
    return ConfigError(Problem((), message, Source.in_file(name, line)))


def _not_a_mapping(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list stands where `key: value` pairs should; write the keys at the top"
    return f"should hold `key: value` pairs, but holds the text `{str(node.value)[:60]}`; is a `:` missing?"


def _syntax_problem(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the line of a syntax error (0 if it is not known), and a message with what to do."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return 0, f"is not YAML: {str(error).splitlines()[0]}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    problem = getattr(error, "problem", None) or "cannot be read"
    if "\\t" in problem or "\t" in line[: mark.column + 1]:
        message = "a tab stands where YAML wants spaces; replace tabs by spaces"
    elif mark.index >= len(text.rstrip()) and ("{" in text or "[" in text):
        message = "the file ends inside a bracket; a closing `}` or `]` is missing"
    elif "another document" in problem:
        message = "a second document begins with `---`; a configuration is one document, so remove the line"
    elif "expected ',' or" in problem:
        message = f"{problem}; a comma or a closing bracket is missing here or at the end of line {mark.line}"
    else:
        message = f"{problem} in `{line.strip()}`"
    return mark.line + 1, message
