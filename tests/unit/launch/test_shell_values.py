"""Lines of NAME=value, read as a shell reads them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from neox.launch.shell_values import ShellValueError, expand, read_assignments, read_value, referenced_names

OUTSIDE = {"HOME": "/home/me", "LD": "/ld", "EMPTY": ""}


def values(text: str) -> dict[str, str]:
    """The variables that a file sets."""
    found: dict[str, str] = {}
    for assignment in read_assignments(text):
        found[assignment.name] = expand(assignment.parts, {**OUTSIDE, **found})
        assert read_value(assignment.source) == assignment.parts
    return found


AS_SH = r"""# a comment

export A=1
B="lo"   # a comment
C='$LD "x"'
  D=/opt/efa/lib64:$LD
E=${LD}x:${NONE:-d}:${NONE-e}:${EMPTY:-f}:${EMPTY-g}:${LD:+h}:${NONE+i}
F="a \"b\" \$LD \\ \x '"
G=a\ b\$LD
H=one\
two
I="one
two"
J=~/x:~/y:a~b
K="~/x"
L=a#b
M=
N=''
O=/a/"b c"/'d e'$LD
P=1;
Q=$A$B$
R="${NONE:-"q r"}"
S=${NONE:-$A/${B}}
"""


def test_the_same_values_as_a_shell(tmp_path: Path) -> None:
    ours = values(AS_SH)
    (tmp_path / "file").write_text(AS_SH)
    script = f'set -a; . "{tmp_path}/file"; exec env -0'
    done = subprocess.run(["sh", "-c", script], env=OUTSIDE, capture_output=True, text=True, check=True)
    theirs = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    assert ours == {name: theirs[name] for name in ours}
    assert len(ours) == 19


def test_what_deepspeed_puts_between_double_quotes() -> None:
    text = "A = a b \r\nB=64(x2)\nC=8.0;9.0\nD=a*b|c&d<e>\nE=-Da=b -Dc=d\nF=$LD c\nLD+=:/x\n"
    found = {"A": "a b", "B": "64(x2)", "C": "8.0;9.0", "D": "a*b|c&d<e>", "E": "-Da=b -Dc=d", "F": "/ld c"}
    assert values(text) == {**found, "LD": "/ld:/x"}


@pytest.mark.parametrize(
    "line",
    [
        "hush",
        "export A",
        "1A=hush",
        "A=$(hush)",
        "A=`hush`",
        'A="$(hush)"',
        "A=don't hush",
        'A="hush',
        "A=1 B=hush",
        "A=1; export B=hush",
        'A="a" hush',
        'A=a "hush"',
        'A={"hush": 1}',
        "A=${hush#x}",
        "A=${#hush}",
        "A=${hush",
        "A=$1hush",
        "A=$$",
        "A=$'hush'",
        "source hush",
    ],
)
def test_what_is_refused_without_showing_it(line: str) -> None:
    with pytest.raises(ShellValueError) as error:
        read_assignments(f"B=1\n\n{line}\n")
    assert error.value.line == 3
    assert "hush" not in str(error.value)


def test_names_on_which_a_value_depends() -> None:
    (assignment,) = read_assignments("A=$B/${C:-${D:-$E}}'$F'\n")
    assert list(referenced_names(assignment.parts)) == ["B", "C", "D", "E"]
