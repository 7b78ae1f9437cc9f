"""Checks of errors that do not depend on the wording of their messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_naming(kind: type[Exception], *names: object, lines: int = 1) -> Iterator[None]:
    """Expect an error that contains names: files, lines, keys, flags or numbers, but no sentences.

    Args:
        kind: Class of the error.
        names: Names in the message.
        lines: Lines of the message.
    """
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert len(message.splitlines()) == lines, message
    for name in names:
        assert str(name) in message, message
