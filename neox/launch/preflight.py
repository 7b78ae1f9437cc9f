"""What must exist before ranks are worth starting: found on the head node, named with the command that makes it."""

from __future__ import annotations

from pathlib import Path

from neox.config import NeoXConfig


def data_prefixes(config: NeoXConfig) -> dict[str, str]:
    """Token files of a configuration: prefix -> the key that names it."""
    data = config.data
    prefixes = {data.data_path: "data_path"} if data.data_path else {}
    for key in ("train_data_paths", "valid_data_paths", "test_data_paths"):
        prefixes.update(dict.fromkeys(getattr(data, key) or (), key))
    return prefixes


def missing_data(config: NeoXConfig) -> list[str]:
    """One sentence for each `.bin/.idx` that training needs and that is not there."""
    prefixes = data_prefixes(config)
    if not prefixes:
        return [
            "no training data is given: set data_path to the prefix of a .bin/.idx pair "
            "(tools/preprocess_data.py writes them)"
        ]
    problems = []
    for prefix, key in prefixes.items():
        absent = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
        if absent:
            made = prefix.removesuffix("_document").removesuffix("_text")
            problems.append(
                f"{config.source(key)}: {key} is {prefix!r}, but {' and '.join(prefix + s for s in absent)} "
                f"{'does' if len(absent) == 1 else 'do'} not exist; make them with "
                f"`python tools/preprocess_data.py --input FILE.jsonl.zst --output-prefix {made} ...`"
            )
    return problems
