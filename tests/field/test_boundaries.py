"""Reports about documents, conversations and pairs that were joined: what keeps them apart."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from neox.config import NeoXConfig
from neox.data import BlendedDataset, GPTDataset, IndexedDataset, IndexedDatasetBuilder
from neox.data.batches import BatchIterator, document_starts
from neox.data.mixtures.ledger import DatasetRecord
from neox.data.mixtures.staged import MixtureSegment, StagedDataset
from neox.data.mixtures.stream import DatasetStream
from neox.data.samples.fill_in_middle import FillInMiddle, FimTokens
from neox.data.samples.packing import Packing
from neox.data.samples.rows import TrainingDocuments
from neox.plan.rules.fields import idle_notes
from tests.plans import small_plan

EOD = 2
LENGTH = 15
SIZES = [5, 9, 4, 23, 7, 3, 12, 6]
PACKINGS = ["packed", "pack_until_overflow", "best_fit", "unpacked"]


def indexed(prefix: Path, documents: list[list[int]]) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for ids in documents:
            builder.add_document(ids)
    return IndexedDataset(prefix)


def chats(prefix: Path) -> IndexedDataset:
    """Return conversations whose turns end with EOD, followed by a line break, as Qwen's and Llama 3's do."""
    return indexed(prefix, [[EOD if at % 3 == 1 else 7 for at in range(size - 1)] + [9] for size in SIZES])


def numbered(prefix: Path) -> IndexedDataset:
    """Return documents of the same sizes whose ids count on inside of each."""
    return indexed(prefix, [list(range(100 * number, 100 * number + size)) for number, size in enumerate(SIZES, 1)])


def dataset(data: IndexedDataset, impl: str, **options) -> GPTDataset:
    return GPTDataset(data, range(len(SIZES)), 12, LENGTH, seed=3, packing=Packing(impl), **options)


def starts_of(rows: np.ndarray) -> list[list[int]]:
    """Return where the run of rising ids, or of padding, begins that each id is part of."""
    found = []
    for row in rows.tolist():
        starts = [0]
        for at in range(1, len(row)):
            goes_on = row[at] == row[at - 1] + 1 or row[at] == row[at - 1] == 0
            starts.append(starts[-1] if goes_on else at)
        found.append(starts)
    return found


@pytest.mark.parametrize("eod", [EOD, None])
@pytest.mark.parametrize("impl", PACKINGS)
def test_conversations_are_kept_apart_where_they_were_joined(impl, eod, tmp_path):
    """trl#1230, functionary#265: the token that ends a turn occurs inside of conversations, or nowhere."""
    data = dataset(chats(tmp_path / "chats"), impl)
    wanted = dataset(numbered(tmp_path / "numbers"), impl).read(range(12))
    batch = next(BatchIterator(data, 12, num_workers=0, eod=eod, mark_documents=True))
    starts = starts_of(wanted)
    assert batch["document_starts"].tolist() == [row[:-1] for row in starts]
    for row, mask, begins in zip(wanted, batch["loss_mask"], starts, strict=True):
        for at in range(LENGTH):
            is_joint = begins[at + 1] != begins[at]
            is_trained = not is_joint and row[at + 1] != 0
            assert bool(mask[at]) == is_trained, "the last token says nothing about another conversation"


def test_blends_and_stages_keep_documents_apart(tmp_path):
    """trl#1230: whichever dataset a sample comes from."""
    members = [dataset(numbered(tmp_path / name), "packed") for name in ("a", "b")]
    blend = BlendedDataset(members, [0.5, 0.5])
    assert blend.layout(range(8)).starts.tolist() == starts_of(blend.read(range(8)))
    part = TrainingDocuments(members[0].rows, range(len(SIZES)), None)
    staged = StagedDataset([DatasetStream(part, 5)], [MixtureSegment(0, 12, LENGTH, (1.0,))], [DatasetRecord()])
    assert staged.layout(range(12)).starts.tolist() == starts_of(staged.read(range(12)))


@pytest.mark.parametrize("impl", PACKINGS)
@pytest.mark.parametrize("masks", [False, True])
def test_documents_that_end_with_eod_are_cut_as_in_gpt_neox(impl, masks, tmp_path):
    """gpt-neox cuts after each end-of-document token, which is the same if documents have it at their ends only."""
    documents = [[7] * (size - 1) + [EOD] for size in SIZES if size <= LENGTH]
    data = GPTDataset(
        indexed(tmp_path / "x", documents), range(len(documents)), 12, LENGTH, seed=3, packing=Packing(impl)
    )
    options = {"num_workers": 0, "eod": EOD, "mark_documents": True, "eod_mask_loss": masks}
    ours = next(BatchIterator(data, 12, **options))
    theirs = next(BatchIterator(data, 12, **options, boundaries="eod"))
    assert torch.equal(ours["loss_mask"], theirs["loss_mask"])
    is_text = ours["tokens"] != 0
    assert torch.equal(ours["document_starts"][is_text], theirs["document_starts"][is_text])
    if impl == "packed":
        assert torch.equal(theirs["document_starts"], document_starts(ours["tokens"], EOD))


def test_documents_in_the_middle_of_sequences_by_name(tmp_path):
    """axolotl, Megatron-LM: a sequence that holds several documents is cut at `eod` if that is asked for."""
    data = dataset(chats(tmp_path / "x"), "packed")
    batch = next(
        BatchIterator(data, 2, num_workers=0, eod=EOD, mark_documents=True, eod_mask_loss=True, boundaries="eod")
    )
    assert torch.equal(batch["document_starts"], document_starts(batch["tokens"], EOD))
    assert torch.equal(batch["loss_mask"] == 0, batch["tokens"] == EOD)


def test_the_middle_is_filled_within_documents(tmp_path):
    """Megatron-LM's and gpt-neox's fill in the middle divide at an id; a conversation has it inside."""
    fim = FillInMiddle(FimTokens(50, 51, 52, EOD), 1.0, 0.0, "sample", 1)
    data = GPTDataset(chats(tmp_path / "x"), range(len(SIZES)), 12, LENGTH, seed=3, fill_in_middle=fim)
    plain = dataset(chats(tmp_path / "x"), "packed")
    layout = data.layout(range(12)).starts
    changed = 0
    for row, original, starts in zip(data.read(range(12)), plain.read(range(12)), layout, strict=True):
        edges = [*np.flatnonzero(np.r_[True, np.diff(starts) != 0]).tolist(), LENGTH + 1]
        for begin, end in pairwise(edges):
            part = row[begin:end].tolist()
            if part != original[begin:end].tolist():  # parts without room are left as they are
                changed += 1
                assert part[0] == 50
                assert [part.count(token) for token in (50, 51, 52)] == [1, 1, 1]
    assert changed >= 12


def test_the_key_of_boundaries_is_not_ignored():
    flat = {**small_plan().config.to_flat(), "document_boundaries": "eod"}
    (note,) = idle_notes(NeoXConfig.from_flat(flat))
    assert note.keys == ("document_boundaries",)
    assert not list(idle_notes(NeoXConfig.from_flat({**flat, "reset_attention_mask": True})))
