"""Precision of a run: one number format from the keys that may name it, and from what the hosts can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from neox.config.neox_config import NeoXConfig
from neox.config.yaml_file import read_file
from neox.errors import ConfigError
from neox.problems import Note, Problem

Precision = Literal["fp32", "fp16", "bf16"]

_SAVED_CONFIG = "configs/config.yml"  # as `neox.checkpoint` writes it beside the weights


@dataclass(frozen=True)
class Capabilities:
    """What a plan depends on beside its configuration.

    Attributes:
        bf16: Whether every host multiplies bf16 natively; None where no host was asked.
        fp16: The same of fp16.
        fp8: Whether every GPU does; None for CPUs, too.
        devices: The devices that were asked, for messages.
        bf16_is_slow: Whether a host has a CPU that multiplies bf16 natively, but trains slower in it than in fp32.
        saved: Precision of the checkpoint that the run resumes or runs; None without one.
    """

    bf16: bool | None = None
    fp16: bool | None = None
    fp8: bool | None = None
    devices: str = "the hosts"
    bf16_is_slow: bool = False
    saved: Precision | None = None

    @staticmethod
    def of_hosts(answers: Sequence[Mapping[str, Any]]) -> Capabilities:
        """Return what every host multiplies natively.

        Args:
            answers: `neox.launch.machine.native_formats` of each host.
        """
        kinds = "/".join(sorted({str(answer["devices"]) for answer in answers}))
        owner = "this host's" if len(answers) == 1 else f"the {len(answers)} hosts'"
        return Capabilities(
            bf16=_every(answers, "bf16"),
            fp16=_every(answers, "fp16"),
            fp8=_every(answers, "fp8"),
            devices=f"{owner} {kinds}",
            bf16_is_slow=any(answer.get("bf16_is_slow") for answer in answers),
        )


def _every(answers: Sequence[Mapping[str, Any]], name: str) -> bool | None:
    """Return whether all hosts can; None where that is not known of all, and no host is known not to."""
    known = {answer.get(name) for answer in answers}
    return False if False in known else None if None in known or not known else True


UNKNOWN_HOSTS = Capabilities()
PRECISION_KEYS = ("precision", "fp16", "bf16")
"""Keys that name the precision of a run."""


def settle_precision(config: NeoXConfig, capabilities: Capabilities) -> tuple[NeoXConfig, list[str]]:
    """Replace `precision: auto` by a number format, and say which one and why.

    Args:
        config: May hold contradictions, and is then returned as it is.
        capabilities: What the hosts multiply natively, and the precision of the checkpoint that the run goes on from.

    Returns:
        The configuration, and notes for people.
    """
    precision, known = choose_precision(config, []), capabilities
    if config.model.precision != "auto" or precision is None:
        native: Mapping[str | None, bool | None] = {"bf16": known.bf16, "fp16": known.fp16}
        if native.get(precision) is not False:
            return config, []
        asked = next((key for key in ("precision", "bf16", "fp16") if config.given(key)), "precision")
        emulated = f"{precision} is emulated in software on {known.devices}, which is slower than fp32"
        note = Note((asked,), f"{emulated}; `precision: auto` chooses fp32 there", config.source(asked))
        return config, [str(note)]
    if known.saved is not None:
        chosen, why = known.saved, "as in the checkpoint"
        if known.saved == "bf16" and known.bf16 is False:
            why += f", though it is emulated in software on {known.devices}"
    elif known.bf16 is None:
        chosen, why = "bf16", "no host was asked, so native bf16 is assumed"
    elif known.bf16 and known.bf16_is_slow:
        chosen, why = "fp32", f"faster than bf16 on {known.devices}, which has AVX512-BF16 without AMX"
    elif known.bf16:
        chosen, why = "bf16", f"native on {known.devices}"
    else:
        chosen, why = "fp32", f"bf16 is not native on {known.devices}"
    source = config.source("precision")
    settled = config.updated({"precision": chosen}, source=source.derived("auto"))
    return settled, [f"`precision: auto` ({source}) is {chosen}: {why}"]


def choose_precision(config: NeoXConfig, problems: list[Problem]) -> Precision | None:
    """Return the number format that `precision`, `fp16` and `bf16` name; fp32 for `auto`, which is not settled yet.

    Args:
        config: The configuration.
        problems: A contradiction is appended here, and the answer is None.
    """
    claims: dict[str, str] = {}
    named = config.model.precision
    if named is not None:
        claims["precision"] = "bf16" if named == "bfloat16" else named
    fp16 = config.deepspeed.fp16
    if fp16 is not None:
        enabled = fp16.enabled if fp16.enabled is not None else fp16.fp16
        if fp16.type in ("bfloat16", "bf16"):
            claims["fp16"] = "bf16"
        elif enabled or (enabled is None and fp16.type == "fp16"):
            claims["fp16"] = "fp16"
        elif enabled is False and claims.get("precision") == "fp16":
            claims["fp16"] = "fp32"
    if config.deepspeed.bf16 is not None and config.deepspeed.bf16.enabled:
        claims["bf16"] = "bf16"
    if len(set(claims.values())) > 1:
        claimed = ", ".join(f"`{key}` ({config.source(key)}) says {value}" for key, value in claims.items())
        latest_first = reversed(claims)
        problems.append(config.problem_about(f"two precisions: {claimed}; keep one", *latest_first))
        return None
    claim = next(iter(claims.values()), "fp32")
    return "fp16" if claim == "fp16" else "bf16" if claim == "bf16" else "fp32"


def saved_precision(config: NeoXConfig, *, training: bool) -> Precision | None:
    """Return the precision of the checkpoint that a run goes on from, as the configuration beside it says.

    Args:
        config: Names the checkpoint by `load` and `iteration`; a run that does not train reads `save` without `load`.
        training: Whether the run trains; with `finetune` it takes the weights alone, in any precision.

    Returns:
        None where there is no checkpoint yet, or another program wrote it.
    """
    keys = config.checkpoint
    directory = keys.load if training or keys.load else keys.save
    if directory is None or (training and keys.finetune):
        return None
    checkpoint = newest_checkpoint(Path(directory)) if keys.iteration is None else None
    checkpoint = checkpoint or Path(directory, f"global_step{keys.iteration}")
    try:
        return choose_precision(NeoXConfig.from_flat(read_file(checkpoint / _SAVED_CONFIG).values), [])
    except ConfigError:
        return None


def newest_checkpoint(directory: Path) -> Path:
    """Return the checkpoint that `latest` names in a directory; the directory itself where it has none."""
    try:
        return directory / (directory / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return directory
