"""Parser of every script's command line: description, `--version`, completion by a shell, and overrides of keys."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import neox


def add_overrides(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add the flags `--set` and `--override`, which append `KEY=VALUE` to `set`.

    Args:
        parser: The parser that gets the flags.
        more: Further spellings of the flag.
    """
    text = "override a key of the configuration (repeatable)"
    parser.add_argument("--set", "--override", *more, action="append", default=[], metavar="KEY=VALUE", help=text)


class _Store(argparse._StoreAction):
    """Stores a flag's values. A flag of any number of values that is given again adds to the earlier ones."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        earlier: Any = getattr(namespace, self.dest, self.default)
        is_repeated = option_string is not None and earlier is not self.default
        if self.nargs == "+" and is_repeated:
            values = [*earlier, *values]
        super().__call__(parser, namespace, values, option_string)


class ScriptParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with `--version`, descriptions as they are written, and completion.

    A flag that takes several values (`nargs="+"`) may be given several times. The words of a flag may be joined by `-`
    or by `_`.

    A script with the mark `PYTHON_ARGCOMPLETE_OK` in its first lines is completed by shells in which argcomplete is
    active (`eval "$(register-python-argcomplete deepy.py)"`, or `activate-global-python-argcomplete`).

    Args:
        keywords: Keyword arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**keywords)
        self.register("action", None, _Store)
        self.register("action", "store", _Store)
        self._is_completing = False
        if keywords.get("add_help", True):
            self.add_argument("--version", action="version", version=f"neox {neox.__version__}")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does. If a shell asks for completions, answer it and exit."""
        self._answer_completion()
        if args is None:
            args = sys.argv[1:]
        words = [self._known_spelling(word) for word in args]
        found: tuple[argparse.Namespace, list[str]] = super().parse_known_args(words, namespace)
        return found

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does. If a shell asks for completions, answer it and exit."""
        self._answer_completion()
        found: tuple[argparse.Namespace, list[str]] = super().parse_known_intermixed_args(args, namespace)
        return found

    def _known_spelling(self, word: str) -> str:
        """Return a word with `-` or `_` between its parts as the parser knows it, if it is a flag (or `FLAG=VALUE`)."""
        flag, equals, value = word.partition("=")
        known = self._option_string_actions
        if not flag.startswith("--") or flag in known:
            return word
        name = flag.removeprefix("--")
        for spelling in ("--" + name.replace("_", "-"), "--" + name.replace("-", "_")):
            if spelling in known:
                return spelling + equals + value
        return word

    def _answer_completion(self) -> None:
        """Answer a shell that asks for completions, and exit; do nothing in any other call."""
        if "_ARGCOMPLETE" not in os.environ or self._is_completing:
            return
        self._is_completing = True  # argcomplete calls the parser, too
        import argcomplete  # its import takes time, and only a shell's question needs it

        argcomplete.autocomplete(self)
