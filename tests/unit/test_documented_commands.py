"""Commands in documents and in comments of configurations: their scripts, flags and keys exist.

The flags of a script are those in its source and in what it imports, because `--help` of forty scripts takes a minute.
Where they are made of other names, or another command follows them, the script's own parser is asked.
The recipes' tests type whole commands.
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
from functools import cache
from pathlib import Path

import pytest

from neox.config.keys import ALIASES
from neox.config.neox_config import known_keys
from tools.web_text.command import parser as web_text_parser

ROOT = Path(__file__).parents[2]
PLACES = ("README.md", "configs/README.md", "docs/*.md", "docs/*/*.md", "configs/**/*.yml")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for place in PLACES for path in ROOT.glob(place))
COMMAND = re.compile(r"(?:python3? |^|[\s`])(?P<script>deepy\.py|prepare_data\.py|tools/\w+\.py)(?P<words>[^`\n]*)")
FLAG = re.compile(r"(?<![\w/-])(--?[a-zA-Z][\w-]*)")
SETTING = re.compile(r"--(?:set|override)[ =]['\"]?(?P<key>[A-Za-z_][\w-]*)[\w.-]*=")
OF_EVERY_SCRIPT = {"--help", "--version", "-h"}
OF_OTHERS = {"docs/coming-from.md"}
"""Documents that name scripts of other systems."""
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


def sub_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a script's sub-commands by name."""
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return found.choices


@cache
def steps_of_web_text() -> dict[str, argparse.ArgumentParser]:
    return sub_commands(web_text_parser())


@cache
def flags_of_cluster_run() -> dict[str, argparse.Action]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        parser = runpy.run_path(str(ROOT / "tools" / "cluster.py"))["parser"]
    return sub_commands(parser())["run"]._option_string_actions


def unknown_step_or_flags(words: str) -> list[str]:
    """The sub-command of `web_text.py` in a command's words, or its flags, if they do not exist.

    A flag is named after a field of the step's settings.
    """
    name, *rest = words.split() or ["--help"]
    if name in OF_EVERY_SCRIPT or name.isupper():  # any step
        return []
    steps = steps_of_web_text()
    if name not in steps:
        return [name]
    known = steps[name]._option_string_actions
    return [flag for flag in FLAG.findall(" ".join(rest)) if flag not in known]


def unknown_before_command(words: str) -> tuple[list[str], str]:
    """The flags of `cluster.py run` that do not exist, and the command that it runs."""
    known = flags_of_cluster_run()
    unknown = []
    rest = shlex.split(words)[1:]
    while rest and rest[0].startswith("-"):
        flag, equals, _ = rest.pop(0).partition("=")
        if flag not in known:
            unknown.append(flag)
        elif not equals and known[flag].nargs != 0:
            rest = rest[1:]
    return unknown, " ".join(rest)


def wrong_words(text: str) -> list[str]:
    """Scripts, flags and keys of a document's commands that do not exist."""
    keys = {key.replace("-", "_") for key in (*known_keys(), *ALIASES)}
    wrong = []
    for script, words in commands(text):
        if not (ROOT / script).is_file():
            wrong.append(script)
            continue
        if script in ("tools/web_text.py", "tools/split_json.py"):
            step = "split" if script == "tools/split_json.py" else ""
            wrong += [f"{script} {word}" for word in unknown_step_or_flags(f"{step} {words}")]
            continue
        if f"{script}{words}".startswith("tools/cluster.py run"):
            unknown, command = unknown_before_command(words)
            wrong += [f"{script} {flag}" for flag in unknown]
            wrong += wrong_words(command)
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
    python tools/web_text.py clean --input a --workers 4 --worker 4, see `tools/web_text.py STEP --help`
    python tools/web_text.py wash --input a      # no step
    `tools/split_json.py --input a --test-percent 5 --tset-percent 3`
    python tools/cluster.py run -H hostfile --ssh-port 22 nvidia-smi --none
    python tools/cluster.py run --host_file h --dry-run python tools/score.py --none
    python tools/none.py, python deepy.py train.py a.yml --set 'optimizer.params.lr=1' --dry_run --num-gpus 2"""
    assert wrong_words(text) == [
        "tools/which_gpu.py --gpu_kind",
        "deepy.py --set train_iter",
        "deepy.py --inptu",
        "tools/web_text.py --worker",
        "tools/web_text.py wash",
        "tools/split_json.py --tset-percent",
        "tools/cluster.py --host_file",
        "tools/score.py --none",
        "tools/none.py",
    ]
