"""With attention reset, a packed row's documents are what they are alone."""

from __future__ import annotations

import pytest
import torch

from neox.config import NeoXConfig
from neox.data.batches import document_starts
from neox.model import GPT, Context
from neox.parallel import ParallelGrid
from neox.plan import resolve
from tests.losses import causal_lm_loss
from tests.plans import EXPLICIT_NETWORKS, NETWORKS, PACKED_NETWORKS, problem_keys, small_plan

EOD = 0
LENGTHS = ((5, 1, 7, 3), (12, 4))


def packed_rows() -> torch.Tensor:
    """Rows of 16 ids; each document ends with EOD, except the last, which the row cuts off."""
    rows = torch.randint(1, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    for row, lengths in zip(rows, LENGTHS, strict=True):
        row[torch.tensor(lengths[:-1]).cumsum(0) - 1] = EOD
    return rows


def test_document_starts():
    assert document_starts(torch.tensor([[5, 0, 0, 7, 8], [1, 2, 3, 4, 0]]), 0).tolist() == [
        [0, 0, 2, 3, 3],
        [0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("network", "kind"),
    [
        *((network, "global") for network in PACKED_NETWORKS),
        *((network, "flash") for network in PACKED_NETWORKS if network not in EXPLICIT_NETWORKS),
    ],
)
@torch.no_grad()
def test_logits_of_a_packed_row_are_those_of_its_documents_alone(network: str, kind: str):
    scaling = kind == "global" and network not in EXPLICIT_NETWORKS
    keys = {"attention_config": [[[kind], "all"]], **NETWORKS[network]}
    plan = small_plan(apply_query_key_layer_scaling=scaling, **keys)
    model, rows = GPT(plan, ParallelGrid.single()).eval(), packed_rows()
    packed = model(rows, Context(document_starts=document_starts(rows, EOD)))
    for row, logits, lengths in zip(rows, packed, LENGTHS, strict=True):
        alone = torch.cat([model(document.unsqueeze(0))[0] for document in row.split(lengths)])
        torch.testing.assert_close(logits, alone, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(packed, model(rows), atol=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_do_not_cross_documents(recompute: bool):
    model, rows = GPT(small_plan(checkpoint_activations=recompute), ParallelGrid.single()).train(), packed_rows()[:1]
    labels, mask = rows.roll(-1, 1), torch.zeros(rows.shape)
    mask[0, 13:] = 1.0  # the last document's tokens
    causal_lm_loss(model, rows, labels, mask, document_starts=document_starts(rows, EOD)).backward()
    gradient = model.sequential[0].word_embeddings.weight.grad
    others = set(rows[0, :13].tolist()) - set(rows[0, 13:].tolist())
    assert gradient[sorted(others)].abs().max() == 0
    assert gradient[rows[0, 13]].abs().max() > 0


def test_what_cannot_keep_documents_apart_is_refused_by_name():
    flat = {**small_plan().config.to_flat(), "reset_attention_mask": True}
    assert resolve(NeoXConfig.from_flat(flat), 1, 100).keeps_documents_apart
    assert resolve(NeoXConfig.from_flat({**flat, "pipe_parallel_size": 2}), 2, 100).keeps_documents_apart
    (found,) = problem_keys(**{**flat, "scaled_upper_triang_masked_softmax_fusion": True})
    assert {"reset_attention_mask", "scaled_upper_triang_masked_softmax_fusion"} <= set(found)
