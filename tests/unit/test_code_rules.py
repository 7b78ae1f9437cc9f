"""Rules of the library's code that import contracts in pyproject.toml cannot express."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("neox", "tools/cluster", "tools/dataset", "tools/ladder", "tools/sweep", "tools/web_text")
FILES = sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MUTATORS = {"append", "extend", "insert", "update", "setdefault", "pop", "popitem", "clear", "add", "remove", "discard"}
EMPTY = {"[]", "{}", "list()", "dict()", "set()", "defaultdict(list)", "deque()", "Counter()"}
# The launcher; the start of a rank; the start of a worker process, which limits the threads of the libraries it loads.
USES_ENVIRONMENT = (
    "neox/arguments.py",  # what a shell asks
    "neox/launch/",
    "neox/engine/device.py",
    "neox/engine/distributed.py",
    "neox/workers.py",
)
# A plan can be made without numpy, which these checks import where there is something to check; one sub-command of web
# text needs torch.
INNER_IMPORTS = {
    "neox/preflight/chat_checks.py",
    "neox/preflight/checkpoint_checks.py",
    "neox/preflight/checks.py",
    "neox/preflight/command.py",
    "neox/preflight/data_amounts.py",
    "neox/preflight/data_checks.py",
    "neox/decisions/start.py",
    "neox/preflight/mirrored_save.py",
    "neox/preflight/read_sets.py",
    "neox/preflight/remote_checkpoints.py",
    "neox/preflight/score_checks.py",
    "neox/preflight/tokenizer_checks.py",
    "tools/web_text/command.py",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Trees = dict[str, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """The syntax trees of all files. At the top of this module every process of the tests would make and keep them."""
    return {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in FILES}


def functions(trees: Trees) -> Iterator[tuple[str, Function]]:
    """All functions and methods, with their files."""
    for file, tree in trees.items():
        yield from ((file, node) for node in ast.walk(tree) if isinstance(node, Function))


def top_level_values(tree: ast.Module) -> dict[str, ast.expr]:
    """The names that a module binds outside functions and classes, with their values."""
    names = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names.update({target.id: node.value for target in node.targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            names[node.target.id] = node.value
    return names


def changed_name(node: ast.AST) -> str | None:
    """The name of the collection that a call or an assignment changes."""
    target = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        target = node.func.value
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        target = node.value
    return target.id if isinstance(target, ast.Name) else None


def test_modules_hold_no_state(trees: Trees) -> None:
    found = []
    for file, tree in trees.items():
        names = top_level_values(tree)
        found += [f"{file}: {name} begins empty" for name, value in names.items() if ast.unparse(value) in EMPTY]
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found.append(f"{file}:{node.lineno}: global")
            elif (name := changed_name(node)) in names:
                found.append(f"{file}: {name} is changed")
    assert found == []


def test_the_environment_is_used_where_processes_start(trees: Trees) -> None:
    uses = {
        file
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv", "os.putenv"}
    }
    assert [file for file in uses if not file.startswith(USES_ENVIRONMENT)] == []


def test_files_are_replaced_and_locked_by_one_module(trees: Trees) -> None:
    calls = {"os.replace", "os.fsync", "fcntl.flock", "fcntl.lockf"}
    uses = {
        file
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in calls
    }
    assert uses == {"neox/files.py"}


def test_every_parameter_is_typed(trees: Trees) -> None:
    untyped = []
    for file, function in functions(trees):
        if any("triton" in ast.unparse(decorator) for decorator in function.decorator_list):  # a language of its own
            continue
        given = function.args
        for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
            if argument is not None and argument.annotation is None and argument.arg not in {"self", "cls"}:
                untyped.append(f"{file}: {function.name}({argument.arg})")
    assert untyped == []


def test_imports_of_other_packages_stand_at_the_top(trees: Trees) -> None:
    inner = []
    for file, function in functions(trees):
        own = ".".join(file.split("/")[:2])
        others = ("neox", "tools")
        for node in ast.walk(function):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            inner += [f"{file}: {name}" for name in modules if name.startswith(others) and not name.startswith(own)]
    assert [entry for entry in inner if entry.split(":")[0] not in INNER_IMPORTS] == []


def test_tensorboard_is_imported_in_its_tracker_alone(trees: Trees) -> None:
    importers = {
        file
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch.utils.tensorboard"
    }
    assert importers == {"neox/features/trackers/tensorboard.py"}


def test_modules_have_telling_names_and_no_lazy_attributes(trees: Trees) -> None:
    lazy = {f for f, tree in trees.items() for node in tree.body if getattr(node, "name", None) == "__getattr__"}
    assert lazy == set()
    assert [f for f in FILES if {"utils", "common", "helpers", "misc"} & set(Path(f).with_suffix("").parts)] == []


# Per 1,000 lines that are not blank. Denser code has to be read twice.
MOST_CONDITIONAL_EXPRESSIONS, MOST_COMPREHENSIONS, MOST_TUPLE_ASSIGNMENTS = 12, 18, 3
DENSE_UNITS = [
    "tools",
    *sorted({"/".join(file.split("/")[:2]) for file in FILES if file.count("/") > 1} - set(PACKAGES)),
]


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether a statement assigns several values to several names at once."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


@pytest.mark.parametrize("package", DENSE_UNITS)
def test_code_is_not_dense(package: str, trees: Trees) -> None:
    files = [file for file in FILES if file.startswith(f"{package}/")]
    lines = sum(len(list(filter(str.strip, (ROOT / file).read_text(encoding="utf-8").splitlines()))) for file in files)
    nodes = [node for file in files for node in ast.walk(trees[file])]
    conditional = [node for node in nodes if isinstance(node, ast.IfExp)]
    comprehensions = [
        node for node in nodes if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
    ]
    assert len(conditional) * 1000 <= MOST_CONDITIONAL_EXPRESSIONS * lines
    assert len(comprehensions) * 1000 <= MOST_COMPREHENSIONS * lines
    assert sum(map(is_tuple_assignment, nodes)) * 1000 <= MOST_TUPLE_ASSIGNMENTS * lines
    nested = [node for node in conditional if sum(isinstance(inner, ast.IfExp) for inner in ast.walk(node)) > 1]
    assert nested == []
