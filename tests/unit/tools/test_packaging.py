"""What an installation holds, and scripts that are run without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import neox

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


NO_EXTRAS = ("dev", "offline-gpu", "transformers-4", "ascend", "rocm", "xpu")
"""Requirements of environments in which the library is tested or run, not of parts of it."""


def test_every_requirements_file_is_in_the_metadata() -> None:
    dynamic = SETTINGS["dynamic"]
    extras = {name: entry["file"] for name, entry in dynamic["optional-dependencies"].items()}
    assert dynamic["dependencies"]["file"] == ["requirements/requirements.txt"]
    assert extras == {
        path.stem.removeprefix("requirements-"): [f"requirements/{path.name}"]
        for path in (ROOT / "requirements").glob("requirements-*.txt")
        if path.stem.removeprefix("requirements-") not in NO_EXTRAS
    }


def test_the_version_is_one_number(tmp_path: Path) -> None:
    """That of the commands, the metadata, the citation and the heading of the changes that have no release yet."""
    said = subprocess.run(
        [sys.executable, ROOT / "deepy.py", "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert said.stdout.split() == ["neox", neox.__version__]
    assert SETTINGS["dynamic"]["version"] == {"attr": "neox.__version__"}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == neox.__version__
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    version = Version(neox.__version__)
    assert newest.startswith(f"## Unreleased ({version.base_version})" if version.is_devrelease else f"## {version} (")


def test_the_page_of_versions_says_what_is_allowed_and_locked() -> None:
    allowed = (ROOT / "requirements" / "requirements.txt").read_text()
    lowest, above = re.findall(r"^torch>=2\.(\d+),<2\.(\d+)$", allowed, re.M)[0]
    (deepspeed,) = re.findall(r"^deepspeed==(\S+)$", allowed, re.M)
    (transformers,) = re.findall(r"^transformers>=(\S+)$", allowed, re.M)
    lock = dict(
        line.split("==") for line in (ROOT / "requirements" / "constraints.txt").read_text().split() if "==" in line
    )
    page = (ROOT / "docs" / "versions.md").read_text().splitlines()
    assert f"| torch | 2.{lowest} to 2.{int(above) - 1} | {lock['torch']} |" in page
    assert f"| DeepSpeed | {deepspeed} | {lock['deepspeed']} |" in page
    assert f"| transformers | {transformers} and newer | {lock['transformers']} |" in page


def test_owners_are_named_for_every_package_and_for_nothing_else() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    everything, *paths = [line.split()[0] for line in lines if not line.startswith("#")]
    assert everything == "*"
    assert [path for path in paths if not (ROOT / path.strip("/")).is_dir()] == []
    assert {f"/neox/{path.parent.name}/" for path in (ROOT / "neox").glob("*/__init__.py")} <= set(paths)


def test_every_data_file_of_the_library_is_installed() -> None:
    files = {path.name for path in (ROOT / "neox").rglob("*") if path.is_file()}
    data = {name for name in files if not name.endswith((".py", ".pyc"))}
    assert {"prompt.html", "chat.js"} <= data
    assert {name for name in data if not any(fnmatch(name, p) for p in SETTINGS["package-data"]["*"])} == set()


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the requirements, where the project itself is not installed."""
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    # The .pth files of a folder that a .pth file names are not read: an editable installation there is not found.
    Path(packages, "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.parametrize("script", ["deepy.py", "tools/cluster.py", "tools/dataset.py", "tools/web_text.py"])
def test_scripts_run_where_only_the_requirements_are_installed(bare_python: Path, script: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(bare_python), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    assert "ModuleNotFoundError" in run("-c", "import neox").stderr
    done = run(str(ROOT / script), "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", sorted((ROOT / "tools").glob("*.py")), ids=lambda path: path.stem)
def test_tools_find_the_library_before_they_use_it(script: Path) -> None:
    lines = script.read_text().splitlines()
    uses = [number for number, line in enumerate(lines) if line.startswith(("from neox", "import neox", "from tools"))]
    if uses:
        assert lines.index("import _checkout  # noqa: F401") < uses[0]
