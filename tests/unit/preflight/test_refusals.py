"""One answer to "would it start?": a dry run ends as a start does, and a start refuses what its ranks would refuse."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.spawn import run_ranks
from tests.refusals import PACKAGES, REFUSALS, Refused
from tests.starts import dry_run, refusals_of_rank, start, unchecked_start, write_data

LIBRARY = Path(__file__).resolve().parents[3] / "neox"
DRIVEN = [
    pytest.param(function, answer, id=f"{function.split()[-1]}-{number}")
    for function, answers in REFUSALS.items()
    for number, answer in enumerate(answers)
    if isinstance(answer, Refused)
]


def raises_of(node: ast.AST, scope: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the name of the function of each `raise` statement."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = (*scope, child.name)
        if isinstance(child, ast.Raise):
            yield ".".join(scope)
        yield from raises_of(child, inner)


def test_every_refusal_has_an_answer() -> None:
    """A new `raise` in a package that ranks run needs a rule or a check before a start, or a reason in the list."""
    found: dict[str, int] = {}
    for package in PACKAGES:
        for file in sorted((LIBRARY / package).rglob("*.py")):
            for function in raises_of(ast.parse(file.read_text(encoding="utf-8"))):
                name = f"{file.relative_to(LIBRARY)}: {function}"
                found[name] = found.get(name, 0) + 1
    assert found == {function: len(answers) for function, answers in REFUSALS.items()}


def test_what_starts_has_a_dry_run_that_says_so(tmp_path: Path) -> None:
    write_data(tmp_path)
    assert dry_run(tmp_path, {}).status == 0
    started = start(tmp_path, {})
    assert (started.status, started.payload is not None) == (0, True)
    assert run_ranks(1, refusals_of_rank, [tmp_path], [started.payload]) == [[("", "")]]


@pytest.mark.parametrize(("function", "answer"), DRIVEN)
def test_a_dry_run_ends_as_the_start_does(tmp_path: Path, function: str, answer: Refused) -> None:
    answer.prepare(tmp_path)
    started = start(tmp_path, answer.change)
    assert (started.status, started.payload) == (2, None), started.errors
    assert dry_run(tmp_path, answer.change).status == (0 if answer.is_missing else 2)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_refuse_what_the_launcher_refuses(tmp_path: Path, world: int) -> None:
    """Without the launcher's rules and checks each configuration ends in the function that its row is about."""
    functions: list[str] = []
    directories: list[Path] = []
    payloads: list[str] = []
    for number, case in enumerate(DRIVEN):
        function, answer = case.values
        if not answer.reaches_rank or answer.change.get("num_gpus", 1) != world:
            continue
        directory = tmp_path / str(number)
        directory.mkdir()
        answer.prepare(directory)
        started = unchecked_start(directory, answer.change)
        assert started.payload is not None, (function, started.errors)
        functions.append(function)
        directories.append(directory)
        payloads.append(started.payload)
    found = run_ranks(world, refusals_of_rank, directories, payloads)[0]
    for function, (where, error) in zip(functions, found, strict=True):
        file, name = function.split(": ")
        assert where == f"{LIBRARY / file}:{name.split('.')[-1]}", error
