"""Width of muP's base network from a base shapes file of the package mup (gpt-neox's key `base_shapes_file`)."""

from __future__ import annotations

from pathlib import Path

from neox.config.flat import FlatKeys
from neox.config.yaml_file import ParsedFile, read_file
from neox.errors import ConfigError

_KEY = "base_shapes_file"
_WIDTH = "mup_base_hidden_size"
_EMBEDDING = "word_embeddings.weight"


def read_base_shapes(flat: FlatKeys) -> None:
    """Set `mup_base_hidden_size` from the file in `base_shapes_file`.

    mup writes a mapping from parameters to lists, with one entry per dimension: the size in the base network, or null
    if the dimension does not grow with the width. gpt-neox appends the rank to the file name: `FILE.0` has the token
    embedding, whose last dimension is hidden_size. A problem is reported if the file cannot be read, has no such entry,
    or contradicts a given width.
    """
    given = flat.values.get(_KEY, flat.values.get(_KEY.replace("_", "-")))
    if not isinstance(given, str):  # other checks refuse other types
        return
    path = Path(given)
    if not path.exists():
        path = Path(f"{given}.0")
    try:
        width = _base_width(read_file(path))
    except ConfigError as error:
        reasons = "; ".join(str(problem) for problem in error.problems)
        flat.report(f"`{_KEY}`: {reasons}; give {_WIDTH} instead", _KEY)
        return
    if width is None:
        flat.report(f"`{_KEY}`: {path} has no base width of {_EMBEDDING}; give {_WIDTH} instead", _KEY)
        return
    known = flat.values.setdefault(_WIDTH, width)
    flat.sources.setdefault(_WIDTH, flat.source(_KEY).derived(_KEY))
    if known != width:
        flat.report(f"`{_WIDTH}: {known}` contradicts {path}, whose base width is {width}; remove one", _WIDTH, _KEY)


def _base_width(shapes: ParsedFile) -> int | None:
    """Return the last dimension of the token embedding in mup's file; None if it does not grow with the width."""
    for name, shape in shapes.values.items():
        if name.endswith(_EMBEDDING) and isinstance(shape, list) and shape and type(shape[-1]) is int:
            width: int = shape[-1]
            return width
    return None
