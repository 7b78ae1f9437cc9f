"""Checks of errors that do not depend on the wording of their messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neox.errors import NeoXError


@contextmanager
def raises_naming(kind: type[NeoXError], *names: str | Path | int) -> Iterator[None]:
    """Expect an error of one line that contains names: files, lines, keys, flags or numbers, but no sentences."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, message
    for name in names:
        assert str(name) in message, message
