"""Rooms whose names are loaded when first used say the same three times: to type checkers, to readers, to Python."""

import ast
from importlib import import_module
from pathlib import Path

import pytest


@pytest.mark.parametrize("room", ["data", "evaluation", "generation", "launch"])
def test_lazy_names(room):
    package = import_module(f"neox.{room}")
    homes, prefix = package._HOMES, f"neox.{room}."
    typed = {
        alias.name: node.module.removeprefix(prefix)
        for node in ast.walk(ast.parse(Path(package.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix)
        for alias in node.names
    }
    assert typed == homes
    assert sorted(package.__all__) == sorted(homes)
    assert all(getattr(package, name) is not None for name in homes)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018
