"""Checkpoints survive damage, a full disk, a kill and another mesh; none is lost silently."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orthros_jax.errors import UserError
from orthros_jax.training.checkpoint import Checkpoints, read_metadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    params: dict
    moments: tuple
    key: jax.Array
    step: jax.Array


def mesh_of(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(devices, ("data", "fsdp"))


def make_state(seed, mesh, rows=64):
    sharded = NamedSharding(mesh, PartitionSpec("fsdp"))
    replicated = NamedSharding(mesh, PartitionSpec())
    numbers = np.random.default_rng(seed)
    return State(
        params={
            "layers": {"query": jax.device_put(numbers.normal(size=(rows, 96)).astype(np.float32), sharded)},
            "scale": jax.device_put(jnp.asarray(numbers.normal(size=16), jnp.bfloat16), replicated),
        },
        moments=(jax.device_put(numbers.normal(size=(8, 3)).astype(np.float32), sharded),),
        key=jax.device_put(jax.random.key(seed), replicated),
        step=jax.device_put(jnp.int32(seed), replicated),
    )


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def raw(state):
    plain = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(plain)]


def assert_same(actual, expected):
    for a, b in zip(raw(actual), raw(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def mesh():
    return mesh_of(4, 2)


def open_checkpoints(folder, keep_last=3, keep_every=None):
    lines = []
    return Checkpoints(folder, keep_last=keep_last, keep_every=keep_every, report=lines.append), lines


def save_all(folder, steps, mesh, **options):
    checkpoints, _ = open_checkpoints(folder, **options)
    for step in steps:
        assert checkpoints.save(step, make_state(step, mesh), {"samples": 8 * step})
    checkpoints.close()


def restore(checkpoints, target):
    found = checkpoints.restore(target)
    assert found is not None
    return found


def step_folders(folder):
    return sorted(int(p.name) for p in Path(folder).iterdir() if p.name.isdecimal())


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_restores_arrays_keys_and_metadata(tmp_path, mesh):
    save_all(tmp_path, [1, 2], mesh)
    checkpoints, lines = open_checkpoints(tmp_path)
    step, state, metadata = restore(checkpoints, abstract(make_state(0, mesh)))
    assert (step, metadata, lines) == (2, {"samples": 16}, [])
    assert_same(state, make_state(2, mesh))
    assert state.params["layers"]["query"].sharding == NamedSharding(mesh, PartitionSpec("fsdp"))
    assert jax.random.uniform(state.key) == jax.random.uniform(jax.random.key(2))


@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (1, 4), (2, 1), (1, 1)])
def test_restores_on_another_mesh(tmp_path, mesh, shape):
    save_all(tmp_path, [3], mesh)
    other = mesh_of(*shape)
    checkpoints, _ = open_checkpoints(tmp_path)
    _, state, _ = restore(checkpoints, abstract(make_state(0, other)))
    assert_same(state, make_state(3, mesh))
    assert state.params["layers"]["query"].sharding == NamedSharding(other, PartitionSpec("fsdp"))
    # The sums of a state restored to fewer devices are those of the save: the next save needs no old mesh.
    assert checkpoints.save(4, state, {}, wait=True)
    checkpoints.close()


def test_other_process_with_one_device_reads_it(tmp_path, mesh):
    save_all(tmp_path, [3], mesh)
    program = f"""
import jax
from orthros_jax.training.checkpoint import Checkpoints, read_metadata
assert read_metadata({str(tmp_path)!r}) == (3, {{"samples": 24}})
assert jax.device_count() == 1
target = {{"params": {{"layers": {{"query": jax.ShapeDtypeStruct((64, 96), "float32")}}}}}}
found = Checkpoints({str(tmp_path)!r}, keep_last=1, keep_every=None).restore(target, partial=True)
print(found.step, repr(float(found.state["params"]["layers"]["query"].sum())))
"""
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    step, total = result.stdout.split()
    assert step == "3"
    expected = np.asarray(make_state(3, mesh).params["layers"]["query"]).sum(dtype=np.float64)
    assert float(total) == pytest.approx(expected, abs=1e-3)


def test_donated_buffers_do_not_reach_the_save(tmp_path, mesh):
    checkpoints, _ = open_checkpoints(tmp_path)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    values = jax.device_put(jnp.arange(2.0**20), NamedSharding(mesh, PartitionSpec("fsdp")))
    checkpoints.save(1, {"w": values}, {})
    for _ in range(3):
        values = overwrite(values)
    jax.block_until_ready(values)
    checkpoints.close()
    _, state, _ = restore(open_checkpoints(tmp_path)[0], abstract({"w": values}))
    np.testing.assert_array_equal(state["w"], np.arange(2.0**20, dtype=np.float32))


def test_nothing_to_restore(tmp_path, mesh):
    target = abstract(make_state(0, mesh))
    for folder in (tmp_path, tmp_path / "absent"):
        checkpoints, lines = open_checkpoints(folder)
        assert checkpoints.restore(target) is None
        assert read_metadata(folder) is None
        assert lines == []
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, None, [9]),
        (2, None, [8, 9]),
        (2, 4, [4, 8, 9]),
        (3, 5, [5, 7, 8, 9]),
        (1, 3, [3, 6, 9]),
    ],
)
def test_retention(tmp_path, mesh, keep_last, keep_every, kept):
    save_all(tmp_path, range(1, 10), mesh, keep_last=keep_last, keep_every=keep_every)
    assert step_folders(tmp_path) == kept


def test_retention_holds_across_restarts(tmp_path, mesh):
    for step in (2, 4, 6, 8):
        checkpoints, _ = open_checkpoints(tmp_path, keep_last=2, keep_every=4)
        checkpoints.restore(abstract(make_state(0, mesh)))
        checkpoints.save(step, make_state(step, mesh), {})
        checkpoints.close()
    assert step_folders(tmp_path) == [4, 6, 8]


def test_final_save_of_a_saved_step_is_one_checkpoint(tmp_path, mesh):
    checkpoints, _ = open_checkpoints(tmp_path)
    assert checkpoints.save(20, make_state(20, mesh), {})
    assert not checkpoints.save(20, make_state(20, mesh), {}, wait=True)
    checkpoints.close()
    written = largest_file(tmp_path).stat().st_mtime_ns

    checkpoints, _ = open_checkpoints(tmp_path)
    checkpoints.restore(abstract(make_state(0, mesh)))
    assert not checkpoints.save(20, make_state(20, mesh), {}, wait=True)
    checkpoints.close()
    assert step_folders(tmp_path) == [20]
    assert largest_file(tmp_path).stat().st_mtime_ns == written


def test_going_back_is_an_error(tmp_path, mesh):
    checkpoints, _ = open_checkpoints(tmp_path)
    checkpoints.save(20, make_state(20, mesh), {})
    with pytest.raises(ValueError, match="step 10 is older than the newest checkpoint 20"):
        checkpoints.save(10, make_state(10, mesh), {})
    checkpoints.close()


def test_saving_without_looking_leaves_old_steps_alone(tmp_path, mesh):
    save_all(tmp_path, [1], mesh)
    checkpoints, _ = open_checkpoints(tmp_path)
    with pytest.raises(ValueError, match="call restore before the first save"):
        checkpoints.save(2, make_state(2, mesh), {})
    assert step_folders(tmp_path) == [1]


def test_save_that_orbax_skips_is_not_lost_silently(tmp_path, mesh, monkeypatch):
    import orbax.checkpoint as ocp

    monkeypatch.setattr(ocp.CheckpointManager, "save", lambda *_, **__: False)
    checkpoints, _ = open_checkpoints(tmp_path)
    with pytest.raises(RuntimeError, match="Orbax skipped the save of step 1"):
        checkpoints.save(1, make_state(1, mesh), {})


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_bytes(file):
    data = bytearray(file.read_bytes())
    for position in range(len(data) // 16, len(data), len(data) // 8):
        data[position] ^= 0x10
    file.write_bytes(data)


def change_one_number(folder):
    base = {"driver": "file", "path": f"{folder}/state/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": "params/layers/query/"}
    ts.open({"driver": "zarr", "kvstore": kvstore}).result()[37, 5].write(1.0).result()


DAMAGES = {
    "empty folder": (empty, "it is empty"),
    "no commit marker": (lambda folder: (folder / "commit_success.txt").unlink(), "it was never committed"),
    "no commit metadata": (
        lambda folder: (folder / "_CHECKPOINT_METADATA").unlink(),
        "it was never committed",
    ),
    "truncated array": (
        lambda folder: truncate(largest_file(folder)),
        "its arrays cannot be read (ValueError: ",
    ),
    "absent array": (lambda folder: largest_file(folder).unlink(), "its arrays cannot be read (ValueError: "),
    "flipped bytes": (lambda folder: flip_bytes(largest_file(folder)), ""),
    "one number changed": (change_one_number, "the data of params/layers/query does not match its checksum"),
    "flipped bytes in the index": (
        lambda folder: flip_bytes(folder / "state" / "manifest.ocdbt"),
        "its arrays cannot be read (ValueError: DATA_LOSS",
    ),
    "truncated record": (
        lambda folder: truncate(folder / "record" / "metadata"),
        "its record cannot be read (JSONDecodeError: ",
    ),
    "flipped digit in the record": (
        lambda folder: (folder / "record" / "metadata").write_text(
            (folder / "record" / "metadata").read_text().replace('"samples": 24', '"samples": 25')
        ),
        "its record does not match its checksum",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_step_is_skipped_and_can_be_saved_again(tmp_path, mesh, damage, capfd):
    save_all(tmp_path, [1, 2, 3], mesh)
    do_damage, reason = DAMAGES[damage]
    do_damage(tmp_path / "3")

    checkpoints, lines = open_checkpoints(tmp_path, keep_last=2)
    step, state, metadata = restore(checkpoints, abstract(make_state(0, mesh)))
    assert (step, metadata) == (2, {"samples": 16})
    assert_same(state, make_state(2, mesh))
    assert len(lines) == 1
    assert lines[0].startswith(f"skipped checkpoint {tmp_path / '3'}: {reason}")
    assert step_folders(tmp_path) == [1, 2, 3]  # reading changes nothing

    assert checkpoints.save(3, make_state(3, mesh), {"samples": 24}, wait=True)
    assert lines[1:] == [f"renamed the damaged checkpoint {tmp_path / '3'} to 3.damaged; delete it to free the space"]
    assert step_folders(tmp_path) == [2, 3]
    checkpoints.close()
    step, state, _ = restore(open_checkpoints(tmp_path)[0], abstract(make_state(0, mesh)))
    assert step == 3
    assert_same(state, make_state(3, mesh))
    assert capfd.readouterr().err == ""


def test_damaged_steps_do_not_count_for_retention(tmp_path, mesh):
    save_all(tmp_path, [1, 2], mesh)
    for step in (5, 6, 7):
        (tmp_path / str(step)).mkdir()
    checkpoints, lines = open_checkpoints(tmp_path, keep_last=2)
    assert restore(checkpoints, abstract(make_state(0, mesh))).step == 2
    assert len(lines) == 3
    assert checkpoints.save(3, make_state(3, mesh), {}, wait=True)
    checkpoints.close()
    assert step_folders(tmp_path) == [2, 3]


def test_only_damaged_steps_start_afresh_and_stay_aside(tmp_path, mesh):
    save_all(tmp_path, [5], mesh)
    truncate(largest_file(tmp_path / "5"))
    checkpoints, lines = open_checkpoints(tmp_path)
    assert checkpoints.restore(abstract(make_state(0, mesh))) is None
    assert checkpoints.save(1, make_state(1, mesh), {}, wait=True)
    checkpoints.close()
    assert len(lines) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "5.damaged"]


def test_swapped_rows_do_not_pass_the_checksum(tmp_path, mesh, monkeypatch):
    from orthros_jax.training import checkpoint

    def read_upside_down(folder, name, leaf):
        array = read_array(folder, name, leaf)
        return array[::-1] if "query" in name else array

    save_all(tmp_path, [1], mesh)
    read_array = checkpoint._read_array
    monkeypatch.setattr(checkpoint, "_read_array", read_upside_down)
    checkpoints, lines = open_checkpoints(tmp_path)
    assert checkpoints.restore(abstract(make_state(0, mesh))) is None
    assert "the data of params/layers/query does not match its checksum" in lines[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float16"])
def test_checksum_sees_every_bit(dtype):
    from orthros_jax.training.checkpoint import _checksums

    values = np.random.default_rng(0).integers(0, 2, size=(3, 5)).astype(jnp.dtype(dtype))
    reference = int(_checksums({"x": jnp.asarray(values)})["x"])
    for bit in range(1 if dtype == "bool" else 8 * values.itemsize):
        flipped = values.copy()
        flipped.view(f"u{values.itemsize}")[2, 3] ^= 1 << bit
        assert int(_checksums({"x": jnp.asarray(flipped)})["x"]) != reference


def replace_leaf(target, **params):
    return dataclasses.replace(target, params={**target.params, **params})


def test_misfit_is_an_error_that_names_the_leaf(tmp_path, mesh):
    save_all(tmp_path, [7], mesh)
    target = abstract(make_state(0, mesh))
    ending = "Use the settings that the run was started with, or another run_dir."
    cases = [
        (
            abstract(make_state(0, mesh, rows=32)),
            "params/layers/query is float32[64, 96] in the checkpoint and float32[32, 96] in this run. ",
        ),
        (
            replace_leaf(target, scale=jax.ShapeDtypeStruct((16,), "float32")),
            "params/scale is bfloat16[16] in the checkpoint and float32[16] in this run. ",
        ),
        (
            replace_leaf(target, gamma=jax.ShapeDtypeStruct((16,), "float32")),
            "params/gamma is absent in the checkpoint and float32[16] in this run. ",
        ),
        (
            dataclasses.replace(target, params={}),
            "params/layers/query is float32[64, 96] in the checkpoint and absent in this run (and 1 more). ",
        ),
    ]
    for wrong, message in cases:
        checkpoints, lines = open_checkpoints(tmp_path)
        with pytest.raises(UserError) as caught:
            checkpoints.restore(wrong)
        assert str(caught.value) == f"checkpoint {tmp_path / '7'} does not fit these settings: {message}{ending}"
        assert lines == []


@pytest.fixture
def small_disk(tmp_path):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs Linux and root")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this container may not mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def incompressible(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (1024, 1024))}


@pytest.mark.parametrize("wait", [False, True])
def test_full_disk(small_disk, wait, capfd, caplog, monkeypatch):
    """The disk fills up while Orbax writes: what the look at its free space cannot foresee."""
    monkeypatch.setattr(Checkpoints, "_require_space", lambda *_: None)
    folder = small_disk / "checkpoints"
    checkpoints, _ = open_checkpoints(folder, keep_last=5)
    saved = []

    def save_until_full():
        for step in range(1, 7):
            checkpoints.save(step, incompressible(step), {"step": step}, wait=wait)
            saved.append(step)

    with pytest.raises(UserError) as caught:
        save_until_full()
    failed = saved[-1] + 1 if wait else saved[-1]
    assert str(caught.value) == (
        f"cannot save step {failed} in {folder}: No space left on device; checkpoint {failed - 1} is intact. "
        "Free space or set run_dir to another disk, then start the same command again to resume."
    )
    checkpoints.close()
    assert sorted(p.name for p in folder.iterdir()) == [str(step) for step in range(1, failed)]
    assert capfd.readouterr().err == ""
    assert [record for record in caplog.records if record.exc_info] == []

    checkpoints, lines = open_checkpoints(folder, keep_last=5)
    step, state, _ = restore(checkpoints, abstract(incompressible(0)))
    assert (step, lines) == (failed - 1, [])
    np.testing.assert_array_equal(state["w"], incompressible(failed - 1)["w"])
    shutil.rmtree(folder / "1")
    assert checkpoints.save(failed, incompressible(failed), {}, wait=True)
    checkpoints.close()


def test_disk_full_from_the_start(small_disk):
    (small_disk / "filler").write_bytes(b"x" * (11 << 20))
    checkpoints, _ = open_checkpoints(small_disk / "checkpoints")
    with pytest.raises(UserError, match="No space left on device; no earlier checkpoint exists"):
        checkpoints.save(1, incompressible(1), {}, wait=True)
    checkpoints.close()


def test_folder_that_cannot_be_made(tmp_path, mesh):
    (tmp_path / "file").write_text("")
    checkpoints, _ = open_checkpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(UserError, match=r"cannot save step 1 in .*: Not a directory; no earlier checkpoint exists"):
        checkpoints.save(1, make_state(1, mesh), {}, wait=True)


WRITER = """
import sys
import jax
from orthros_jax.training.checkpoint import Checkpoints
target = {"w": jax.ShapeDtypeStruct((512, 1024), "float32")}
checkpoints = Checkpoints(sys.argv[1], keep_last=2, keep_every=None)
found = checkpoints.restore(target)
step = found.step if found else 0
if found:
    assert (found.state["w"] == jax.random.normal(jax.random.key(step), (512, 1024))).all()
print("restored", step, flush=True)
while True:
    step += 1
    checkpoints.save(step, {"w": jax.random.normal(jax.random.key(step), (512, 1024))}, {})
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_during_saves(tmp_path):
    seed = time.time_ns() % 2**32
    print("seed", seed)
    numbers = np.random.default_rng(seed)
    last = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        word, _, step = process.stdout.readline().partition(" ")
        assert word == "restored", process.communicate()
        assert int(step) >= last
        assert int(step) == max((int(p.name) for p in tmp_path.iterdir() if p.name.isdecimal()), default=0)
        for _ in range(numbers.integers(2, 6)):
            last = int(process.stdout.readline()) - 1  # a save begins once the one before is committed
        time.sleep(numbers.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
