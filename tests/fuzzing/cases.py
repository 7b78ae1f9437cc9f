"""Random cases: a model and its training, in a layout, against one rank. A case is data; drawing is seeded."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import RunPlan, resolve
from tests.fuzzing.settings import BASE, LAYOUTS, MODELS, TRAINING, Setting

VOCABULARY = 512
"""Ids of the tokenizer of characters."""
_MOST_TRAINING = 4  # settings of a case, so that a find can be laid to few
_MOST_LAYOUT = 4
_TRIES = 60
_SHAPES = ("stages", "tensor", "context", "experts", "zero")


class PlanError(Exception):
    """A configuration that the plan neither accepts nor refuses; the cause says why."""


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        model: Settings of the model and its training, in both runs.
        layout: Settings of the run that is compared, which must not change the numbers.
        resumed: Settings of its second half, which resumes from its checkpoint in the middle.
        world: Ranks of the compared run.
        resumed_world: Ranks of the second half.
    """

    model: tuple[Setting, ...]
    layout: tuple[Setting, ...]
    resumed: tuple[Setting, ...]
    world: int
    resumed_world: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all settings, those of the resumed half marked."""
        resumed = [f"resumed {setting.name}" for setting in self.resumed]
        return (*(setting.name for setting in (*self.model, *self.layout)), *resumed)

    def reference_keys(self) -> dict[str, Any]:
        """Keys of the undisturbed run on one rank."""
        return merged(self.model)

    def layout_keys(self) -> dict[str, Any]:
        """Keys of the compared run."""
        return merged((*self.model, *self.layout))

    def resumed_keys(self) -> dict[str, Any]:
        """Keys of its second half."""
        return merged((*self.model, *self.resumed))

    def without(self, setting: Setting) -> Case:
        """Return the case without one setting, wherever it stands."""
        rest = {
            name: tuple(one for one in getattr(self, name) if one != setting) for name in ("model", "layout", "resumed")
        }
        return replace(self, **rest)

    def to_json(self) -> str:
        """Return the case as text, from which `named` makes it again."""
        parts = {name: [setting.name for setting in getattr(self, name)] for name in ("model", "layout", "resumed")}
        return json.dumps({**parts, "world": self.world, "resumed_world": self.resumed_world})


def named(text: str) -> Case:
    """Return the case that `Case.to_json` wrote."""
    by_name = {setting.name: setting for setting in (*MODELS, *TRAINING, *LAYOUTS)}
    read = json.loads(text)
    parts = {name: tuple(by_name[one] for one in read[name]) for name in ("model", "layout", "resumed")}
    return Case(**parts, world=read["world"], resumed_world=read["resumed_world"])


def merged(settings: Iterable[Setting]) -> dict[str, Any]:
    """Return the flat keys of a small model with these settings; a dotted key goes into its block."""
    keys = deepcopy(BASE)
    for setting in settings:
        for key, value in setting.keys.items():
            block, _, inner = key.partition(".")
            if inner:
                keys[block] = {**keys.get(block, {}), inner: value}
            else:
                keys[key] = deepcopy(value)
    return keys


def plan_of(keys: dict[str, Any], world: int) -> RunPlan:
    """Resolve flat keys. Raises ConfigError if the plan refuses them."""
    return resolve(NeoXConfig.from_flat(keys), world, VOCABULARY)


def is_planned(keys: dict[str, Any], world: int) -> bool:
    """Return whether the plan accepts flat keys.

    Raises:
        PlanError: The plan neither accepts nor refuses them.
    """
    try:
        plan_of(keys, world)
    except ConfigError:
        return False
    except Exception as error:
        raise PlanError(f"{world} ranks, {keys}") from error
    return True


def is_accepted(case: Case) -> bool:
    """Return whether the plan accepts all runs of a case."""
    runs = ((case.reference_keys(), 1), (case.layout_keys(), case.world), (case.resumed_keys(), case.resumed_world))
    return all(is_planned(keys, world) for keys, world in runs)


def draw(random_numbers: random.Random) -> Case:
    """Draw a case that the plan accepts: settings are drawn one by one, and those that are refused are left out."""
    while True:
        world = random_numbers.choice((2, 2, 2, 3, 4))
        case = Case((), (), (), world, random_numbers.choice((1, 2, world)))
        if random_numbers.random() < 0.8:
            case = replace(case, model=(random_numbers.choice(MODELS),))
        case = _extended(case, "model", TRAINING, random_numbers.randint(0, _MOST_TRAINING), random_numbers)
        for part in ("layout", "resumed"):
            number = random_numbers.randint(part == "layout", _MOST_LAYOUT)
            shapes = [setting for setting in LAYOUTS if setting.group in _SHAPES]
            case = _extended(case, part, shapes, random_numbers.randint(0, min(2, number)), random_numbers)
            case = _extended(case, part, LAYOUTS, number, random_numbers)
        if is_accepted(case) and is_comparable(case):
            return case


def is_comparable(case: Case) -> bool:
    """Return whether a layout must not change the numbers of a case.

    A loss is the mean over the labels of each micro batch, so that larger ones weigh labels differently unless all have
    equally many. Routing and balance losses of experts are those of a micro batch, too.
    """
    names = {setting.name for setting in case.model}
    keys = case.reference_keys()
    if not any(setting.group == "micro batch" for setting in (*case.layout, *case.resumed)):
        return True
    if keys.get("moe_num_experts", 1) > 1 or names & {"labels", "ramp-up"}:
        return False
    return "loss by tokens" in names or not names & {"no loss at ends", "unpacked", "best fit"}


def _extended(case: Case, part: str, settings: Sequence[Setting], number: int, random_numbers: random.Random) -> Case:
    """Add settings to a part of a case while the plan accepts it."""
    world = case.resumed_world if part == "resumed" else case.world
    candidates = [setting for setting in settings if not setting.worlds or part == "model" or world in setting.worlds]
    random_numbers.shuffle(candidates)
    for setting in candidates[:_TRIES]:
        chosen: tuple[Setting, ...] = getattr(case, part)
        if len(chosen) - (part == "model") >= number:
            break
        if setting.group and any(one.group == setting.group for one in chosen):
            continue
        extended = replace(case, **{part: (*chosen, setting)})
        keys = {"model": extended.reference_keys, "layout": extended.layout_keys, "resumed": extended.resumed_keys}[
            part
        ]()
        if is_planned(keys, 1 if part == "model" else world):
            case = extended
    return case
