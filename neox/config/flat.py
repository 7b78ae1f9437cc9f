"""Operations on flat keys: spelling, nested blocks, aliases, and the problems found in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

import neox
from neox.config.keys import ACTIVATION_KEYS, ALIASES, NEOX_KEYS, UNSUPPORTED_IN_BLOCKS
from neox.problems import CODE, COMMAND_LINE, Problem, Source

# Later gpt-neox hands this block to DeepSpeed as it is; here its keys are checked like all others.
EXTRA_ARGS = "deepspeed_extra_args"
ACTIVATION_BLOCK = "activation_checkpointing"
VIRTUAL_STAGES_OF_RANK = "num_virtual_stages_per_pipeline_rank"
LAYERS_OF_VIRTUAL_STAGE = "num_layers_per_virtual_pipeline_stage"
_OF_DEEPSPEED = frozenset(
    {
        *(key for key, row in NEOX_KEYS.items() if row.section == "deepspeed"),
        *("bfloat16", "optimizer", "scheduler"),
    }
)
_NOT_DERIVED = ("optimizer.type", "optimizer.params.lr", "scheduler.type", "scheduler.params.warmup_num_steps")
"""Settings of DeepSpeed that only the user knows."""


class FlatKeys:
    """Flat keys on their way into sections, with the source of each and the problems found so far.

    Args:
        values: Key -> value.
        sources: Key, or dotted path inside a block -> source.

    Attributes:
        values: Key -> value. Methods change it in place.
        sources: Key, or dotted path inside a block -> source.
        problems: Problems found so far.
    """

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, Source]) -> None:
        self.values = dict(values)
        self.sources = dict(sources)
        self.problems: list[Problem] = []

    @classmethod
    def normalised(cls, values: Mapping[str, Any], sources: Mapping[str, Source]) -> FlatKeys:
        """Return keys spelled with `_`, without unset (None) ones; a key given in both spellings is a problem."""
        flat = cls({}, sources)
        for written, value in values.items():
            key = written.replace("-", "_")
            if key in flat.values:
                flat.report(f"`{key}` is given twice (`-` and `_` are the same); remove one", key)
            if value is not None:
                flat.values[key] = value
        return flat

    def source(self, path: str) -> Source:
        """Return the source of a dotted path: its own, that of the nearest block around it, or of a key inside it."""
        around = path
        while around not in self.sources and "." in around:
            around = around.rpartition(".")[0]
        if around in self.sources:
            return self.sources[around]
        for dotted, source in self.sources.items():
            if dotted.startswith(f"{path}."):
                return source
        return CODE

    def report(self, message: str, *keys: str, source: Source | None = None) -> None:
        """Add a problem.

        Args:
            message: What is wrong and what to do.
            keys: Dotted paths that it depends on, the one to look at first.
            source: Where to look; the source of the first key if left out.
        """
        where = self.source(keys[0]) if source is None else source
        self.problems.append(Problem(keys, message, where))

    def spread_extra_args(self) -> None:
        """Move the keys inside `deepspeed_extra_args` to the top level; one that is there already is a problem."""
        block = self.values.get(EXTRA_ARGS)
        if not isinstance(block, Mapping):
            return
        del self.values[EXTRA_ARGS]
        for path in list(self.sources):
            if path.startswith(f"{EXTRA_ARGS}."):
                source = self.sources.pop(path)
                self.sources.setdefault(path.removeprefix(f"{EXTRA_ARGS}."), source)
        for key, value in block.items():
            if key in self.values:
                self.report(f"`{key}` is given twice, at the top level and in {EXTRA_ARGS}; keep the first", key)
            else:
                self.values[key] = value

    def leave_out_auto(self) -> None:
        """Leave out DeepSpeed's values `auto`: the plan derives what is absent.

        The Hugging Face Trainer fills `auto` in, and DeepSpeed's own blocks leave it out. `_NOT_DERIVED` follow from
        nothing here, and stay to be refused.
        """
        for key in [name for name in self.values if name in _OF_DEEPSPEED]:
            if self.values[key] == "auto":
                del self.values[key]
            elif isinstance(self.values[key], Mapping):
                self.values[key] = _without_auto(self.values[key], key)

    def spread_activation_checkpointing(self) -> None:
        """Replace DeepSpeed's block of this name by the flat keys that it stands for."""
        block = self.values.get(ACTIVATION_BLOCK)
        if not isinstance(block, Mapping):
            return
        del self.values[ACTIVATION_BLOCK]
        unsupported = {}
        for inner, value in block.items():
            path = f"{ACTIVATION_BLOCK}.{inner}"
            key = ACTIVATION_KEYS.get(inner)
            if path in UNSUPPORTED_IN_BLOCKS:
                unsupported[inner] = value
            elif key is None:
                self._report_unknown_activation_key(inner)
            elif self.values.setdefault(key, value) != value:
                other = f"`{key}: {self.values[key]}`"
                self.report(f"`{path}: {value}` contradicts {other}; remove one", path, key)
            elif path in self.sources:
                self.sources.setdefault(key, self.sources[path])
        if unsupported:
            self.values[ACTIVATION_BLOCK] = unsupported

    def _report_unknown_activation_key(self, inner: str) -> None:
        near = get_close_matches(inner, ACTIVATION_KEYS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(ACTIVATION_KEYS)}"
        self.report(f"`{ACTIVATION_BLOCK}` has no key `{inner}` here; {hint}", f"{ACTIVATION_BLOCK}.{inner}")

    def convert_virtual_stages(self) -> None:
        """Replace Megatron's keys of interleaved stages, which name no schedule, by `virtual_stages` and its schedule.

        `num_virtual_stages_per_pipeline_rank` is the number of ranges on a stage, and
        `num_layers_per_virtual_pipeline_stage` the number of blocks in a range.
        """
        for name in (VIRTUAL_STAGES_OF_RANK, LAYERS_OF_VIRTUAL_STAGE):
            if name not in self.values:
                continue
            given = self.values.pop(name)
            ranges = given
            if name == LAYERS_OF_VIRTUAL_STAGE:
                ranges = self._ranges_of_length(given)
            if not isinstance(ranges, int) or isinstance(ranges, bool) or ranges < 1:
                self.report(f"`{name}: {given}` does not divide the blocks of a stage; use `virtual_stages`", name)
                continue
            if ranges == 1:
                continue
            for key in ("pipeline_schedule", "virtual_stages"):
                self.sources.setdefault(key, self.source(name))
            self.values.setdefault("pipeline_schedule", "interleaved")
            if self.values.setdefault("virtual_stages", ranges) != ranges:
                other = f"`virtual_stages: {self.values['virtual_stages']}`"
                self.report(f"`{name}: {given}` contradicts {other}; remove one", name, "virtual_stages")

    def _ranges_of_length(self, blocks: Any) -> int | None:
        """Return the number of ranges of `blocks` blocks on each stage; None if they cannot be divided evenly."""
        numbers = (blocks, self.values.get("num_layers"), self.values.get("pipe_parallel_size", 1))
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            return None
        length, layers, stages = numbers
        if layers % (length * stages):
            return None
        return int(layers // (length * stages))

    def translate_aliases(self) -> None:
        """Replace aliases (`gas`, `zero_stage`, ...) by the keys that they stand for.

        A contradiction is a problem, and so is a name of ours that is no longer read.
        """
        for name in [key for key in self.values if key in ALIASES]:
            alias = ALIASES[name]
            given = self.values.pop(name)
            if alias.is_over(neox.__version__):
                self.report(
                    f"`{name}` has been called `{alias.target}` since version {alias.renamed_in}; rename it", name
                )
                continue
            agreeing = alias.agreeing(given)
            present, value = look_up(self.values, alias.target)
            if not agreeing or (present and value in agreeing):
                continue
            if not present:
                _put(self.values, alias.target, agreeing[0])
                continue
            other = f"`{alias.target}: {value}` ({self.sources.get(alias.target, 'given')})"
            advice = "so remove one"
            if self.sources.get(name) == COMMAND_LINE:
                advice = f"which `--set {alias.target}={given}` changes"
            message = f"`{name}: {given}` contradicts {other}; they are one setting, {advice}"
            self.report(message, name, alias.target)


def _without_auto(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a block without the values `auto`, at any depth.

    Args:
        block: The block.
        path: Its dotted path.
    """
    rest: dict[str, Any] = {}
    for name, value in block.items():
        inside = f"{path}.{name}"
        if isinstance(value, Mapping):
            rest[name] = _without_auto(value, inside)
        elif value != "auto" or inside in _NOT_DERIVED:
            rest[name] = value
    return rest


def without(flat: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """Return flat keys without some dotted paths."""
    rest: dict[str, Any] = {}
    for key, value in flat.items():
        if key in paths:
            continue
        inner = [path.removeprefix(f"{key}.") for path in paths if path.startswith(f"{key}.")]
        if not inner:
            rest[key] = value
        elif isinstance(value, Mapping):
            rest[key] = without(value, inner)
    return rest


def look_up(flat: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Return whether a dotted path is present, and its value. A block of a wrong type counts as absent.

    A number in the path is an item of a list.
    """
    value: Any = flat
    for part in path.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return False, None
    return True, value


def _put(flat: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path, copying blocks on the way; a block of a wrong type is left for validation to refuse."""
    *blocks, last = path.split(".")
    block = flat
    for name in blocks:
        inner = block.get(name, {})
        if not isinstance(inner, Mapping):
            return
        block[name] = dict(inner)
        block = block[name]
    block[last] = value
