"""Rows for new tokens: old rows and logits stay, whatever the network, its head and its degrees."""

from __future__ import annotations

import pytest
import torch

from neox.checkpoint import (
    CheckpointReader,
    VocabularySize,
    check_vocabulary,
    find_checkpoint,
    mean_of_all,
    mean_of_pieces,
    open_checkpoint,
    resize_vocabulary,
    rows_of_file,
)
from neox.config import NeoXConfig
from neox.convert.verification import load_reference_model, single_rank_plan
from neox.errors import CheckpointError
from tests.plans import SMALL
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint

BEFORE, ROWS = 90, 96
HEADS = {
    "tied": {"no_weight_tying": False},
    "column": {"output_layer_parallelism": "column"},
    "row": {"output_layer_parallelism": "row"},
    "bias": {"gpt_j_residual": True, "gpt_j_tied": True, "use_bias_in_lm_head": True},
}


def checkpoint(tmp_path, tp_size=1, **keys):
    config = NeoXConfig.from_flat({**SMALL, **keys})
    layers = single_rank_plan(config, ROWS).layers
    weights = seeded_weights(layers)
    directory = write_checkpoint(tmp_path / "old" / "global_step3", layers, weights, tp_size=tp_size)
    return open_checkpoint(directory, config=config), config, weights


def logits(reader, config, tokens):
    with torch.inference_mode():
        return load_reference_model(reader, config)(tokens)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("tp_size", "after", "padded"), [(1, 94, 96), (2, 99, 128)])
def test_logits_of_old_tokens_stay(tmp_path, head, tp_size, after, padded):
    reader, config, weights = checkpoint(tmp_path, tp_size, **HEADS[head])
    size = VocabularySize(BEFORE, after, padded)
    result = resize_vocabulary(reader, tmp_path / "new", size, mean_of_all(after - BEFORE))
    assert find_checkpoint(tmp_path / "new") == result
    grown = open_checkpoint(result, config=config)
    assert grown.tp_size == tp_size
    assert grown.vocabulary_rows == padded
    tokens = torch.randint(0, BEFORE, (2, 16), generator=torch.Generator().manual_seed(0))
    old = logits(reader, config, tokens)[..., :BEFORE]
    new = logits(grown, config, tokens)
    assert (new[..., :BEFORE] - old).abs().max() < 1e-6
    for (index, name), weight in weights.items():
        found = grown.full(index, name)
        if name in ("word_embeddings.weight", "final_linear.weight", "final_linear.bias"):
            assert torch.equal(found[:BEFORE], weight[:BEFORE])
            expected = weight[:BEFORE].mean(0, keepdim=True).expand_as(found[BEFORE:after])
            torch.testing.assert_close(found[BEFORE:after], expected)
        else:
            assert torch.equal(found, weight)


def test_rows_of_pieces_and_of_a_file(tmp_path):
    reader, config, weights = checkpoint(tmp_path)
    size = VocabularySize(BEFORE, BEFORE + 2, ROWS)
    pieces = [[3, 4, 5], [7]]
    by_pieces = resize_vocabulary(reader, tmp_path / "pieces", size, mean_of_pieces(pieces))
    embedding = weights[0, "word_embeddings.weight"]
    found = open_checkpoint(by_pieces, config=config).full(0, "word_embeddings.weight")
    torch.testing.assert_close(found[BEFORE], embedding[3:6].mean(0))
    torch.testing.assert_close(found[BEFORE + 1], embedding[7])

    given = {name: torch.randn(2, 32) for name in ("word_embeddings.weight", "final_linear.weight")}
    torch.save(given, tmp_path / "rows.pt")
    by_file = resize_vocabulary(reader, tmp_path / "file", size, rows_of_file(tmp_path / "rows.pt", 2))
    grown = open_checkpoint(by_file, config=config)
    head = max(index for index, name in weights if name == "final_linear.weight")
    assert torch.equal(grown.full(0, "word_embeddings.weight")[BEFORE:92], given["word_embeddings.weight"])
    assert torch.equal(grown.full(head, "final_linear.weight")[BEFORE:92], given["final_linear.weight"])
    torch.save({"word_embeddings.weight": torch.randn(3, 32)}, tmp_path / "wrong.pt")
    with pytest.raises(CheckpointError):
        resize_vocabulary(reader, tmp_path / "wrong", size, rows_of_file(tmp_path / "wrong.pt", 2))
    assert not (tmp_path / "wrong" / "latest").exists()


def test_a_tokenizer_that_grew_is_refused_until_the_checkpoint_has(tmp_path):
    reader, _, _ = checkpoint(tmp_path)
    result = resize_vocabulary(reader, tmp_path / "new", VocabularySize(BEFORE, 94, ROWS), mean_of_all(4))
    args = CheckpointReader(result).args
    check_vocabulary(result, args, 94)
    check_vocabulary(result, args, 80)
    with pytest.raises(CheckpointError, match="resize_vocabulary"):
        check_vocabulary(result, args, 95)
    check_vocabulary(result, {}, 95)  # nothing is known
    with pytest.raises(CheckpointError):
        check_vocabulary(result, {"padded_vocab_size": 96}, 97)


def test_nothing_new_is_refused(tmp_path):
    reader, _, _ = checkpoint(tmp_path)
    with pytest.raises(CheckpointError):
        resize_vocabulary(reader, tmp_path / "new", VocabularySize(BEFORE, BEFORE, ROWS), mean_of_all(0))
