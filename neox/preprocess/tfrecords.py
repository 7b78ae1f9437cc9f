"""BERT's pretraining data of Google and of Megatron (TFRecords) as token datasets, without TensorFlow.

A TFRecord file is a sequence of records: length (u64), masked CRC-32C of the length (u32), data, masked CRC-32C of the
data. The data are a protobuf message `tf.train.Example`: features by name, each a list of integers or floats. Read are
`input_ids`, `input_mask`, `segment_ids`, `masked_lm_positions`, `masked_lm_ids`, `masked_lm_weights` and
`next_sentence_labels`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from neox.corpus import BadInput, SkipBudget
from neox.data import IndexedDatasetBuilder, best_dtype
from neox.data.sidecar import Sidecar, write_sidecar
from neox.errors import DataError, needs_package, os_errors
from neox.log import progress
from neox.preprocess.settings import TokenizerSpec
from neox.resume import only_run

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_LARGEST = 1 << 28  # bytes of a record; more is a damaged length
_NEEDED = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types


class Pair(NamedTuple):
    """Sentences of a record, with their masked tokens put back.

    Attributes:
        parts: Ids of the first sentence and, if there is one, of the second.
        follows: Whether the second follows the first.
    """

    parts: tuple[np.ndarray, ...]
    follows: bool


def read_records(path: str | Path) -> Iterator[bytes | BadInput]:
    """Yield the data of a TFRecord file's records.

    A record whose checksum is wrong is a `BadInput`, and reading goes on; so is a file that ends inside a record, or
    a damaged length, after which nothing of it can be read.
    """
    with open(path, "rb") as file:
        number = 0
        while True:
            start, number = file.tell(), number + 1
            header = file.read(_LENGTH.size + _CHECKSUM.size)
            if not header:
                return
            if len(header) < _LENGTH.size + _CHECKSUM.size:
                yield BadInput(str(path), number, start, "the file ends inside a record; it is truncated")
                return
            (size,) = _LENGTH.unpack_from(header)
            if _CHECKSUM.unpack_from(header, _LENGTH.size)[0] != masked_crc(header[: _LENGTH.size]) or size > _LARGEST:
                yield BadInput(
                    str(path), number, start, "the length of the record is damaged, or this is no TFRecord file"
                )
                return
            data = _read_data(file, size)
            if data is None:
                yield BadInput(str(path), number, start, "the file ends inside a record; it is truncated")
                return
            content, checksum = data
            if checksum != masked_crc(content):
                yield BadInput(str(path), number, start, "the record's checksum is wrong; it is damaged")
            else:
                yield content


def _read_data(file: BinaryIO, size: int) -> tuple[bytes, int] | None:
    content, checksum = file.read(size), file.read(_CHECKSUM.size)
    if len(content) < size or len(checksum) < _CHECKSUM.size:
        return None
    return content, _CHECKSUM.unpack(checksum)[0]


def masked_crc(data: bytes) -> int:
    """Return TensorFlow's masked CRC-32C. Raises DataError if the package is missing."""
    with needs_package(DataError, "reading TFRecords", "google-crc32c", "requirements-corpus.txt"):
        import google_crc32c
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(data: bytes) -> dict[str, np.ndarray]:
    """Return the features of a `tf.train.Example` that are numbers: int64 or float32 [values].

    Raises:
        ValueError: If the data are no such message.
    """
    features: dict[str, np.ndarray] = {}
    for number, value in _fields(data):
        if number != 1 or not isinstance(value, bytes):
            continue
        for _, entry in _fields(value):
            if not isinstance(entry, bytes):
                raise ValueError("a feature is no message")
            pair = dict(_fields(entry))
            name, feature = pair.get(1, b""), pair.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise ValueError("a feature has no name")
            for kind, values in _fields(feature):  # 1 bytes, 2 floats, 3 integers
                if kind in (2, 3) and isinstance(values, bytes):
                    features[name.decode()] = _floats(values) if kind == 2 else _integers(values)
    return features


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message: number, and integer or bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == _BYTES:
            size, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} does not exist")
        if position + size > len(data):
            raise ValueError("it ends inside a field")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("a number does not end")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def _integers(data: bytes) -> np.ndarray:
    """Return an `Int64List`, packed or not."""
    values: list[int] = []
    for _, field in _fields(data):
        if isinstance(field, int):
            values.append(field)
            continue
        position = 0
        while position < len(field):
            value, position = _varint(field, position)
            values.append(value)
    return np.array(values, dtype=np.uint64).astype(np.int64)


def _floats(data: bytes) -> np.ndarray:
    """Return a `FloatList`, packed or not."""
    packed = b"".join(field for _, field in _fields(data) if isinstance(field, bytes))
    return np.frombuffer(packed, dtype="<f4")


def read_pair(features: dict[str, np.ndarray]) -> Pair:
    """Return the sentences of a record's features.

    Raises:
        ValueError: If features are missing, or do not fit together.
    """
    if missing := [name for name in _NEEDED if name not in features]:
        raise ValueError(f"it has no {', '.join(missing)}: it is no example of BERT's pretraining")
    tokens, segments = features["input_ids"].copy(), features["segment_ids"]
    length = int(features["input_mask"].sum())
    positions, ids = features["masked_lm_positions"], features["masked_lm_ids"]
    weights = features.get("masked_lm_weights", np.ones(len(positions), np.float32))
    if not len(positions) == len(ids) == len(weights) or not 2 < length <= len(tokens) or len(segments) < length:
        raise ValueError("its features have lengths that do not fit together")
    if any(features[name].dtype.kind != "i" for name in _NEEDED):
        raise ValueError("ids, masks or positions are no integers")
    used = weights > 0
    if positions[used].min(initial=0) < 0 or positions[used].max(initial=0) >= length:
        raise ValueError("a masked position is outside the sample")
    tokens[positions[used]] = ids[used]
    second = int(np.searchsorted(segments[:length], 1))
    if segments[:second].any() or (segments[second:length] != 1).any():
        raise ValueError("segment_ids are not zeros, then ones")
    parts = [tokens[1 : second - 1]] + ([tokens[second : length - 1]] if second < length else [])
    if not all(len(part) for part in parts):
        raise ValueError("a sentence is empty")
    return Pair(tuple(parts), not features.get("next_sentence_labels", np.zeros(1)).any())


def convert_tfrecords(
    inputs: Sequence[str | Path], output_prefix: str, tokenizer: TokenizerSpec, *, skip_bad: int = 0
) -> tuple[int, int]:
    """Write the sentences of TFRecords as a token dataset, `OUTPUT_PREFIX.{bin,idx,json}`.

    Masked tokens are put back, as training masks anew. The two sentences of a record are one document where the second
    follows the first, and two where it does not.

    Args:
        inputs: Files.
        output_prefix: Prefix of the dataset.
        tokenizer: The tokenizer whose ids the records hold.
        skip_bad: Number of bad records that may be skipped.

    Returns:
        Numbers of documents and tokens.

    Raises:
        DataError: If more records are bad, an id is outside the vocabulary, or there is no record.
    """
    built, budget = tokenizer.build(), SkipBudget(skip_bad)
    with (
        only_run(output_prefix),
        progress("records", unit="records") as bar,
        IndexedDatasetBuilder(output_prefix, best_dtype(built.vocab_size), sentences=True) as builder,
    ):
        try:
            for pair in _pairs(inputs, built.vocab_size, budget):
                bar.update(1)
                sizes = [len(part) for part in pair.parts]
                counts = [len(sizes)] if pair.follows else [1] * len(sizes)
                builder.add_documents(np.concatenate(pair.parts), sizes, counts)
            if not builder.num_documents:
                raise DataError("the inputs hold no record: nothing was written")
        except BaseException:
            builder.discard()
            raise
    described = Sidecar(
        tokenizer_type=tokenizer.tokenizer_type,
        tokenizer_hash=built.content_hash,
        vocab_size=built.vocab_size,
        eod=built.eod,
        append_eod=False,
        inputs=tuple(map(str, inputs)),
        **builder.totals,
    )
    write_sidecar(output_prefix, described)
    return builder.num_documents, builder.num_tokens


def _pairs(inputs: Sequence[str | Path], vocab_size: int, budget: SkipBudget) -> Iterator[Pair]:
    """Yield the sentences of every record that can be read."""
    for path in inputs:
        with os_errors(DataError, f"{path} cannot be read"):
            for number, record in enumerate(read_records(path), start=1):
                if isinstance(record, BadInput):
                    budget.add(record)
                    continue
                try:
                    pair = read_pair(parse_example(record))
                    if any(part.min() < 0 or part.max() >= vocab_size for part in pair.parts):
                        raise ValueError(f"an id is outside the vocabulary of {vocab_size}")
                except (ValueError, OverflowError) as error:
                    budget.add(BadInput(str(path), number, None, f"the record cannot be read: {error}"))
                    continue
                yield pair
