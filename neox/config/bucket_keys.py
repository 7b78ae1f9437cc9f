"""Remote addresses in the key `save`, which set a local directory and `checkpoint_mirror`."""

from __future__ import annotations

from neox.config.flat import FlatKeys
from neox.storage import CHECKPOINT_SAVES, cache_folder, why_not_writable

_MIRROR_KEYS = ("checkpoint_mirror", "s3_path")


def convert_save_address(keys: FlatKeys) -> None:
    """Replace `save: s3://bucket/run` by a local directory, and set `checkpoint_mirror` to the address."""
    address = keys.values.get("save")
    if not isinstance(address, str) or "://" not in address:
        return
    reason = why_not_writable(address)
    if reason is not None:
        keys.report(f"`save: {address}` {reason}, or a local directory", "save")
        return
    for name in _MIRROR_KEYS:
        mirror = keys.values.get(name)
        if mirror is not None and str(mirror).rstrip("/") != address.rstrip("/"):
            message = f"`save: {address}` and `{name}: {mirror}` are different addresses, but a run has only one mirror"
            keys.report(f"{message}; set `save` to a local directory, or remove {name}", "save", name)
            return
    keys.values["save"] = str(cache_folder(address, CHECKPOINT_SAVES))
    if "s3_path" not in keys.values:
        keys.values["checkpoint_mirror"] = address
        keys.sources.setdefault("checkpoint_mirror", keys.source("save"))
