"""Remote addresses in the key `save`, which set a local directory and `checkpoint_mirror`."""

from __future__ import annotations

from neox.config.flat import FlatKeys
from neox.storage import CHECKPOINT_SAVES, WRITABLE_SCHEMES, cache_folder, named_checkpoint

_MIRROR_KEYS = ("checkpoint_mirror", "s3_path")


def convert_save_address(keys: FlatKeys) -> None:
    """Replace `save: s3://bucket/run` by a local directory, and set `checkpoint_mirror` to the address."""
    address = keys.values.get("save")
    if not isinstance(address, str) or "://" not in address:
        return
    scheme = address.partition("://")[0]
    if scheme not in WRITABLE_SCHEMES:
        known = " and ".join(f"{name}://" for name in WRITABLE_SCHEMES)
        keys.report(f"`save: {address}`: checkpoints can only be written to local directories and {known}", "save")
        return
    if named_checkpoint(address)[1] is not None:
        keys.report(f"`save: {address}` names one checkpoint; give the address of the directory around it", "save")
        return
    if cache_folder(address, "").parts[1:] == ():
        keys.report(f"`save: {address}` names no bucket", "save")
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
