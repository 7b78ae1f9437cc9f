"""Checksums (CRC-32) of files from those of their blocks, as zlib's `crc32_combine` computes them."""

from __future__ import annotations

from collections.abc import Sequence

_POLYNOMIAL = 0xEDB88320

Matrix = tuple[int, ...]
"""32 columns of a matrix over the numbers 0 and 1, each as the bits of an integer."""


class CrcJoiner:
    """Joins checksums of blocks of one length.

    Args:
        length: Bytes of a block.
    """

    def __init__(self, length: int) -> None:
        self._shift = _zeros(length)

    def join(self, blocks: Sequence[int], last: int, last_length: int) -> int:
        """Return the checksum of a file.

        Args:
            blocks: Checksums of its blocks but the last.
            last: Checksum of the last block.
            last_length: Bytes of the last block.
        """
        joined = 0
        for crc in blocks:
            joined = _times(self._shift, joined) ^ crc
        return _times(_zeros(last_length), joined) ^ last


def _zeros(length: int) -> Matrix:
    """Return the matrix that changes a checksum as `length` zero bytes do."""
    bits = [_POLYNOMIAL, *(1 << number for number in range(31))]  # one zero bit
    power = tuple(bits)
    for _ in range(3):
        power = _product(power, power)  # one zero byte
    result = tuple(1 << number for number in range(32))
    while length:
        if length & 1:
            result = _product(power, result)
        power = _product(power, power)
        length >>= 1
    return result


def _times(matrix: Matrix, vector: int) -> int:
    """Return the product of a matrix and a vector."""
    total = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            total ^= column
        vector >>= 1
    return total


def _product(left: Matrix, right: Matrix) -> Matrix:
    """Return the product of two matrices."""
    return tuple(_times(left, column) for column in right)
