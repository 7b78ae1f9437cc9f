"""What directories and archives hold besides documents: named and counted by reason."""

from __future__ import annotations

import re

from neox.log import get_logger

_log = get_logger(__name__)
_MOST_NAMES = 3
_DESKTOP_FILE = re.compile(
    r"(^|/)__MACOSX(/|$)"  # macOS's zip: resource forks
    r"|(^|/)\._[^/]*$"  # the same in tar archives and on other file systems (AppleDouble)
    r"|(^|/)(\.DS_Store|\.localized|Icon\r|Thumbs\.db|ehthumbs\.db|desktop\.ini)$"
    r"|(^|/)\.(Spotlight-V100|Trashes|fseventsd|AppleDouble|ipynb_checkpoints|git|svn)(/|$)"
    r"|(^|/)(@eaDir|lost\+found|\$RECYCLE\.BIN|System Volume Information)(/|$)"
    r"|(^|/)(\.[^/]*\.sw[a-p]|#[^/]*#|\.#[^/]*|\.nfs[0-9a-f]+|~\$[^/]*|[^/]*~)$",  # vim, Emacs, NFS, Office
    re.IGNORECASE,
)


def is_desktop_file(name: str) -> bool:
    """Return whether a path is one of the files that macOS, Windows, file servers or editors put beside others."""
    return _DESKTOP_FILE.search(name) is not None


class LeftOut:
    """Entries of a directory or an archive that are no documents.

    Args:
        path: The directory or the archive, for the log line.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._names: dict[str, list[str]] = {}

    def takes(self, name: str, size: int = 1) -> bool:
        """Return whether a file may hold documents, and remember it if not."""
        if is_desktop_file(name):
            self.add("files of the operating system or an editor", name)
        elif size == 0:
            self.add("empty files", name)
        else:
            return True
        return False

    def add(self, reason: str, name: str) -> None:
        """Remember an entry that is not read."""
        self._names.setdefault(reason, []).append(name)

    def report(self) -> None:
        """Write a line that counts the entries by reason, if there are any."""
        counted = []
        for reason, names in self._names.items():
            listed = ", ".join(sorted(names)[:_MOST_NAMES])
            counted.append(f"{len(names)} {reason} ({listed}{', ...' if len(names) > _MOST_NAMES else ''})")
        if counted:
            _log.warning("%s: not read: %s", self._path, "; ".join(counted))
