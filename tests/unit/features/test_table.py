"""Who knows features: the table, and nobody else."""

import ast
from pathlib import Path

import pytest

from neox import features
from neox.engine import Feature
from neox.features.on_paper import PAPERS
from neox.features.table import BUILDERS, REPORTERS

LIBRARY = Path(features.__file__).parents[1]
MAY_IMPORT = {"neox/train/pretrain.py": {"neox.features.table"}}
"""Where a training begins."""


def may_import(place: str, module: str) -> bool:
    """Whether a file outside of `features` may import one of its modules."""
    if place.startswith("neox/config/sections/"):  # a section is made of the keys of features
        return module.endswith(".keys")
    if place.startswith(("neox/plan/", "neox/preflight/")):
        return module == "neox.features.on_paper"
    return module in MAY_IMPORT.get(place, set())


def imported_features(file: Path) -> set[str]:
    """Modules of features that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name for name in names if name.startswith("neox.features")}
    return found


def test_nothing_but_the_table_imports_a_feature():
    for file in LIBRARY.rglob("*.py"):
        place = str(file.relative_to(LIBRARY.parent))
        if place.startswith("neox/features/"):
            continue
        assert [module for module in imported_features(file) if not may_import(place, module)] == [], place


def test_each_paper_is_found():
    files = {f"neox.features.{file.parent.name}.paper" for file in (LIBRARY / "features").glob("*/paper.py")}
    assert len(PAPERS) == len(files) > 5


def test_no_feature_imports_another_one():
    for folder in sorted((LIBRARY / "features").iterdir()):
        for file in folder.rglob("*.py"):
            others = {name for name in imported_features(file) if not name.startswith(f"neox.features.{folder.name}")}
            assert not others, file


def test_each_folder_of_a_feature_is_in_the_table():
    listed = {build.__module__ for build in (*BUILDERS, *REPORTERS)}
    assert len(listed) == len(BUILDERS) + len(REPORTERS)
    folders = {folder.name for folder in (LIBRARY / "features").iterdir() if (folder / "__init__.py").is_file()}
    assert {name.split(".")[2] for name in listed} == folders


@pytest.mark.parametrize("name", ["engine", "train"])
def test_engine_and_trainer_write_no_attribute_of_an_engine_or_feature(name):
    """Only constructors, and methods of the object itself, set attributes."""
    for file in (LIBRARY / name).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    assert target.value.id not in ("engine", "feature", "trainer"), (file, node.lineno)


def test_the_docstring_of_the_points_names_every_point():
    import neox.engine.feature as module

    points = [name for name in vars(Feature) if not name.startswith("_")]
    assert [name for name in points if name not in (module.__doc__ or "")] == []
