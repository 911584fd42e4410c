"""The mesh and the sharding table: what it refuses, what a device holds, and that no mesh changes a step."""

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from orthros_jax import sharding
from orthros_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from orthros_jax.sharding import batch_sharding, build_mesh, check_divisible, parameter_spec, state_shardings
from orthros_jax.training.step import make_program

pytestmark = pytest.mark.usefixtures("compile_cache")

_MODEL = ModelConfig(
    vocab_size=48,
    num_layers=3,
    model_dim=16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=24,
    window=4,
    compute_dtype="float32",
    init_std=0.2,
)
_CONFIG = Config(
    model=_MODEL,
    data=DataConfig(sequence_length=12),
    # A large epsilon keeps the update a smooth function of the gradient.
    optimizer=OptimizerConfig(warmup_steps=0, schedule="constant", learning_rate=1e-2, eps=1e-3, ema_decay=0.5),
    training=TrainingConfig(batch_size=8, z_loss=1e-3),
)


# Compiling takes far longer than running; without optimisation of machine code it takes half the time.
_fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def _paths(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey)), leaf


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"query_sharing": "shared"},
        {"query_sharing": "separate", "qk_norm": True},
        {"tie_embeddings": True, "num_layers": 1},
        {"kind": "transformer", "qk_norm": True},
        {"kind": "sliding_window", "num_layers": 2},
    ],
)
def test_every_parameter_has_exactly_one_entry(changes):
    config = dataclasses.replace(_CONFIG, model=dataclasses.replace(_MODEL, **changes))
    state = jax.eval_shape(make_program(config, 10).init, jax.random.key(0))
    mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    paths = list(_paths(state.params))
    assert len(paths) > 8
    for path, leaf in paths:
        entries = [name for name in sharding._PARAMETER_AXES if path[-len(name) :] == name]
        assert len(entries) == 1, path
        spec = parameter_spec(path, leaf.shape, mesh)
        assert len(spec) == leaf.ndim
        if path[0] == "layers":
            assert spec[0] is None
    shardings = state_shardings(state, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    expected = {path: parameter_spec(path, leaf.shape, mesh) for path, leaf in paths}
    for copies in (
        shardings.params,
        shardings.ema,
        *(optax.tree.get(shardings.opt_state, m) for m in ("mu", "nu")),
    ):
        assert {path: leaf.spec for path, leaf in _paths(copies)} == expected


def test_the_table_by_hand():
    state = jax.eval_shape(make_program(_CONFIG, 10).init, jax.random.key(0))
    mesh = build_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    specs = {"/".join(path): tuple(parameter_spec(path, leaf.shape, mesh)) for path, leaf in _paths(state.params)}
    attention = "last_layer/attention"
    assert specs["embedding/kernel"] == ("tensor", "fsdp")
    assert specs["head/kernel"] == ("fsdp", "tensor")
    assert specs["layers/attention/query/kernel"] == (None, "fsdp", "tensor", None)
    assert specs[f"{attention}/key/kernel"] == ("fsdp", "tensor", None)
    assert specs[f"{attention}/output/kernel"] == (("tensor", "fsdp"), None, None)
    assert specs[f"{attention}/scale_offset_output/gamma"] == ("tensor", None)
    assert specs["layers/ffn/gate/kernel"] == (None, "fsdp", "tensor")
    assert specs["layers/ffn/down/kernel"] == (None, ("tensor", "fsdp"), None)
    assert specs["layers/ffn_norm/scale"] == (None, None)
    assert specs["final_norm/scale"] == (None,)


def test_a_parameter_without_an_entry_is_refused():
    with pytest.raises(KeyError, match="no sharding for parameter last_layer/router/weight"):
        parameter_spec(("last_layer", "router", "weight"), (2, 2), build_mesh(MeshConfig()))


def test_heads_that_do_not_divide_are_cut_by_their_size():
    mesh = build_mesh(MeshConfig(fsdp=8))
    path = ("layers", "attention", "output", "kernel")
    assert tuple(parameter_spec(path, (2, 12, 16, 32), mesh)) == (None, "tensor", "fsdp", None)
    assert tuple(parameter_spec(path, (2, 16, 12, 32), mesh)) == (None, ("tensor", "fsdp"), None, None)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ((-1, 1, 1), (8, 1, 1, 1)),
        ((-1, 2, 2), (2, 2, 2, 1)),
        ((1, 8, 1), (1, 8, 1, 1)),
        ((-1, 1, 8), (1, 1, 8, 1)),
        ((-1, 1, 2, 4), (1, 1, 2, 4)),
    ],
)
def test_mesh(axes, shape):
    mesh = build_mesh(MeshConfig(*axes))
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "tensor", "context"), shape, strict=True))
    assert set(mesh.devices.flat) == set(jax.devices())


def _refused(function, *arguments):
    with pytest.raises(ConfigError) as error:
        function(*arguments)
    return str(error.value)


@pytest.mark.parametrize("axes", [(-1, 3, 1), (-1, 4, 4), (2, 2, 1), (16, 1, 1)])
def test_axes_that_do_not_make_the_devices(axes):
    assert _refused(build_mesh, MeshConfig(*axes)) == (
        f"mesh: data {axes[0]} x fsdp {axes[1]} x context 1 x tensor {axes[2]} does not make the 8 devices of this "
        "run; choose axes whose product is that number"
    )


@pytest.mark.parametrize(
    ("batch", "accumulation", "nearest"), [(6, 1, "4 or 8"), (2, 1, "4"), (9, 3, "12"), (12, 2, "8 or 16")]
)
def test_a_batch_that_does_not_divide(batch, accumulation, nearest):
    mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    training = TrainingConfig(batch_size=batch, accumulation=accumulation)
    assert _refused(check_divisible, dataclasses.replace(_CONFIG, training=training), mesh) == (
        f"training.batch_size: {batch} is not a multiple of 4 batch shards (mesh.data x mesh.fsdp) x "
        f"{accumulation} accumulation steps; the nearest that work: {nearest}"
    )


@pytest.mark.parametrize(
    ("axes", "changes", "message"),
    [
        ((2, 1, 4), {}, "mesh.tensor: 4 does not divide model.num_kv_heads 2"),
        ((1, 1, 8), {"num_heads": 4}, "mesh.tensor: 8 does not divide model.num_heads 4"),
        ((4, 1, 2), {"ffn_dim": 25}, "mesh.tensor: 2 does not divide model.ffn_dim 25"),
        ((4, 1, 2), {"vocab_size": 49}, "mesh.tensor: 2 does not divide model.vocab_size 49"),
        ((1, 8, 1), {"model_dim": 20}, "mesh.fsdp: 8 does not divide model.model_dim 20"),
        (
            (1, 8, 1),
            {"num_heads": 12, "head_dim": 12},
            "mesh.fsdp: 8 divides neither model.num_heads 12 / mesh.tensor 1 nor model.head_dim 12",
        ),
        ((1, 4, 2), {"ffn_dim": 12}, "mesh.fsdp: 4 x mesh.tensor 2 does not divide model.ffn_dim 12"),
    ],
)
def test_a_model_that_the_mesh_does_not_cut(axes, changes, message):
    config = dataclasses.replace(_CONFIG, model=dataclasses.replace(_MODEL, **changes))
    refusal = _refused(check_divisible, config, build_mesh(MeshConfig(*axes)))
    assert re.sub(r";.*", "", refusal) == message
    assert "; choose a divisor of " in refusal


@pytest.mark.parametrize("axes", [(1, 8, 1), (1, 4, 2), (2, 2, 2), (1, 2, 4)])
def test_a_device_holds_its_share_of_a_large_model(axes):
    """The whole state of the 160M model; what is not cut (norms, scales, offsets) is 0.1 % of it."""
    config = dataclasses.replace(_CONFIG, model=ModelConfig())
    state = jax.eval_shape(make_program(config, 10).init, jax.random.key(0))
    shardings = state_shardings(state, build_mesh(MeshConfig(*axes)))
    total = sum(leaf.size for leaf in jax.tree.leaves(state))
    held = jax.tree.map(lambda leaf, s: np.prod(s.shard_shape(leaf.shape)), state, shardings)
    assert sum(jax.tree.leaves(held)) <= 1.1 * total / (axes[1] * axes[2])


def _batch():
    """Documents of unequal length; some shards of the batch have no token at all."""
    segments = np.zeros((8, 13), np.int32)
    for row, cuts in enumerate([(13,), (), (2,), (1, 5, 6), (3, 4, 9), (), (2, 3), (13,)]):
        for document, (start, end) in enumerate(zip((0, *cuts), cuts, strict=False)):
            segments[row, start:end] = document + 1
    tokens = np.random.default_rng(0).integers(0, 47, segments.shape)
    return {"tokens": tokens.astype(np.int32), "segment_ids": segments}


@pytest.fixture(scope="module")
def single_device():
    program = make_program(_CONFIG, 10)
    state = _fast_jit(program.init)(jax.random.key(0))
    after, metrics = _fast_jit(program.train_step)(state, jax.tree.map(jnp.asarray, _batch()))
    return jax.device_get((state, after, metrics))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (2, 1, 2, 2), (1, 4, 1, 2)])
def test_a_step_is_the_same_on_every_mesh(axes, single_device):
    before, expected, expected_metrics = single_device
    program = make_program(_CONFIG, 10)
    mesh = build_mesh(MeshConfig(*axes))
    check_divisible(_CONFIG, mesh)
    shardings = state_shardings(jax.eval_shape(program.init, jax.random.key(0)), mesh)
    with jax.set_mesh(mesh):
        state = jax.device_put(before, shardings)
        batch = jax.device_put(_batch(), batch_sharding(mesh))
        step = _fast_jit(program.train_step)
        after, metrics = step(state, batch)
        poisoned = dataclasses.replace(
            state,
            params=state.params | {"embedding": {"kernel": state.params["embedding"]["kernel"].at[47].set(np.nan)}},
        )
        # The NaN reaches the rows of one shard only.
        tokens = _batch()["tokens"]
        tokens[7, 3] = 47
        bad = batch | {"tokens": jax.device_put(tokens, batch_sharding(mesh))}
        skipped, skipped_metrics = step(poisoned, bad)

    np.testing.assert_allclose(metrics, expected_metrics, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-7),
        (after.params, after.opt_state, after.ema),
        (expected.params, expected.opt_state, expected.ema),
    )
    # What a step returns lies as what it was given: the compiled step takes it back.
    jax.tree.map(lambda a, s: s.is_equivalent_to(a.sharding, a.ndim) or pytest.fail(f"{a.sharding}"), after, shardings)

    cut = [
        leaf
        for leaf in jax.tree.leaves((after.params, after.opt_state, after.ema))
        if not leaf.sharding.is_fully_replicated
    ]
    if axes != (8, 1, 1):
        total, shares = sum(leaf.nbytes for leaf in cut), axes[1] * axes[2]
        assert total > 0.9 * sum(leaf.nbytes for leaf in jax.tree.leaves(after))
        for device in jax.devices():
            held = sum(s.data.nbytes for leaf in cut for s in leaf.addressable_shards if s.device == device)
            assert held <= 1.1 * total / shares

    assert skipped_metrics.skipped_in_a_row == 1
    assert skipped.step == 0
    assert skipped.samples == 8
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((skipped.params, skipped.opt_state, skipped.ema)),
        jax.device_get((poisoned.params, poisoned.opt_state, poisoned.ema)),
    )


class _Device(NamedTuple):
    id: int
    process_index: int


def _host_share(monkeypatch, rows_of_process):
    """host_share of process 0 where each process holds these rows of a batch of 8, with a device for each row."""
    devices = [(process, row) for process, rows in enumerate(rows_of_process) for row in rows]
    indices = {_Device(i, process): (slice(row, row + 1),) for i, (process, row) in enumerate(devices)}
    fake = SimpleNamespace(devices_indices_map=lambda shape: indices)
    monkeypatch.setattr(sharding, "batch_sharding", lambda mesh: fake)
    return sharding.host_share(build_mesh(MeshConfig()), 8)


def test_each_host_reads_the_rows_that_its_devices_hold(monkeypatch):
    assert sharding.host_share(build_mesh(MeshConfig()), 8) == (0, 1)
    assert _host_share(monkeypatch, [range(0, 4), range(4, 8)]) == (0, 2)
    # The order of devices in a mesh is not that of the hosts.
    assert _host_share(monkeypatch, [(4, 5, 6, 7), (0, 1, 2, 3)]) == (1, 2)
    assert _host_share(monkeypatch, [(0, 2, 4, 6), (1, 3, 5, 7)]) == (0, 2)
    # Two hosts share each sequence.
    assert _host_share(monkeypatch, [range(4), range(4), range(4, 8), range(4, 8)]) == (0, 2)
    with pytest.raises(ConfigError, match="do not hold whole parts of a batch"):
        _host_share(monkeypatch, [range(0, 4), range(2, 8)])


def test_sequences_that_the_context_axis_does_not_cut():
    mesh = build_mesh(MeshConfig(data=2, context=4))
    assert _refused(check_divisible, _CONFIG, mesh) == (
        "mesh.context: each of 4 parts of a sequence is computed in two halves, and 2 x 4 does not divide "
        "data.sequence_length 12; choose another of the two"
    )


def test_rows_stay_as_they_are_where_no_mesh_is_set():
    x = jnp.ones((3, 2))
    assert sharding.constrain_rows(x) is x
    assert sharding.on_each_device(len, None, None) is len
