"""Paths of the repository that its documents name."""

import re
from pathlib import Path

import pytest

from neox.architecture import ACTIVATIONS, BLOCKS, NORMS, POSITIONS
from neox.convert import choose_family
from neox.plan import config_from_files, resolve

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md"), *ROOT.glob("docs/recipes/*.md")]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "neox/README.md", *(str(page.relative_to(ROOT)) for page in PAGES)]
FOLDERS = ("benchmarks", "configs", "docs", "neox", "requirements", "tests", "tools")
# A folder of gpt-neox, whose tools are compared with ours.
NOT_OURS = "tools/ckpts/"


def named_paths(text: str) -> list[str]:
    """Paths below a folder of the repository that stand alone in backticks, without placeholders (NAME)."""
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", text)
    return [path for path in paths if not re.search(r"\b[A-Z]{3,}(?!\.md)\b", path) and not path.startswith(NOT_OURS)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_documents_exist(document: str) -> None:
    paths = named_paths((ROOT / document).read_text(encoding="utf-8"))
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_paths_are_found_in_documents() -> None:
    text = "`neox/README.md`, `neox/families/NAME.py`, `tools/ckpts/x.py`, `neox/ops/`, `neox.ops`, tests/unit"
    assert named_paths(text) == ["neox/README.md", "neox/ops/"]


def test_the_page_of_models_names_every_choice() -> None:
    words = set(re.findall(r"`([\w.]+)`", (ROOT / "docs/models.md").read_text(encoding="utf-8")))
    choices = {*ACTIVATIONS, *BLOCKS, *NORMS, *POSITIONS}
    assert not choices - words


def test_the_file_from_nothing_is_a_llama_that_can_be_planned_and_exported(tmp_path: Path) -> None:
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n# my.yml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "my.yml"
    file.write_text(block)
    plan = resolve(config_from_files([file]), 1, 8000)
    assert plan.architecture.mlp_width == 352
    assert choose_family(plan.config).model_type == "llama"
    assert not [note for note in plan.notes if "changes nothing" in note]


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    config = pytest.importorskip("mkdocs.config", reason="mkdocs (requirements/requirements-docs.txt) is not installed")
    from mkdocs.commands.build import build

    build(config.load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    assert (tmp_path / "index.html").is_file()
