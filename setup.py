"""Build of a wheel, which carries the scripts and configurations of the checkout in `neox/shipped`."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SCRIPTS = ("deepy.py", "train.py")
FOLDERS = ("tools", "configs")


class BuildWithScripts(build_py):
    """Build of the package with these files. An editable installation finds those of the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        root = Path(__file__).resolve().parent
        target = Path(self.build_lib) / "neox" / "shipped"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in SCRIPTS:
            shutil.copy2(root / name, target / name)
        for name in FOLDERS:
            shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


setup(cmdclass={"build_py": BuildWithScripts})
