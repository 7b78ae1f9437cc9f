"""Logits with packed weights against those of the modules' own products."""

import pytest
import torch

from neox.generation.decoding import decode
from neox.generation.request import SamplingParams
from neox.ops import DTYPES, can_pack
from neox.tokenizer import Tokenizer
from tests.unit.generation.random_model import CPU, logits, runner

# For two orders of summation; logits have a standard deviation near 2.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.15}


class NoText(Tokenizer):
    """Token ids that stand for no text."""

    name = "no text"
    vocab_size = 1
    eod = 0
    end_ids = (0,)

    def encode(self, text):
        return []

    def decode(self, ids):
        return ""

    def _content(self):
        return None


def skip_where_not_packed(dtype):
    if not can_pack(CPU, DTYPES[dtype]):
        pytest.skip(f"no packed products in {dtype} on this machine")


@pytest.mark.parametrize("rows", [1, 8, 17])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parallel_residual", [False, True], ids=["sequential", "parallel"])
def test_packed_weights_give_the_logits_of_the_modules(parallel_residual, tied, dtype, rows):
    skip_where_not_packed(dtype)
    settings = {"parallel_residual": parallel_residual, "no_weight_tying": not tied, "dtype": dtype}
    packed, plain = (runner(packed=packed, **settings) for packed in (True, False))
    assert packed.network.blocks[0].mlp.dense_h_to_4h.weight is None
    lengths = [5 + row % 4 for row in range(rows)]
    result, expected = (logits(model, lengths, steps=4) for model in (packed, plain))
    assert result.dtype == DTYPES[dtype]
    assert expected.std() > 0.5
    torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("packed", [False, True], ids=["modules", "packed"])
@pytest.mark.parametrize("parallel_residual", [False, True], ids=["sequential", "parallel"])
def test_rows_at_the_end_of_the_context_do_not_disturb_others(parallel_residual, packed):
    skip_where_not_packed("fp32")
    model = runner(parallel_residual=parallel_residual, packed=packed)
    # The first row is full after 2 tokens and the second after 9, while the others go on for 20.
    prompts = [[7] * (model.max_length - 2), [9] * (model.max_length - 9), [1, 2, 3], [4] * 8]
    params = SamplingParams(max_new_tokens=20, min_new_tokens=20)
    together = decode(model, prompts, params, NoText(), keep_logits=True)
    assert [len(row.tokens) for row in together] == [2, 9, 20, 20]
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = decode(model, [prompt], params, NoText(), keep_logits=True)
        assert row.tokens == alone.tokens
        torch.testing.assert_close(torch.stack(row.logits), torch.stack(alone.logits), atol=1e-4, rtol=0)
