"""Commands in documents and in comments of configurations: their scripts, flags and keys exist.

The flags of a script are those in its source and in what it imports, because `--help` of forty scripts takes a minute.
The recipes' tests type whole commands.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from neox.config.keys import ALIASES
from neox.config.neox_config import known_keys

ROOT = Path(__file__).parents[2]
PLACES = ("README.md", "configs/README.md", "docs/*.md", "docs/*/*.md", "configs/**/*.yml")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for place in PLACES for path in ROOT.glob(place))
COMMAND = re.compile(r"(?:python3? |^|[\s`])(?P<script>deepy\.py|prepare_data\.py|tools/\w+\.py)(?P<words>[^`\n]*)")
FLAG = re.compile(r"(?<![\w/-])(--?[a-zA-Z][\w-]*)")
SETTING = re.compile(r"--(?:set|override)[ =]['\"]?(?P<key>[A-Za-z_][\w-]*)[\w.-]*=")
OF_EVERY_SCRIPT = {"--help", "--version", "-h"}
OF_OTHERS = {"docs/coming-from.md"}
"""Documents that name scripts of other systems."""
WITH_OTHER_FLAGS = ("tools/cluster.py run", "tools/web_text.py", "tools/split_json.py")
"""Scripts that take the words of another command, or flags named after the fields of a step."""
OF_DEEPY = ["deepy.py", "neox/preflight/command_line.py", "neox/preflight/tool_runs.py"]


def commands(text: str) -> list[tuple[str, str]]:
    """Scripts of a document with the rest of their lines, up to a comment, a pipe or the next command."""
    found = []
    for match in COMMAND.finditer(text.replace("\\\n", " ")):
        words = re.split(r"\s#\s|\s#$|\s\||;|&&| >|\)", match["words"])[0]
        found.append((match["script"], words))
    return found


def strings_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@cache
def flags_of(script: str) -> frozenset[str]:
    """Flags in a script, in the package of its name, and in what these import: tools, and parsers of the library."""
    left = [ROOT / script, *(ROOT / script).with_suffix("").glob("**/*.py")]
    files: set[Path] = set()
    while left:
        file = left.pop()
        if file in files:
            continue
        files.add(file)
        for module in re.findall(r"^\s*(?:from|import) ([\w.]+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            name = module.replace(".", "/")
            for path in (ROOT / f"{name}.py", ROOT / "tools" / f"{name}.py"):
                is_of_tools = (ROOT / "tools") in path.parents
                if path.is_file() and (is_of_tools or ".add_argument(" in path.read_text(encoding="utf-8")):
                    left.append(path)
    strings: set[str] = set()
    for file in files:
        strings |= strings_of(file)
    return frozenset(string.replace("_", "-") for string in strings if string.startswith("-"))


def scripts_of(script: str, words: str) -> list[str]:
    """The files whose flags a command takes: `deepy.py TOOL.py` runs a tool."""
    if script == "prepare_data.py":  # NeoX's old place of a tool
        return ["tools/prepare_data.py"]
    if script != "deepy.py":
        return [script]
    tool = re.match(r"\s+(?:tools/)?(\w+)(?:\.py)?\b", words)
    files = [*OF_DEEPY]
    if tool and (ROOT / "tools" / f"{tool[1]}.py").is_file():
        files.append(f"tools/{tool[1]}.py")
    return files


def wrong_words(text: str) -> list[str]:
    """Scripts, flags and keys of a document's commands that do not exist."""
    keys = {key.replace("-", "_") for key in (*known_keys(), *ALIASES)}
    wrong = []
    for script, words in commands(text):
        if not (ROOT / script).is_file():
            wrong.append(script)
            continue
        if f"{script}{words}".startswith(WITH_OTHER_FLAGS):
            continue
        known = {flag for file in scripts_of(script, words) for flag in flags_of(file)} | OF_EVERY_SCRIPT
        quoted = re.sub(r"'[^']*'|\"[^\"]*\"", "QUOTED", words)
        for flag in FLAG.findall(quoted):
            if flag.replace("_", "-") not in known:
                wrong.append(f"{script} {flag}")
        for setting in SETTING.finditer(words):
            if setting["key"].replace("-", "_") not in keys:
                wrong.append(f"{script} --set {setting['key']}")
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS)
def test_scripts_flags_and_keys_of_commands_exist(document: str) -> None:
    wrong = wrong_words((ROOT / document).read_text(encoding="utf-8"))
    if document in OF_OTHERS:
        wrong = [word for word in wrong if not word.endswith(".py")]
    assert wrong == []


def test_wrong_words_are_found() -> None:
    text = """`python tools/which_gpu.py a.yml --gpus 8 --gpu_kind h100`
    `python deepy.py train.py a.yml --set train_iter=5`
    python deepy.py preprocess_data.py --input x --inptu y --hostfile z   # --none
    python tools/none.py, python deepy.py train.py a.yml --set 'optimizer.params.lr=1' --dry_run --num-gpus 2"""
    assert wrong_words(text) == [
        "tools/which_gpu.py --gpu_kind",
        "deepy.py --set train_iter",
        "deepy.py --inptu",
        "tools/none.py",
    ]
