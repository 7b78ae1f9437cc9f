"""Every layout of up to four ranks loads what every other saved; the long form of test_reshard.

`benchmarks/resume_pairs.py` does the same with 20 steps after each load, which takes three times as long.
"""

from __future__ import annotations

import pytest

from benchmarks.resume_pairs import LIMIT, run


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_pairs(tmp_path):
    found = run([1, 2, 3, 4], 5, tmp_path)
    assert len(found) == 42**2
    assert max(found.values()) <= LIMIT, {pair: value for pair, value in found.items() if value > LIMIT}
