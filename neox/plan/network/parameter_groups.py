"""Groups of parameters by name: `parameter_groups` applied to the layer plan, and their lines in the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from neox.architecture import VOCABULARY, LayerEntry, LayerPlan, ParameterSpec
from neox.config.neox_config import NeoXConfig
from neox.config.sections.optimizer import ParameterGroup
from neox.config.sections.optimizer_kind import DecayingParams
from neox.errors import ConfigError
from neox.problems import Problem

_KEY = "parameter_groups"


@dataclass
class GroupMembers:
    """What a group of `parameter_groups` matches in a layer plan. Copies of shared parameters are not counted.

    Attributes:
        group: The group.
        matched: Parameters whose names match.
        taken: Those of them that belong to the group, because no earlier one matches.
        updated: Those of these that are trained without the group.
        elements: Elements of the parameters that belong to the group.
    """

    group: ParameterGroup
    matched: int = 0
    taken: int = 0
    updated: int = 0
    elements: int = 0


def with_parameter_groups(layers: LayerPlan, config: NeoXConfig) -> LayerPlan:
    """Return the layers with what `parameter_groups` says of their parameters.

    Raises:
        ConfigError: A group has no parameters, or nothing is left to train.
    """
    groups = config.optimizer.parameter_groups
    if not groups:
        return layers
    problems = list(_problems(layers, config))
    if problems:
        raise ConfigError(problems)
    changed = []
    for layer in layers:
        specs = []
        for spec in layer.parameters:
            number = _group_number(groups, layer, spec)
            specs.append(spec if number is None else _in_group(spec, groups[number]))
        changed.append(replace(layer, parameters=tuple(specs)))
    result = replace(layers, layers=tuple(changed))
    if not result.trained_numel:
        raise ConfigError(config.problem_about(f"`{_KEY}` leaves nothing to train; unfreeze a group", _KEY))
    _check_hidden_matrices(layers, result, config)
    return result


def with_trained_rows(layers: LayerPlan, *, first: int, number: int) -> LayerPlan:
    """Return the layers with some rows of the vocabulary trained, and everything else frozen.

    Weight decay acts on whole parameters, so these have none: rows without gradients stay as they are.

    Args:
        layers: The layers.
        first: First trained row of the embedding and the head.
        number: Number of trained rows.
    """
    changed = []
    for layer in layers:
        specs = []
        for spec in layer.parameters:
            if spec.name in VOCABULARY:
                specs.append(replace(spec, trained_rows=(first, number), weight_decay=0.0))
            else:
                specs.append(replace(spec, trained=False))
        changed.append(replace(layer, parameters=tuple(specs)))
    return replace(layers, layers=tuple(changed))


def group_lines(layers: LayerPlan, config: NeoXConfig) -> Iterator[str]:
    """Yield a line for each group, and one for the parameters that belong to none; nothing without groups."""
    groups = config.optimizer.parameter_groups
    if not groups:
        return
    rest = layers.numel
    for members in group_members(layers, groups):
        rest -= members.elements
        tensors = "1 tensor" if members.taken == 1 else f"{members.taken:,} tensors"
        yield f"{members.group.match}: {members.elements:,} parameters in {tensors}, {_in_words(members.group)}"
    yield f"{rest:,} parameters in no group"


def group_members(layers: LayerPlan, groups: Sequence[ParameterGroup]) -> list[GroupMembers]:
    """Return what each group matches. A parameter belongs to the first group that matches it."""
    found = [GroupMembers(group) for group in groups]
    for layer in layers:
        for spec in layer.parameters:
            if spec.shared_with is not None:
                continue
            for members in found:
                members.matched += _matches(members.group.match, layer.index, spec.name)
            number = _group_number(groups, layer, spec)
            if number is not None:
                found[number].taken += 1
                found[number].updated += spec.trained
                found[number].elements += spec.numel
    return found


def static_group_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield what is wrong with groups whatever the network is."""
    kind = config.optimizer.optimizer
    for number, group in enumerate(config.optimizer.parameter_groups):
        if group.frozen and (group.lr_factor != 1.0 or group.weight_decay is not None):
            yield _problem(config, number, "is frozen, so that lr_factor and weight_decay have no effect; remove them")
        elif group.weight_decay and not isinstance(kind.params, DecayingParams):
            rule = f"has weight_decay, which {kind.kind.names[0]} does not know; remove it, or use another optimizer"
            yield _problem(config, number, rule, "optimizer.type")


def _problems(layers: LayerPlan, config: NeoXConfig) -> Iterator[Problem]:
    """Yield the groups without effect."""
    for number, members in enumerate(group_members(layers, config.optimizer.parameter_groups)):
        match = members.group.match
        if not members.matched:
            yield _problem(config, number, f"matches no parameter: {match}; {_names_like(match, layers)}")
        elif not members.taken:
            rule = f"({match}) matches only parameters that belong to earlier groups: the first match counts"
            yield _problem(config, number, f"{rule}; move it up, or remove it")
        elif not members.updated:
            freezing = "lora" if config.training.lora is not None else "soft_prompt_tuning"
            rule = f"({match}) matches only parameters that `{freezing}` freezes; remove it"
            yield _problem(config, number, rule, freezing)


def _problem(config: NeoXConfig, number: int, rule: str, *others: str) -> Problem:
    """Return the problem of a group. `rule` is the rest of a sentence that begins with it."""
    return config.problem_about(f"`{_KEY}`: item {number} {rule}", f"{_KEY}.{number}", *others)


def _names_like(match: str, layers: LayerPlan) -> str:
    """Return advice with names that a group may have meant."""
    names = sorted({spec.name for spec in layers.parameters})
    near = get_close_matches(match, names, n=3, cutoff=0.4)
    return f"names are such as {', '.join(near or names[:3])}"


def _group_number(groups: Sequence[ParameterGroup], layer: LayerEntry, spec: ParameterSpec) -> int | None:
    """Return the number of the first group that matches a parameter, or its owner's name; None for none."""
    owner = layer.index if spec.shared_with is None else spec.shared_with
    for number, group in enumerate(groups):
        if _matches(group.match, owner, spec.name):
            return number
    return None


def _matches(pattern: str, layer: int, name: str) -> bool:
    """Return whether a pattern matches a parameter's name in its layer, or that with the layer's number in front."""
    return fnmatchcase(name, pattern) or fnmatchcase(f"{layer}.{name}", pattern)


def _in_group(spec: ParameterSpec, group: ParameterGroup) -> ParameterSpec:
    """Return a parameter as a member of a group."""
    return replace(
        spec,
        trained=spec.trained and not group.frozen,
        lr_factor=group.lr_factor,
        weight_decay=group.weight_decay,
    )


def _in_words(group: ParameterGroup) -> str:
    """Return what a group changes."""
    if group.frozen:
        return "frozen"
    changes = []
    if group.lr_factor != 1.0:
        changes.append(f"learning rate x {group.lr_factor:g}")
    if group.weight_decay is not None:
        changes.append(f"weight decay {group.weight_decay:g}")
    return " and ".join(changes) or "as without groups"


def _check_hidden_matrices(before: LayerPlan, after: LayerPlan, config: NeoXConfig) -> None:
    """Raise ConfigError if an optimizer for the matrices of blocks has none left."""
    if not config.optimizer.optimizer.kind.hidden_apart:
        return
    if _trains_hidden(before) and not _trains_hidden(after):
        rule = f"updates matrices of blocks, all of which `{_KEY}` freezes; use Adam, which has the rest"
        raise ConfigError(config.problem("optimizer.type", rule, _KEY))


def _trains_hidden(layers: LayerPlan) -> bool:
    """Return whether a matrix between hidden states is trained."""
    hidden = []
    for layer in layers:
        hidden += [spec for spec in layer.parameters if layer.is_hidden(spec)]
    return any(spec.trained for spec in hidden)
