"""Parser of every script's command line: description, `--version`, completion by a shell, and overrides of keys."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import neox


def add_overrides(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add `--set` and `--override`, which append `KEY=VALUE` to `set`; `more`: further spellings."""
    text = "override a key of the configuration (repeatable)"
    parser.add_argument("--set", "--override", *more, action="append", default=[], metavar="KEY=VALUE", help=text)


class _Store(argparse._StoreAction):
    """Stores a flag's values; a flag of any number of values that is given again adds to those it has."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        earlier: Any = getattr(namespace, self.dest, self.default)
        if self.nargs == "+" and option_string is not None and earlier is not self.default:
            values = [*earlier, *values]
        super().__call__(parser, namespace, values, option_string)


class ScriptParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with `--version`, descriptions as they are written, and completion.

    A flag that takes several values (`nargs="+"`) may be given several times. Words of a flag may be joined by `-` or
    by `_`.

    A script with the mark `PYTHON_ARGCOMPLETE_OK` in its first lines is completed by shells in which argcomplete is
    active (`eval "$(register-python-argcomplete deepy.py)"`, or `activate-global-python-argcomplete`).

    Args:
        keywords: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**keywords)
        self.register("action", None, _Store)
        self.register("action", "store", _Store)
        self._asked = False
        if keywords.get("add_help", True):
            self.add_argument("--version", action="version", version=f"neox {neox.__version__}")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does; where a shell asks for completions, answer and exit."""
        self._complete()
        words = [self._known_spelling(word) for word in (sys.argv[1:] if args is None else args)]
        found: tuple[argparse.Namespace, list[str]] = super().parse_known_args(words, namespace)
        return found

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, with the same answer to a shell."""
        self._complete()
        found: tuple[argparse.Namespace, list[str]] = super().parse_known_intermixed_args(args, namespace)
        return found

    def _known_spelling(self, word: str) -> str:
        """Return a flag, perhaps with `=VALUE`, with the `-` or `_` that the parser has between its words."""
        flag, equals, value = word.partition("=")
        for other in ("--" + flag[2:].replace("_", "-"), "--" + flag[2:].replace("-", "_")):
            if flag[:2] == "--" and flag not in self._option_string_actions and other in self._option_string_actions:
                return other + equals + value
        return word

    def _complete(self) -> None:
        if "_ARGCOMPLETE" in os.environ and not self._asked:
            self._asked = True  # argcomplete parses, too
            import argcomplete  # only the shell's question needs it

            argcomplete.autocomplete(self)
