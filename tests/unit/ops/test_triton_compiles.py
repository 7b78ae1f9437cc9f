"""Every Triton kernel through Triton's compiler, for a GPU that need not be there: the interpreter skips that part."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: nothing is compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from neox.architecture import FUSED_SOFTMAX_LENGTH  # noqa: E402
from neox.ops import triton_cross_entropy, triton_softmax  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
KERNELS = {
    name: value
    for module in (triton_cross_entropy, triton_softmax)
    for name, value in vars(module).items()
    if isinstance(value, triton.JITFunction)
}
FIXED = {"labels": "*i64", "log_sums": "*fp32", "picked": "*fp32", "visible": "*u8", "scale": "fp32", "masked": "fp32"}
COUNTS = ("length", "columns", "rows")


def compile_kernel(name: str, dtype: str, block: int, counts: dict[str, int]) -> bytes:
    """Return machine code; a count of 1 is a constant, as Triton makes it one when a kernel is started."""
    kernel = KERNELS[name]
    wide = {"weights": "*fp32"} if name == "_gradient_kernel" else {}
    types = {**FIXED, **wide, **dict.fromkeys(COUNTS, "i32")}
    constants = {"BLOCK": block, "GROUP": 16, **{count: 1 for count, value in counts.items() if value == 1}}
    here = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
    signature = {
        argument: "constexpr" if argument in here else types.get(argument, f"*{dtype}") for argument in kernel.arg_names
    }
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(key),): value for key, value in here.items()})
    return triton.compile(source, target=HOPPER, options={"num_warps": min(16, max(1, block // 512))}).asm["cubin"]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name: str):
    assert compile_kernel(name, "bf16", 128, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("block", [1, 8192])
def test_all_sizes_and_types_compile(name: str, dtype: str, block: int):
    assert compile_kernel(name, dtype, block, dict.fromkeys(COUNTS, block))


@pytest.mark.slow
def test_the_largest_row_fits():
    assert compile_kernel("_forward_kernel", "bf16", FUSED_SOFTMAX_LENGTH, {})
