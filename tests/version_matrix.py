"""Tests with other versions of torch, transformers and DeepSpeed: `make test-matrix`.

Each environment holds the packages of one row and finds all others in that of the tests. `--python NAME=PATH` takes an
interpreter that you have, such as that of a GPU machine. At the end stands a table for docs/versions.md.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = {
    "torch-2.11": ["torch==2.11.0"],
    "torch-2.12": ["torch==2.12.1"],
    "torch-2.14": ["torch==2.14.1"],
    "torch-2.15": ["torch==2.15.0"],
    # with the newest release of datasets that takes the huggingface_hub of transformers 4
    "transformers-4.57": ["-r", "requirements/requirements-transformers-4.txt", "datasets==4.8.5"],
    "transformers-5.0": ["transformers==5.0.0", "huggingface_hub>=1.3,<2", "tokenizers>=0.22,<=0.23.0"],
}
"""The rows beside the locked versions: what pip installs without dependencies."""

TESTS = [
    # what these packages can break without a run: kernels, modules, optimizers, Hugging Face, corrections of DeepSpeed
    *("tests/unit/engine", "tests/unit/ops", "tests/unit/optim", "tests/unit/parallel", "tests/unit/model"),
    *("tests/unit/objectives", "tests/unit/families", "tests/unit/convert", "tests/parity/test_hf_logits.py"),
    # ranks: gradients of stages, tensor ranks and data ranks, compiled layers, a resume
    *("tests/distributed/test_engine_gradients.py", "tests/distributed/test_deepspeed_patches.py"),
    *("tests/distributed/test_compiled_layers.py", "tests/distributed/test_resume.py"),
    # `deepy.py train.py` on two ranks, its logs, checkpoints and resume
    "tests/end_to_end/test_main_job.py",
]
VERSIONS = """
import deepspeed, torch, transformers, triton
print(*(module.__version__ for module in (torch, transformers, deepspeed, triton)))
"""


def make_environment(directory: Path, packages: list[str], torch_index: str | None) -> Path:
    """Return the interpreter of an environment with these packages in front of this one's."""
    python = directory / "bin" / "python"
    if python.exists():
        return python
    venv.create(directory, with_pip=True)
    own = Path(sysconfig.get_paths(vars={"base": str(directory), "platbase": str(directory)})["purelib"])
    (own / "tests.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    index = ["--index-url", torch_index] if torch_index and packages[0].startswith("torch") else []
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", *packages, *index]
    subprocess.run(command, cwd=ROOT, check=True)
    return python


def run_tests(python: Path, log: Path, tests: list[str]) -> tuple[str, str, float]:
    """Return the versions of an environment, pytest's last line, and the seconds that the tests took."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    versions = subprocess.run([python, "-c", VERSIONS], cwd="/", env=environment, capture_output=True, text=True)
    if versions.returncode:
        log.write_text(versions.stdout + versions.stderr)
        return "does not import", versions.stderr.strip().splitlines()[-1], 0.0
    started = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    lines = log.read_text().splitlines()
    failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in lines if line.startswith("FAILED ")]
    last = re.sub(r" in [0-9.]+s.*", "", lines[-1].strip("= "))
    return versions.stdout.split("\n")[-2], "; ".join([last, *failed]), time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENVIRONMENTS)} (default: all)")
    parser.add_argument("--directory", type=Path, default=ROOT / ".venv" / "matrix", help="of environments and logs")
    parser.add_argument("--torch-index", help="index of builds of torch; PyPI's for Linux have CUDA and gigabytes")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="an environment that exists")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="other tests than those of the table")
    args = parser.parse_args()
    unknown = set(args.names) - set(ENVIRONMENTS)
    if unknown:
        parser.error(f"no environment is called {', '.join(sorted(unknown))}")
    pythons = {name: Path(path).absolute() for name, _, path in (word.partition("=") for word in args.python)}
    rows, failed = [], False
    for name in args.names or ([] if pythons else ENVIRONMENTS):
        packages = ENVIRONMENTS[name]
        if packages[0].startswith("torch") and sys.platform == "linux" and not args.torch_index:
            rows.append(f"| {name} | | | | | not tried: without TORCH_INDEX= it is a download of gigabytes | |")
            continue
        pythons[name] = make_environment(args.directory.absolute() / name, packages, args.torch_index)
    args.directory.mkdir(parents=True, exist_ok=True)
    for name, python in pythons.items():
        print(f"# {name}: {args.directory / name}.log", flush=True)
        versions, result, seconds = run_tests(python, args.directory / f"{name}.log", args.tests)
        failed = failed or "failed" in result or "error" in result or not seconds
        rows.append(f"| {name} | {' | '.join(versions.split())} | {result} | {seconds / 60:.0f} min |")
    print(f"\n{date.today()}, Python {sys.version.split()[0]}\n")
    print("| environment | torch | transformers | DeepSpeed | triton | result | time |\n|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
