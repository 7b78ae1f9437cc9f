"""Every key that the installed DeepSpeed reads of its JSON, found by asking DeepSpeed itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, get_args

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ValidationError

PROBE = "no_such_key"


class DeepSpeedKey(NamedTuple):
    """DeepSpeed's default of a key, and the bounds of its number if a pydantic model of DeepSpeed has the key."""

    default: Any = None
    bounds: tuple[Any, ...] = ()


class Recorder(dict[str, Any]):
    """A block that remembers which keys DeepSpeed asks it for, with the defaults."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.asked: dict[str, Any] = {}

    def __copy__(self) -> Recorder:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.asked[key] = default
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self


def deepspeed_keys() -> dict[str, DeepSpeedKey]:
    """Return the keys by their dotted paths, each block before its keys.

    DeepSpeed reads some blocks with pydantic models, which refuse an unknown key with their own name, and others key by
    key. A block in a block is read only if the outer one is on.
    """
    found: dict[str, DeepSpeedKey] = {}
    whole = Recorder({"train_batch_size": 1})
    config = DeepSpeedConfig(whole)
    waiting = dict(whole.asked)
    for name, default in config.pipeline.items():  # read in a loop over what is given
        waiting[f"pipeline.{name}"] = default
    while waiting:
        path = next(iter(waiting))
        found[path] = DeepSpeedKey(waiting.pop(path))
        model, asked = _contents(path)
        if model is not None:
            found |= _fields(path, model)
        for name, default in asked.items():
            waiting[f"{path}.{name}"] = default
    return found


def _contents(path: str) -> tuple[type[BaseModel] | None, dict[str, Any]]:
    """Return the model of the block at a path, or the keys that DeepSpeed asks it for; neither if it is no block."""
    block = Recorder({PROBE: 1})
    try:
        _read(path, block)
    except ValidationError as error:
        return _model_of(error), {}
    except Exception:  # such as a number that is a block now
        pass
    asked = block.asked
    if "enabled" in asked:
        block = Recorder({"enabled": True})
        with suppress(Exception):  # a block that is on may miss what belongs to it
            _read(path, block)
        asked = {**block.asked, **asked}
    return None, asked


def _read(path: str, block: dict[str, Any]) -> None:
    """Let DeepSpeed read a configuration that has only a block at a path, and the blocks around it."""
    *around, last = path.split(".")
    inner: dict[str, Any] = {last: block}
    for name in reversed(around):
        inner = {name: {"enabled": True, **inner}}
    DeepSpeedConfig({"train_batch_size": 1, **inner})


def _model_of(error: ValidationError) -> type[BaseModel] | None:
    """Return the model that has refused `PROBE`: the one that the error names, or one inside it."""
    for detail in error.errors():
        if detail["loc"][-1] == PROBE:
            model = next(cls for cls in _models(DeepSpeedConfigModel) if cls.__name__ == error.title)
            for name in detail["loc"][:-1]:
                model = next(iter(_inner_models(model.model_fields[str(name)].annotation)))
            return model
    return None


def _models(cls: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in cls.__subclasses__():
        yield model
        yield from _models(model)


def _inner_models(annotation: Any) -> Iterator[type[BaseModel]]:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def _fields(path: str, model: type[BaseModel]) -> dict[str, DeepSpeedKey]:
    """Return the fields of a model and of the models inside it, in both spellings, by dotted path."""
    found: dict[str, DeepSpeedKey] = {}
    for name, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True)
        for spelling in dict.fromkeys((name, info.alias or name)):
            inside = f"{path}.{spelling}"
            found[inside] = DeepSpeedKey(default, tuple(info.metadata))
            for kind in _inner_models(info.annotation):
                found |= _fields(inside, kind)
    return found
