"""The Triton kernels of paired decoding without a GPU: interpreted, compiled for an H200, and called from JAX.

Skipped where packages are missing: pip install triton==3.7.1 jax-triton==0.3.1 jax[cuda13] (the interpreter needs
triton 3.7 or newer, compiling works with 3.6 as well).
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_decode_cases import CASES, SINGLE
from jax.sharding import PartitionSpec as P

from pallas_kernels.paired_decode_attention import reference
from pallas_kernels.paired_decode_attention import triton as backend

HERE = Path(__file__).parent


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(x) for x in importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)


needs_interpreter = pytest.mark.skipif(_version("triton") < (3, 7), reason="needs triton 3.7 or newer")
needs_triton = pytest.mark.skipif(_version("triton") < (3, 6), reason="needs triton 3.6 or newer")
needs_jax_triton = pytest.mark.skipif(
    _version("jax-triton") != (0, 3) or _version("jax-cuda13-plugin") == (0, 0),
    reason="needs jax-triton 0.3.1 and jax[cuda13]",
)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Outputs [B, R, N, H] of the kernels by name of the case."""
    path = tmp_path_factory.mktemp("decode") / "outputs.npz"
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, HERE / "interpreted_decode.py", path], env=environment, check=True)
    with np.load(path) as outputs:
        yield dict(outputs)


@needs_interpreter
def test_interpreted_kernels_match_the_reference(interpreted):
    """Float16 products, those of 8-bit caches, round the weights to 11 bits: 2^-11 of values of up to 3."""
    for name, (case, scale) in CASES.items():
        truth = case.truth(scale)
        tolerance = 1e-3 if case.scales else 1e-6
        for r, expected in enumerate(truth):
            found, label = interpreted[name][:, r], f"{name}, row {r}"
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=label)
        assert (interpreted[name][case.lengths == 0] == 0).all(), name
    for name, (case, window) in SINGLE.items():
        expected = reference.decode_attention(case.q_ctx, case.k_cache, case.v_cache, case.lengths, window=window)
        np.testing.assert_allclose(interpreted[name][:, 0], expected, atol=1e-6, err_msg=name)
    assert len(interpreted) == len(CASES) + len(SINGLE)


SHAPES = [
    # rows a sequence, query heads, key/value heads, head size
    (2, 32, 8, 128),
    (1, 32, 8, 128),
    (2, 16, 16, 128),
    (2, 12, 12, 64),
    (2, 16, 8, 256),
    (2, 32, 1, 128),
]


@needs_triton
@pytest.mark.parametrize("cache", ["bf16", "i8", "fp8e4nv"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_for_an_h200(shape, cache, tmp_path):
    """Nothing spills, and two programs fit a multiprocessor: 227 KiB of shared memory and 65536 registers."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from pallas_kernels.paired_decode_attention.triton_kernels import attend_to_split

    num_rows, num_heads, num_kv_heads, head_size = shape
    config = backend.choose_config(num_rows * num_heads // num_kv_heads, head_size, 2 if cache == "bf16" else 1)
    windows = (128, 2**17)[-num_rows:]
    constants, _ = backend.launches(
        (2, num_rows, num_heads, head_size), (2, num_kv_heads, 2**17, head_size), windows, 0.1, config
    )
    arrays = ("bf16", cache, cache, "i32", "fp32", "fp32", "fp32")
    names = [name for name in attend_to_split.arg_names if name not in constants]
    signature = {name: f"*{dtype}" for name, dtype in zip(names, arrays, strict=True)}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    kernel = triton.compile(
        ASTSource(attend_to_split, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    # Both loads run ahead of their use, 16 bytes a thread, and the products are the tensor cores'.
    assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
    assert re.search(r"mma\.sync|wgmma\.mma_async", kernel.asm["ptx"])
    registers, stack = _resources(kernel.asm["cubin"], tmp_path)
    assert stack == 0, f"{registers} registers and {stack} bytes of stack"
    assert 2 * registers * 32 * config.num_warps <= 65536 or num_kv_heads == 1
    assert 2 * (kernel.metadata.shared + 1024) <= 227 * 1024 or num_kv_heads == 1


def _resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Registers a thread and bytes of stack of a compiled kernel, where spilled registers go."""
    import triton.backends.nvidia  # pyright: ignore[reportMissingImports]

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    program = Path(triton.backends.nvidia.__path__[0]) / "bin/cuobjdump"
    report = subprocess.run([program, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout)
    assert found is not None, report.stdout
    return int(found[1]), int(found[2])


@needs_triton
@needs_jax_triton
@pytest.mark.parametrize("cache", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_two_launches_from_jax_under_a_mesh(cache):
    """What jit makes for a GPU from a call split over batch and heads: two kernels, and no copy of the cache."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    q = jax.ShapeDtypeStruct((4, 2, 32, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((4, 8, 4096, 128), cache)
    lengths, scales = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def operation(q, k, v, lengths, k_scale, v_scale):
        attend = partial(backend.attention, scale=0.1, compute_capability=90)
        return attend(q, (128, 4096), k, v, lengths, k_scale, v_scale)

    both = P("data", "tensor")
    rows = P("data", None, "tensor")
    split = jax.shard_map(
        operation, mesh=mesh, in_specs=(rows, both, both, P("data"), both, both), out_specs=rows, check_vma=False
    )
    lowered = jax.jit(split).trace(q, kv, kv, lengths, scales, scales).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @triton_kernel_call(") == 2
    assert not re.search(r"stablehlo\.(copy|convert|transpose|concatenate|pad)", text)


@pytest.mark.parametrize(
    ("num_cache_heads", "num_keys", "splits"),
    [
        (16, 2**17, 16),  # two sequences of 8 heads: 256 programs for 264 places, none left for a second round
        (8, 2**17, 33),
        (8, 8192, 16),  # at least 512 keys each
        (8, 512, 1),
        (8, 100, 1),
        (256, 2**17, 16),  # the batch fills the GPU: at most 8192 keys each, for ragged batches
        (256, 2**20, 128),
    ],
)
def test_number_of_splits(num_cache_heads, num_keys, splits):
    assert backend.num_splits(num_cache_heads, num_keys, backend.choose_config(8, 128, 2)) == splits
