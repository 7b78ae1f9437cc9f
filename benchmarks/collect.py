"""Join what the steps of `gpu.sh` have left so far into two files: figures and logs.

    benchmarks/collect.py WORK PREFIX        writes PREFIX.json and PREFIX.tar.gz

WORK holds `steps.tsv` (step, status, seconds), `running.tsv` (the same of a step under way), STEP.json of the
benchmarks that write one and STEP.log of every step, in which lines that are JSON objects count as figures too. A
figure file that a stopped step left unfinished is named.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from pathlib import Path
from typing import Any

from neox.files import atomic_write, write_text


def figures(work: Path, step: str) -> Any:
    """Return what a step measured: its JSON file, or the JSON objects among the lines of its log."""
    path = work / f"{step}.json"
    if path.is_file():
        try:
            return json.loads(path.read_text())
        except ValueError:
            return {"unfinished": path.name}
    lines = (work / f"{step}.log").read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def main(work: Path, prefix: Path) -> None:
    """Write `PREFIX.json` and `PREFIX.tar.gz`."""
    lists = [path for path in (work / "steps.tsv", work / "running.tsv") if path.is_file()]
    steps = [line.split("\t") for path in lists for line in path.read_text().splitlines()]
    found = {
        name: {"status": status, "seconds": int(seconds), "figures": figures(work, name)}
        for name, status, seconds in steps
    }
    machine = (work / "machine.log").read_text(errors="replace").splitlines()
    write_text(
        prefix.with_name(f"{prefix.name}.json"), json.dumps({"machine": machine, "steps": found}, indent=1) + "\n"
    )
    with (
        atomic_write(prefix.with_name(f"{prefix.name}.tar.gz")) as file,
        tarfile.open(fileobj=file, mode="w:gz") as archive,
    ):
        for path in sorted(work.iterdir()):
            archive.add(path, path.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="directory with the files of the steps")
    parser.add_argument("prefix", type=Path, help="path of the two files, without .json and .tar.gz")
    arguments = parser.parse_args()
    main(arguments.work, arguments.prefix)
