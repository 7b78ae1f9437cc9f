"""Jinja's environment for chat templates: the one of Hugging Face's `apply_chat_template`, inside Jinja's sandbox.

Templates are code written by others. The sandbox keeps them from Python's internals and from changing what they get.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
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
    """

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the node of a tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


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


def compile_template(source: str, clock: Clock | None) -> jinja2.Template:
    """Compile a chat template.

    Args:
        source: Text of the template.
        clock: What `strftime_now` does in templates; None leaves the function out.

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
    return environment.from_string(source)


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
