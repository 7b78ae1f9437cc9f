"""Jinja's environment for chat templates: the one of Hugging Face's `apply_chat_template`, inside Jinja's sandbox.

Templates are code written by others. The sandbox keeps them from Python's internals and from changing what they get.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

Clock = Callable[[str], str]
"""Function from a format of `strftime` to the date and time."""

ERRORS = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What a template may raise for a conversation."""


class GenerationTag(jinja2.ext.Extension):
    """Hugging Face's tag around answers, `{% generation %}...{% endgeneration %}`. It writes what is inside.

    The inside is a block of its own, as in transformers: what it sets is not known after it.

    Attributes:
        is_used: Whether a template of the environment has the tag.
    """

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.is_used = False
        self._written: list[str] | None = None
        self._ranges: list[tuple[int, int]] = []

    @contextmanager
    def recorded(self, written: list[str]) -> Iterator[list[tuple[int, int]]]:
        """Record the ranges of characters inside tags.

        Args:
            written: Pieces of the text that have been written so far. The caller appends to it.

        Yields:
            List that gets the ranges, each as its start and its end.
        """
        self._written = written
        self._ranges = []
        try:
            yield self._ranges
        finally:
            self._written = None

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the node of a tag."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        text = caller()
        if self._written is not None:
            begin = sum(map(len, self._written))
            self._ranges.append((begin, begin + len(text)))
        return text


class TemplateDict:
    """The function `dict` of templates, without the attributes of Python's type."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        """Return a dictionary."""
        return dict(*pairs, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """Return a dictionary of keys with the same value."""
        return dict.fromkeys(keys, value)


class TemplateNamespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, which refuses names that begin with an underscore, as transformers does."""

    def __init__(*args: Any, **items: Any) -> None:  # so that `namespace(self=...)` works, as in Jinja
        self, *pairs = args
        attributes = dict(*pairs, **items)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises SecurityError for a hidden name."""
        _check_name(name)
        super().__setitem__(name, value)


def compile_template(source: str, clock: Clock | None) -> tuple[jinja2.Template, GenerationTag]:
    """Compile a chat template.

    Args:
        source: Text of the template.
        clock: What `strftime_now` does in templates; None leaves the function out.

    Returns:
        The template, and the tag around answers in its environment.

    Raises:
        jinja2.TemplateSyntaxError: If it is not a valid template.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace
    if clock is not None:
        environment.globals["strftime_now"] = clock
    tag = environment.extensions[GenerationTag.identifier]
    assert isinstance(tag, GenerationTag), "the environment holds the extension itself"
    return environment.from_string(source), tag


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
