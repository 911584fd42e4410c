"""The choice of a backend, its refusals, and the mistakes in a call."""

import ast
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from orthros_jax.config import Config, DataConfig, ModelConfig, TrainingConfig
from orthros_jax.training.step import make_program
from pallas_kernels import cross_attention, dispatch, dual_stream_attention, sliding_window_attention
from pallas_kernels.dual_stream_attention import cudnn, hopper, tpu
from pallas_kernels.dual_stream_attention.mask import Stream

NO_GPU = "it needs an NVIDIA GPU, and the device is cpu"
NO_HOPPER = "it needs a Hopper GPU, and the device is cpu"
NO_TPU = "it needs a TPU, and the device is cpu"


def _array(*shape, dtype=jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _trace(operation, *arrays, **kwargs):
    return jax.eval_shape(lambda *arrays: operation(*arrays, **kwargs), *arrays)


def test_imports_jax_and_numpy_only():
    allowed = {"jax", "numpy", "pallas_kernels", "jax_triton", "triton"} | set(sys.stdlib_module_names)
    files = list(Path(pallas_kernels.__file__).parent.rglob("*.py"))
    assert len(files) >= 7
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                modules = [str(node.module)]
            assert {module.split(".")[0] for module in modules} <= allowed, file


def test_auto_takes_xla_on_a_cpu_and_says_so_once(caplog):
    dispatch.log_once.cache_clear()
    q, k = _array(1, 8, 2, 16), _array(1, 8, 1, 16)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(2):
            _trace(sliding_window_attention, q, k, k, window=3)
        _trace(cross_attention, q, k, k)
    passed_over = f"not hopper: {NO_HOPPER}; not tpu: {NO_TPU}; not cudnn: {NO_GPU}"
    assert caplog.messages == [
        f"sliding_window_attention: impl=auto takes xla; {passed_over}",
        f"cross_attention: impl=auto takes xla; {passed_over}",
    ]


def test_forced_backend_never_falls_back():
    q = _array(1, 8, 2, 16)
    for impl, reason in (("hopper", NO_HOPPER), ("tpu", NO_TPU), ("cudnn", NO_GPU)):
        with pytest.raises(NotImplementedError) as error:
            _trace(dual_stream_attention, q, q, q, q, window=3, impl=impl)
        assert str(error.value) == f"dual_stream_attention: impl={impl!r} is not possible here: {reason}"


def _pretend_gpu(monkeypatch, capability="9.0"):
    device = SimpleNamespace(
        platform="gpu",
        client=SimpleNamespace(platform_version="cuda 13000"),
        compute_capability=capability,
        device_kind="NVIDIA X",
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])


def _pretend_tpu(monkeypatch):
    client = SimpleNamespace(platform_version="TFRT TPU v5 lite")
    device = SimpleNamespace(platform="tpu", client=client, device_kind="TPU v5 lite")
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.mark.parametrize(
    ("capability", "q", "mask", "reason"),
    [
        ("9.0", _array(1, 8, 2, 64), {}, None),
        ("8.0", _array(1, 7, 2, 128, dtype=jnp.float16), {}, None),
        ("7.5", _array(1, 8, 2, 64), {}, "it needs compute capability 8.0, and NVIDIA X has 7.5"),
        (
            "9.0",
            _array(1, 8, 2, 64, dtype=jnp.float32),
            {},
            "it needs bfloat16 or float16, and the inputs are float32",
        ),
        (
            "9.0",
            _array(1, 8, 2, 60),
            {},
            "it needs a head size that is a multiple of 8 and at most 128, and it is 60",
        ),
        (
            "9.0",
            _array(1, 8, 2, 136),
            {},
            "it needs a head size that is a multiple of 8 and at most 128, and it is 136",
        ),
        (
            "9.0",
            _array(1, 8, 2, 64),
            {"segment_ids": _array(1, 8, dtype=jnp.int32)},
            "packed segments need a bound on their number known at compile time, and segment_ids has none",
        ),
        (
            "9.0",
            _array(1, 8, 2, 64),
            {"out_index": _array(1, 8, dtype=jnp.int32)},
            "query rows must be the rows of the sequence, and out_index may name any",
        ),
        (
            "9.0",
            _array(2**10, 2**15, 1, 64),
            {},
            "its gradients are wrong for 2**31 or more query elements",
        ),
    ],
)
def test_cudnn_refusals(monkeypatch, capability, q, mask, reason):
    _pretend_gpu(monkeypatch, capability)
    stream = Stream(q, 4, mask.get("out_index"))
    assert cudnn.unsupported((stream,), q, mask.get("segment_ids"), True) == reason


def test_auto_takes_cudnn_where_hopper_cannot(monkeypatch, caplog):
    dispatch.log_once.cache_clear()
    _pretend_gpu(monkeypatch, "8.0")
    called = []
    monkeypatch.setattr(cudnn, "attention", lambda streams, *_: called.append(streams) or [streams[0].q])
    q = _array(1, 8, 2, 64)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        _trace(sliding_window_attention, q, q, q, window=3)
    assert len(called) == 1
    assert caplog.messages == [
        "sliding_window_attention: impl=auto takes cudnn; "
        "not hopper: it needs a Hopper GPU, and the device is NVIDIA X; "
        "not tpu: it needs a TPU, and the device is NVIDIA X"
    ]


@pytest.mark.parametrize(
    ("head_size", "dtype", "reason"),
    [
        (64, jnp.bfloat16, None),
        (256, jnp.float32, None),
        (64, jnp.float16, "it needs float32 or bfloat16, and the inputs are float16"),
        (60, jnp.bfloat16, "it needs a head size that is a multiple of 8 and at most 256, and it is 60"),
        (264, jnp.bfloat16, "it needs a head size that is a multiple of 8 and at most 256, and it is 264"),
    ],
)
def test_tpu_refusals(monkeypatch, head_size, dtype, reason):
    _pretend_tpu(monkeypatch)
    q, index = _array(2, 8, 2, head_size, dtype=dtype), _array(2, 8, dtype=jnp.int32)
    assert tpu.unsupported((Stream(q, 4, None), Stream(q, None, index)), q, index, True) == reason


def test_auto_takes_the_kernels_on_a_tpu(monkeypatch, caplog):
    dispatch.log_once.cache_clear()
    _pretend_tpu(monkeypatch)
    q = _array(1, 8, 2, 64)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        out = _trace(sliding_window_attention, q, q, q, window=3)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert caplog.messages == [
        "sliding_window_attention: impl=auto takes tpu; "
        "not hopper: it needs a Hopper GPU, and the device is TPU v5 lite"
    ]


@pytest.mark.parametrize(
    ("capability", "version", "head_size", "dtype", "reason"),
    [
        ("9.0", (0, 11, 2), 64, jnp.bfloat16, None),
        ("9.0", (0, 11, 0), 128, jnp.float16, None),
        ("9.0", (0, 12, 0), 64, jnp.bfloat16, "it needs JAX 0.11, and this is 0.12.0"),
        ("8.0", (0, 11, 2), 64, jnp.bfloat16, "it needs a Hopper GPU, and the device is NVIDIA X"),
        ("10.0", (0, 11, 2), 64, jnp.bfloat16, "it needs a Hopper GPU, and the device is NVIDIA X"),
        ("9.0", (0, 10, 2), 64, jnp.bfloat16, "it needs JAX 0.11, and this is 0.10.2"),
        ("9.0", (0, 11, 2), 64, jnp.float32, "it needs bfloat16 or float16, and the inputs are float32"),
        ("9.0", (0, 11, 2), 96, jnp.bfloat16, "it needs a head size of 64 or 128, and it is 96"),
    ],
)
def test_hopper_refusals(monkeypatch, capability, version, head_size, dtype, reason):
    _pretend_gpu(monkeypatch, capability)
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    q, index = _array(2, 8, 4, head_size, dtype=dtype), _array(2, 8, dtype=jnp.int32)
    k = _array(2, 8, 2, head_size, dtype=dtype)
    assert hopper.unsupported((Stream(q, 4, None), Stream(q, None, index)), k, index, True) == reason


@pytest.mark.skipif(jax.__version_info__[:2] < (0, 11), reason="needs Python 3.12 and JAX 0.11")
def test_auto_takes_hopper_in_the_train_step(monkeypatch, caplog):
    """Traced only: packed windows of a length that is no multiple of the kernels' tiles, grouped heads."""
    dispatch.log_once.cache_clear()
    model = ModelConfig(
        vocab_size=48, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=24, window=4
    )
    config = Config(model=model, data=DataConfig(sequence_length=12), training=TrainingConfig(batch_size=2))
    program = make_program(config, 10)
    state = jax.eval_shape(program.init, jax.random.key(0))
    batch = {name: _array(2, 13, dtype=jnp.int32) for name in ("tokens", "segment_ids")}
    _pretend_gpu(monkeypatch)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        jaxpr = jax.make_jaxpr(program.train_step)(state, batch)
    # The last layer needs the output stream alone.
    assert [message.split(";")[0] for message in caplog.messages] == [
        "dual_stream_attention: impl=auto takes hopper",
        "cross_attention: impl=auto takes hopper",
    ]
    assert "wgmma" in str(jaxpr)


def test_cudnn_lowers_to_two_causal_calls_with_the_window(monkeypatch):
    """Without a GPU: the calls that would run, their mask and window, and a float32 sum of dk and of dv."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    def loss(q_ctx, q_out, k, v):
        streams = Stream(q_ctx, 128, None), Stream(q_out, None, None)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in cudnn.attention(streams, k, v, None, 0.125))

    q, k = _array(2, 512, 8, 64), _array(2, 512, 2, 64)
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(q, q, k, k).lower(lowering_platforms=("cuda",))
    text = lowered.as_text().replace("\\22", '"')
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == text.count("@__cudnn$fmhaSoftmax(") == 2
    assert text.count('"mask_type": "CAUSAL"') == 4
    assert text.count('"sliding_window_length": 128') == text.count('"sliding_window_length": 0') == 2
    assert sum("stablehlo.add" in line and "tensor<2x512x2x64xf32>" in line for line in text.splitlines()) == 2


Q, K = _array(2, 8, 4, 16), _array(2, 8, 2, 16)


@pytest.mark.parametrize(
    ("arrays", "kwargs", "message"),
    [
        (
            (_array(2, 7, 4, 16), K, K),
            {},
            "7 query rows for 8 keys need out_index, the row of each",
        ),
        (
            (Q, K, K),
            {"scale": -0.5},
            "scale must be positive, got -0.5",
        ),
        (
            (Q, K, K),
            {"window": 0},
            "a window counts the row's own key and must be at least 1, got 0",
        ),
        (
            (_array(2, 8, 3, 16), K, K),
            {},
            "the 2 key/value heads must divide the 3 query heads",
        ),
        (
            (_array(2, 8, 4, 16, dtype=jnp.float32), K, K),
            {},
            "q, k, v must all be float32, bfloat16 or float16, got float32, bfloat16, bfloat16",
        ),
        (
            (Q, K, _array(2, 9, 2, 16)),
            {},
            "attention needs q [B, P, N, H] and k, v [B, T, K, H], "
            "got q (2, 8, 4, 16), k (2, 8, 2, 16), v (2, 9, 2, 16)",
        ),
        (
            (Q, K, K),
            {"segment_ids": jnp.ones((2, 7), jnp.int32)},
            "segment_ids must be an integer array of shape (2, 8), got int32 (2, 7)",
        ),
        (
            (Q, K, K),
            {"out_index": jnp.ones((2, 8))},
            "out_index must be an integer array of shape (2, 8), got float32 (2, 8)",
        ),
        (
            (Q, K, K),
            {"impl": "triton"},
            "impl must be one of auto, hopper, tpu, cudnn, xla, got 'triton'",
        ),
    ],
)
def test_mistakes_in_a_call(arrays, kwargs, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        _trace(cross_attention, *arrays, **kwargs)
    assert str(error.value) == message
