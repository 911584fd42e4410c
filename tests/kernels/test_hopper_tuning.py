"""The table of block sizes."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dual_stream_attention import hopper_tuning
from pallas_kernels.dual_stream_attention.hopper_tuning import SETTINGS, Setting, options


def _keys(length, head_size, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((1, length, 2, head_size), dtype)


def test_the_longest_shape_reached_and_the_own_device_and_type_come_first(monkeypatch):
    device = jax.devices()[0].device_kind

    def entry(device, dtype, min_keys, stages):
        return Setting("forward", device, dtype, 64, min_keys, {"stages": stages}, 1.0, "B1", "2026-11-29", "0.11.2")

    monkeypatch.setattr(
        hopper_tuning,
        "SETTINGS",
        [
            entry("other", "bfloat16", 0, 1),
            entry("other", "bfloat16", 1024, 2),
            entry(device, "float16", 0, 3),
            entry(device, "bfloat16", 2048, 4),
        ],
    )
    found = [options("forward", _keys(length, 64))["stages"] for length in (2048, 2047)]
    assert found == [4, 3]
    assert options("forward", _keys(4096, 64, jnp.float16)) == {"stages": 3}


@pytest.mark.parametrize("kernel", ["forward", "query_gradient", "key_gradients"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_every_call_has_an_entry(kernel, head_size):
    assert options(kernel, _keys(1, head_size))


def test_entries_tell_where_their_time_comes_from():
    for entry in SETTINGS:
        assert entry.milliseconds > 0
        assert all((entry.device, entry.shape, entry.date, entry.jax))
