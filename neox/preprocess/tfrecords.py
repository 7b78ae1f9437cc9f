"""Conversion of BERT's pretraining data from TFRecords to token datasets, without TensorFlow.

A TFRecord file, as written by Google's and Megatron's scripts, is a sequence of records:

    u64 length of the data | u32 masked CRC-32C of the length | data | u32 masked CRC-32C of the data

The data are a protobuf message `tf.train.Example`. It maps names to features, and each feature is a list of integers or
floats. The features `input_ids`, `input_mask`, `segment_ids`, `masked_lm_positions`, `masked_lm_ids`,
`masked_lm_weights` and `next_sentence_labels` are read.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neox.corpus import BadInput, SkipBudget
from neox.data import IndexedDatasetBuilder, best_dtype
from neox.data.token_files.sidecar import Sidecar, write_sidecar
from neox.errors import DataError, needs_package, os_errors
from neox.log import progress
from neox.preprocess.settings import TokenizerSpec
from neox.resume import lock_output

_HEADER = struct.Struct("<QI")  # length of the data, and its checksum
_LENGTH_BYTES = 8
_FOOTER = struct.Struct("<I")  # checksum of the data
_MAX_RECORD_BYTES = 1 << 28  # a larger length is damaged
_NEEDED = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids")

# Protobuf's wire types.
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5

# Numbers of the lists in a feature.
_FLOAT_LIST = 2
_INT64_LIST = 3


class MaskedPair(NamedTuple):
    """Sentences of a record. Masked tokens have their original ids again.

    Attributes:
        sentences: Ids of the first segment and of the second, if there is one.
        follows: Whether the second follows the first in its document.
    """

    sentences: tuple[np.ndarray, ...]
    follows: bool


def read_records(path: str | Path) -> Iterator[bytes | BadInput]:
    """Yield the data of each record of a TFRecord file, and a BadInput for a damaged one.

    Reading continues after a record with a wrong checksum. It cannot continue after a damaged length.
    """
    with open(path, "rb") as file:
        for number in itertools.count(1):
            start = file.tell()
            header = file.read(_HEADER.size)
            if not header:
                return
            truncated = BadInput(str(path), number, start, "the file ends inside a record; it is truncated")
            if len(header) < _HEADER.size:
                yield truncated
                return
            size, length_checksum = _HEADER.unpack(header)
            if length_checksum != masked_crc(header[:_LENGTH_BYTES]) or size > _MAX_RECORD_BYTES:
                reason = "the length of the record is damaged, or this is not a TFRecord file"
                yield BadInput(str(path), number, start, reason)
                return
            data = file.read(size)
            footer = file.read(_FOOTER.size)
            if len(data) < size or len(footer) < _FOOTER.size:
                yield truncated
                return
            if _FOOTER.unpack(footer) != (masked_crc(data),):
                yield BadInput(str(path), number, start, "the checksum of the record is wrong; it is damaged")
            else:
                yield data


def masked_crc(data: bytes) -> int:
    """Return TensorFlow's masked CRC-32C. Raises DataError if the package for it is not installed."""
    with needs_package(DataError, "reading TFRecords", "google-crc32c", "requirements-corpus.txt"):
        import google_crc32c
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(data: bytes) -> dict[str, np.ndarray]:
    """Return the numeric features of a `tf.train.Example`, int64 or float32 [values].

    Args:
        data: Protobuf message. Field 1 is a map of features; each entry has a name (1) and a feature (2).

    Raises:
        ValueError: If the data are not such a message.
    """
    features: dict[str, np.ndarray] = {}
    for number, entries in _fields(data):
        if number != 1 or not isinstance(entries, bytes):
            continue
        for _, entry in _fields(entries):
            if not isinstance(entry, bytes):
                raise ValueError("an entry of its features is not a message")
            name_and_feature = dict(_fields(entry))
            name = name_and_feature.get(1, b"")
            feature = name_and_feature.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise ValueError("a feature has no name")
            values = _numbers(feature)
            if values is not None:
                features[name.decode()] = values
    return features


def _numbers(feature: bytes) -> np.ndarray | None:
    """Return the numbers of a feature, int64 or float32 [values]; None if it holds something else.

    A `FloatList` or `Int64List` has its values in one packed field, or a field for each value.
    """
    numbers = None
    for kind, values in _fields(feature):
        if kind == _FLOAT_LIST and isinstance(values, bytes):
            packed = b"".join(field for _, field in _fields(values) if isinstance(field, bytes))
            numbers = np.frombuffer(packed, dtype="<f4")
        elif kind == _INT64_LIST and isinstance(values, bytes):
            integers: list[int] = []
            for _, field in _fields(values):
                if isinstance(field, int):
                    integers.append(field)
                    continue
                position = 0
                while position < len(field):
                    value, position = _varint(field, position)
                    integers.append(value)
            numbers = np.array(integers, dtype=np.uint64).astype(np.int64)
    return numbers


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a protobuf message. Raises ValueError if it is damaged."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number = tag >> 3
        wire_type = tag & 7
        if wire_type == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, position = _varint(data, position)
        elif wire_type == _FIXED32:
            size = 4
        elif wire_type == _FIXED64:
            size = 8
        else:
            raise ValueError(f"wire type {wire_type} does not exist")
        if position + size > len(data):
            raise ValueError("it ends inside a field")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it. Bytes hold seven bits each, the lowest first."""
    value = 0
    shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("a number does not end")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if byte < 0x80:
            return value, position


def read_pair(features: dict[str, np.ndarray]) -> MaskedPair:
    """Return the sentences of a record from its features.

    Raises:
        ValueError: If features are missing or contradict each other.
    """
    missing = [name for name in _NEEDED if name not in features]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}: it is not an example of BERT's pretraining")
    if any(features[name].dtype.kind != "i" for name in _NEEDED):
        raise ValueError("ids, masks or positions are not integers")
    tokens = _unmasked(features)
    segments = features["segment_ids"][: len(tokens)]
    second = int(np.searchsorted(segments, 1))  # first token of the second segment
    if segments[:second].any() or (segments[second:] != 1).any():
        raise ValueError("segment_ids are not zeros, then ones")
    sentences = [tokens[1 : second - 1]]  # without [CLS] and [SEP]
    if second < len(tokens):
        sentences.append(tokens[second:-1])
    if not all(map(len, sentences)):
        raise ValueError("a sentence is empty")
    follows = not features.get("next_sentence_labels", np.zeros(1)).any()
    return MaskedPair(tuple(sentences), follows)


def _unmasked(features: dict[str, np.ndarray]) -> np.ndarray:
    """Return the tokens of a record, without padding, and with the original ids of masked ones. Raises ValueError."""
    tokens = features["input_ids"].copy()
    length = int(features["input_mask"].sum())
    positions = features["masked_lm_positions"]
    ids = features["masked_lm_ids"]
    weights = features.get("masked_lm_weights", np.ones(len(positions), np.float32))
    if not len(positions) == len(ids) == len(weights):
        raise ValueError("its masked tokens have features of different lengths")
    if not 2 < length <= len(tokens) or len(features["segment_ids"]) < length:
        raise ValueError("its features have lengths that do not fit together")
    is_used = weights > 0
    if positions[is_used].min(initial=0) < 0 or positions[is_used].max(initial=0) >= length:
        raise ValueError("a masked position is outside the sample")
    tokens[positions[is_used]] = ids[is_used]
    return tokens[:length]


def convert_tfrecords(
    inputs: Sequence[str | Path], output_prefix: str, tokenizer: TokenizerSpec, *, skip_bad: int = 0
) -> tuple[int, int]:
    """Write the sentences of TFRecords as a token dataset, `OUTPUT_PREFIX.{bin,idx,json}`.

    Masked tokens get their original ids, because training chooses other ones. If the second segment of a record
    follows the first, they are one document. Otherwise they are two.

    Args:
        inputs: Paths of TFRecord files.
        output_prefix: Prefix of the dataset.
        tokenizer: Tokenizer of the ids in the records.
        skip_bad: Number of bad records that may be skipped.

    Returns:
        Number of documents and number of tokens.

    Raises:
        DataError: If there are more bad records, or no record. A record with an id outside the vocabulary is bad.
    """
    built = tokenizer.build()
    budget = SkipBudget(skip_bad)
    with (
        lock_output(output_prefix),
        progress("records", unit="records") as bar,
        IndexedDatasetBuilder(output_prefix, best_dtype(built.vocab_size), sentences=True) as builder,
    ):
        try:
            for pair in _pairs(inputs, built.vocab_size, budget):
                bar.update(1)
                sizes = [len(ids) for ids in pair.sentences]
                counts = [1] * len(sizes)
                if pair.follows:
                    counts = [len(sizes)]
                builder.add_documents(np.concatenate(pair.sentences), sizes, counts)
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


def _pairs(inputs: Sequence[str | Path], vocab_size: int, budget: SkipBudget) -> Iterator[MaskedPair]:
    """Yield the sentences of all records. Bad ones are skipped within the budget."""
    for path in inputs:
        with os_errors(DataError, f"{path} cannot be read"):
            for number, record in enumerate(read_records(path), start=1):
                if isinstance(record, BadInput):
                    budget.add(record)
                    continue
                try:
                    pair = read_pair(parse_example(record))
                    if any(ids.min() < 0 or ids.max() >= vocab_size for ids in pair.sentences):
                        raise ValueError(f"an id is outside the vocabulary of {vocab_size}")
                except (ValueError, OverflowError) as error:
                    budget.add(BadInput(str(path), number, None, f"the record cannot be read: {error}"))
                    continue
                yield pair
