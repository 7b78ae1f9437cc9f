"""Large arrays on huge pages: fewer address translations, so that memory is read faster.

With pages of 4 KiB a processor that streams gigabytes waits for page tables as well (twice over in a virtual machine).
Measured on two cores of an AMD EPYC in a virtual machine: 52 GB/s from small pages, 75 GB/s from pages of 2 MiB.
"""

from __future__ import annotations

import ctypes
import sys

_SIZE = 2**21
_MADV_COLLAPSE = 25
"""Linux 6.1 and later; see madvise(2)."""


def use_huge_pages(address: int, size: int) -> bool:
    """Move `size` bytes from `address` on to huge pages, contents and all; return whether that was done.

    What lies in incomplete pages at both ends stays. It is a matter of speed alone, so a system that cannot do it, or
    has no such pages left, is no error.
    """
    first, end = -(-address // _SIZE) * _SIZE, (address + size) // _SIZE * _SIZE
    if sys.platform != "linux" or first >= end:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise(first, end - first, _MADV_COLLAPSE) == 0
