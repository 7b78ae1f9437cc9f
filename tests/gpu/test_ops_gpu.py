"""Operations on a GPU: the Triton kernel for real, attention kinds, and the network against itself on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from neox.engine import initialize_distributed
from neox.model import GPT, head_cross_entropy, vocab_parallel_cross_entropy
from neox.ops import core_attention, grouped_linear, scale_mask_softmax, unpadded_keys
from neox.ops.grouped_linear import _has_grouped_product
from neox.parallel import Exchange, KeptInputs, ParallelGrid
from tests.distributed.training_runs import tiny_plan
from tests.losses import causal_lm_loss, cross_entropy_reference
from tests.plans import small_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("length", [1, 5, 128, 1000, 2048, 5000])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_softmax_kernel_equals_the_reference(dtype: torch.dtype, length: int):
    scores, grad = drawn(1, 2, length, length, dtype=dtype) * 4, drawn(1, 2, length, length, seed=1, dtype=dtype)
    results = []
    for impl in ("torch", "triton"):
        leaf = scores.clone().requires_grad_()
        weights = scale_mask_softmax(leaf, 0.7, impl)
        weights.backward(grad)
        results.append((weights.detach(), leaf.grad))
    (weights, dx), (fused, fused_dx) = results
    assert fused.dtype == dtype
    assert not fused.triu(1).any()
    assert not fused_dx.triu(1).any()
    torch.testing.assert_close(fused, weights, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
    torch.testing.assert_close(fused_dx, dx, atol=5 * BOUNDS[dtype], rtol=5 * BOUNDS[dtype])


@pytest.mark.parametrize("length", [1, 5, 128, 512, 1000])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_padded_softmax_kernel_equals_the_reference(dtype: torch.dtype, length: int):
    scores, grad = drawn(3, 2, length, length, dtype=dtype) * 4, drawn(3, 2, length, length, seed=1, dtype=dtype)
    visible = unpadded_keys(torch.tensor([length, max(1, length // 3), 1], device="cuda"), length)
    results = []
    for impl in ("torch", "triton"):
        leaf = scores.clone().requires_grad_()
        weights = scale_mask_softmax(leaf, 0.7, impl, causal=False, visible=visible)
        weights.backward(grad)
        results.append((weights.detach(), leaf.grad))
    (weights, dx), (fused, fused_dx) = results
    assert not fused.masked_select(~visible).any()
    torch.testing.assert_close(fused, weights, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
    torch.testing.assert_close(fused_dx, dx, atol=5 * BOUNDS[dtype], rtol=5 * BOUNDS[dtype])


def test_softmax_kernel_addresses_more_than_2_to_the_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB of GPU memory")
    scores = torch.zeros(1, 33, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    weights = scale_mask_softmax(scores, 1.0, "triton")
    torch.testing.assert_close(
        weights[0, -1, -1].float(), torch.full((8192,), 1 / 8192, device="cuda"), rtol=1e-2, atol=0
    )
    assert not weights[0, -1, 0, 1:].any()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("impl", ["fused", "flash"])
def test_attention_kinds_agree(impl: str, dtype: torch.dtype):
    inputs = [drawn(2, 300, 4, 64, seed=seed, dtype=dtype) for seed in range(3)]
    grad = drawn(2, 300, 4, 64, seed=3, dtype=dtype)
    results = []
    for kind in ("eager", impl):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = core_attention(*leaves, impl=kind)
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=4 * BOUNDS[dtype], rtol=4 * BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_losses_equal_torchs(dtype: torch.dtype):
    grid = ParallelGrid.single()
    leaves = [
        (drawn(3000, 64, dtype=dtype) * 0.3).requires_grad_(),
        (drawn(50432, 64, seed=1, dtype=dtype) * 0.3).requires_grad_(),
    ]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    labels = torch.randint(0, 50432, (3000,), generator=torch.Generator().manual_seed(2)).cuda()
    mean = torch.full((3000,), 1 / 3000, device="cuda")
    expected, chunked = cross_entropy_reference(*exact, labels, mean), head_cross_entropy(*leaves, labels, mean, grid)
    split = vocab_parallel_cross_entropy(F.linear(*leaves).unsqueeze(0), labels.unsqueeze(0), grid).mean()
    for loss in (chunked, split):
        torch.testing.assert_close(loss, expected, rtol=2e-3 if dtype != torch.float32 else 1e-5, atol=0)
    expected.backward()
    chunked.backward()
    for leaf, whole in zip(leaves, exact, strict=True):
        assert (leaf.grad.float() - whole.grad).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * whole.grad.norm()


@pytest.mark.parametrize("counts", [[512] * 16, [0, 4096, 1, 0, *[341] * 12]])
def test_grouped_products_equal_those_of_single_experts(counts: list[int]):
    rows = drawn(sum(counts), 256, dtype=torch.bfloat16).requires_grad_()
    weight = drawn(16, 384, 256, seed=1, dtype=torch.bfloat16).requires_grad_()
    gradient = drawn(sum(counts), 384, seed=2, dtype=torch.bfloat16)
    found = grouped_linear(rows, weight, torch.tensor(counts, device="cuda"))
    results = torch.autograd.grad(found, [rows, weight], gradient)
    assert _has_grouped_product(rows, weight)
    for expert, part in enumerate(rows.detach().split(counts)):
        start = sum(counts[:expert])
        here = slice(start, start + counts[expert])
        own = weight.detach()[expert].float()
        of_output = gradient[here].float()
        for ours, exact in (
            (found[here], part.float() @ own.t()),
            (results[0][here], of_output @ own),
            (results[1][expert], of_output.t() @ part.float()),
        ):
            assert (ours.float() - exact).norm() <= 2**-7 * exact.norm()


def test_rows_travel_to_experts_and_back():
    """The exchange of ranks that divide experts, over NCCL with one rank: more need more cards."""
    plan = tiny_plan(1)
    grid, _ = initialize_distributed(plan)
    grid = replace(grid, ep_group=grid.dp_group)
    counts = torch.tensor([3, 0, 5, 2], device="cuda")
    exchange = Exchange.plan(counts, grid)
    rows = drawn(10, 8).requires_grad_()
    arrived = exchange.to_experts(rows)
    assert torch.equal(arrived, rows)
    assert torch.equal(exchange.counts, counts)
    back = exchange.from_experts(arrived * 2)
    assert torch.equal(back, rows * 2)
    back.sum().backward()
    assert torch.equal(rows.grad, torch.full_like(rows, 2.0))


@pytest.mark.parametrize("attention", ["eager", "fused", "flash"])
@pytest.mark.parametrize("parallel", [True, False])
def test_the_network_gives_its_cpu_numbers(parallel: bool, attention: str):
    keys = {
        "gpt_j_residual": parallel,
        "attention_config": [[["flash" if attention == "flash" else "global"], "all"]],
        "scaled_upper_triang_masked_softmax_fusion": attention == "fused",
    }
    grid = ParallelGrid.single()
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 16)
    # The CPU side computes eagerly: the kernel asked for by name runs on a GPU alone.
    on_cpu = GPT(small_plan(gpt_j_residual=parallel), grid)
    on_gpu = GPT(small_plan(**keys), grid, device="cuda")
    expected = causal_lm_loss(on_cpu, tokens, tokens, mask)
    loss = causal_lm_loss(on_gpu, tokens.cuda(), tokens.cuda(), mask.cuda())
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=0)
    expected.backward()
    loss.backward()
    for (name, cpu), gpu in zip(on_cpu.named_parameters(), on_gpu.parameters(), strict=True):
        torch.testing.assert_close(gpu.grad.cpu(), cpu.grad, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_recomputation_repeats_dropout():
    grid = ParallelGrid.single()
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for recompute in (False, True):
        keys = {"checkpoint_activations": recompute, "hidden_dropout": 0.2, "attention_dropout": 0.2}
        model = GPT(small_plan(**keys), grid, device="cuda")
        grid.seed(3)
        loss = causal_lm_loss(model, tokens, tokens, torch.ones(2, 16, device="cuda"))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-6, rtol=1e-5)


def test_compiled_bf16_block_gives_the_eager_numbers():
    plan, grid = small_plan(hidden_size=256, attention_config=[[["flash"], "all"]]), ParallelGrid.single()
    model = GPT(plan, grid, device="cuda", dtype=torch.bfloat16).eval()
    tokens = torch.arange(32).view(2, 16).cuda()
    with torch.no_grad():
        expected = model(tokens)
        for block in model.blocks:
            block.compile(fullgraph=True)
        torch.testing.assert_close(model(tokens), expected, atol=2e-2, rtol=2e-2)


def test_inputs_kept_on_the_cpu_take_no_memory_of_the_gpu():
    weight = (torch.eye(512, device="cuda") * 0.5).requires_grad_()
    results, held = [], []
    for on_cpu in (False, False, True):  # the first pass also allocates what libraries keep for each thread
        x = start = drawn(4096, 512, seed=3).requires_grad_()
        kept, grid = KeptInputs(ParallelGrid.single(), on_cpu=on_cpu), ParallelGrid.single()
        for _ in range(8):
            with kept():
                x = grid.rng.checkpoint(lambda x: F.gelu(x @ weight), x)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        x.sum().backward()
        results.append((start.grad, weight.grad))
        weight.grad = None
        del x
    assert all(torch.equal(a, b) for a, b in zip(*results[1:], strict=True))
    assert held[1] - held[2] > 5 * start.nbytes
