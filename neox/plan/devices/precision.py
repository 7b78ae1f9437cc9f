"""Precision of a run: one number format from the keys that may name it, and from what the hosts can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from neox.config.decision import NOTHING, Decided, Decision
from neox.config.neox_config import NeoXConfig
from neox.devices import DeviceFamily
from neox.problems import Note, Problem

Precision = Literal["fp32", "fp16", "bf16"]
BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "fp16": 2, "bf16": 2})
"""Bytes of a number by its format."""


@dataclass(frozen=True)
class Capabilities:
    """What a plan depends on besides its configuration.

    Attributes:
        bf16: Whether every host multiplies bf16 natively; None if no host was asked.
        fp16: Whether every host multiplies fp16 natively; None if no host was asked.
        fp8: Whether every GPU multiplies fp8; None if no host was asked, or for CPUs.
        fp8_experts: Whether every GPU has one kernel for the products of all experts in fp8; None as for `fp8`.
        devices: Names of the devices that were asked, for messages.
        bf16_is_slow: Whether a host has a CPU that multiplies bf16 natively, but trains slower in it than in fp32.
        family: Kind of the devices; None if no host was asked, or they differ.
        saved: Precision of the checkpoint that the run resumes or runs; None without one.
    """

    bf16: bool | None = None
    fp16: bool | None = None
    fp8: bool | None = None
    fp8_experts: bool | None = None
    devices: str = "the hosts"
    bf16_is_slow: bool = False
    family: DeviceFamily | None = None
    saved: Precision | None = None

    @staticmethod
    def of_hosts(answers: Sequence[Mapping[str, Any]]) -> Capabilities:
        """Return what every host multiplies natively.

        Args:
            answers: `neox.launch.hosts.machine.native_formats` of each host.
        """
        kinds = "/".join(sorted({str(answer["devices"]) for answer in answers}))
        owner = "this host's"
        if len(answers) > 1:
            owner = f"the {len(answers)} hosts'"
        families = {answer.get("family") for answer in answers}
        return Capabilities(
            bf16=_every(answers, "bf16"),
            fp16=_every(answers, "fp16"),
            fp8=_every(answers, "fp8"),
            fp8_experts=_every(answers, "fp8_experts"),
            devices=f"{owner} {kinds}",
            bf16_is_slow=any(answer.get("bf16_is_slow") for answer in answers),
            family=families.pop() if len(families) == 1 else None,
        )


def _every(answers: Sequence[Mapping[str, Any]], name: str) -> bool | None:
    """Return whether all hosts can; None if that is not known of all, and no host is known not to."""
    known = {answer.get(name) for answer in answers}
    if False in known:
        return False
    if None in known or not known:
        return None
    return True


UNKNOWN_HOSTS = Capabilities()
PRECISION_KEYS = ("precision", "fp16", "bf16")
"""Keys that name the precision of a run."""


def decide_precision(config: NeoXConfig, capabilities: Capabilities) -> Decided:
    """Decide the number format of `precision: auto`. A note says if a host emulates the one that was asked for.

    Args:
        config: The configuration. Contradictions in it are left to the rules.
        capabilities: What the hosts multiply natively, and the precision of the checkpoint that the run resumes from.
    """
    precision = choose_precision(config, [])
    if precision is None:
        return NOTHING
    if config.model.precision != "auto":
        return Decided(notes=tuple(_emulation_notes(config, precision, capabilities)))
    chosen, reason = _automatic_precision(capabilities)
    source = config.source("precision")
    why = f"`precision: auto` ({source}) is {chosen}: {reason}"
    return Decided((Decision("precision", chosen, why, source.derived("auto")),), (why,))


def _automatic_precision(known: Capabilities) -> tuple[Precision, str]:
    """Return the number format that `auto` means, and why."""
    if known.saved is not None:
        reason = "as in the checkpoint"
        if known.saved == "bf16" and known.bf16 is False:
            reason += f", though it is emulated in software on {known.devices}"
        return known.saved, reason
    if known.bf16 is None:
        return "bf16", "no host was asked, so native bf16 is assumed"
    if not known.bf16:
        return "fp32", f"bf16 is not native on {known.devices}"
    if known.bf16_is_slow:
        return "fp32", f"faster than bf16 on {known.devices}, which has AVX512-BF16 without AMX"
    return "bf16", f"native on {known.devices}"


def _emulation_notes(config: NeoXConfig, precision: Precision, known: Capabilities) -> list[str]:
    """Return a note if a host emulates the precision that was asked for."""
    is_native: Mapping[Precision, bool | None] = {"bf16": known.bf16, "fp16": known.fp16}
    if is_native.get(precision) is not False:
        return []
    asked = next((key for key in ("precision", "bf16", "fp16") if config.given(key)), "precision")
    emulated = f"{precision} is emulated in software on {known.devices}, which is slower than fp32"
    note = Note((asked,), f"{emulated}; `precision: auto` chooses fp32 there", config.source(asked))
    return [str(note)]


def choose_precision(config: NeoXConfig, problems: list[Problem]) -> Precision | None:
    """Return the number format that `precision`, `fp16` and `bf16` name; fp32 for `auto`, which is not settled yet.

    Args:
        config: The configuration.
        problems: Takes the problem of a contradiction. The answer is None then.
    """
    claims = _claims(config)
    named = set(claims.values())
    if len(named) > 1:
        claimed = ", ".join(f"`{key}` ({config.source(key)}) says {value}" for key, value in claims.items())
        latest_first = reversed(claims)
        problems.append(config.problem_about(f"two precisions: {claimed}; keep one", *latest_first))
        return None
    if "fp16" in named:
        return "fp16"
    if "bf16" in named:
        return "bf16"
    return "fp32"


def _claims(config: NeoXConfig) -> dict[str, str]:
    """Return the number format that each key names: fp32, fp16, bf16 or auto."""
    claims: dict[str, str] = {}
    if config.model.precision == "bfloat16":
        claims["precision"] = "bf16"
    elif config.model.precision is not None:
        claims["precision"] = config.model.precision
    fp16 = config.deepspeed.fp16
    if fp16 is not None:
        is_enabled = fp16.fp16 if fp16.enabled is None else fp16.enabled
        if fp16.type in ("bfloat16", "bf16"):
            claims["fp16"] = "bf16"
        elif is_enabled or (is_enabled is None and fp16.type == "fp16"):
            claims["fp16"] = "fp16"
        elif is_enabled is False and claims.get("precision") == "fp16":
            claims["fp16"] = "fp32"
    if config.deepspeed.bf16 is not None and config.deepspeed.bf16.enabled:
        claims["bf16"] = "bf16"
    return claims
