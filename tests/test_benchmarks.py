"""The attention benchmark: its arithmetic by brute force, its checks, and a run on the processor."""

import json
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import candidates, kernels, profile, train_step
from benchmarks.candidates import Candidate, training_candidates, training_program
from benchmarks.kernels import Ceilings, Task, WrongResult
from benchmarks.parity import OURS, PEERS, Reference, in_float32, violations
from benchmarks.shapes import SHAPES, STREAMS, TINY_SHAPES, Cost, DecodeShape, TrainingShape
from pallas_kernels.dual_stream_attention import api, reference, xla

UNEVEN = TrainingShape(3, 50, 6, 2, 8, window=7, documents=(20, 1, 6, 23))
TRAINING = {
    "whole": TrainingShape(2, 40, 4, 2, 8, window=9),
    "window beyond T": TrainingShape(1, 5, 2, 2, 8),
    "packed": UNEVEN,
}
MILLI = 1e-3


# Arithmetic


@pytest.mark.parametrize("name", TRAINING)
def test_pairs_are_those_of_the_mask(name):
    shape = TRAINING[name]
    for stream, window in (("ctx", shape.window), ("out", None)):
        visible = reference.visible_keys(shape.batch, shape.length, window=window, segment_ids=shape.segment_ids())
        assert visible.sum() == shape.batch * shape.pairs(stream)


def test_rows_of_packed_shapes_differ_and_are_full():
    ids = UNEVEN.segment_ids()
    assert ids is not None
    assert ids.shape == (3, 50)
    assert ids.min() == 1
    assert (np.diff(ids, axis=1) >= 0).all()
    assert not (ids[0] == ids[1]).all()
    assert all(sum(s.documents or (s.length,)) == s.length for s in SHAPES.values() if isinstance(s, TrainingShape))


def input_bytes(shape):
    return {name: x.size * x.dtype.itemsize for name, x in jax.eval_shape(shape.inputs).items()}


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("case", STREAMS)
def test_cost_of_a_training_shape(name, case):
    shape, streams = TRAINING[name], STREAMS[case]
    inputs = input_bytes(shape)
    keys = inputs["k"] + inputs["v"]
    queries = sum(inputs[f"q_{s}"] for s in streams)
    lse = len(streams) * 4 * shape.batch * shape.num_heads * shape.length
    products = sum(shape.batch * shape.num_heads * shape.pairs(s) * 2 * shape.head_size for s in streams)
    # Forward: q k, p v; q, k, v in, o out.
    assert shape.cost(streams, False) == (2 * products, queries + keys + queries)
    # Backward: scores again, dp, dq, dk, dv; q, k, v, o, do, lse in, dq, dk, dv out.
    backward_bytes = (3 * queries + keys + lse) + (queries + keys)
    assert shape.cost(streams, True) == (7 * products, 2 * queries + keys + lse + backward_bytes)


def test_cost_agrees_with_published_numbers():
    """FlashAttention-3, full causal, forward and backward, on an H200: 1.015 ms are 474 TFLOP/s."""
    shape = SHAPES["b8_t2048_h128"]
    assert isinstance(shape, TrainingShape)
    assert shape.cost(("out",), True).operations / 1.015e-3 / 1e12 == pytest.approx(474, abs=0.5)


def test_cost_of_a_decode_shape():
    shape = DecodeShape(2, 300, 4, 2, 64, window=32)
    inputs = input_bytes(shape)
    cache, queries = inputs["k"] + inputs["v"], inputs["q_ctx"]
    products = 2 * 2 * shape.batch * shape.num_heads * shape.head_size
    assert shape.cost(("out",)) == (products * 300, cache + 2 * queries)
    assert shape.cost(("ctx", "out")) == (products * (300 + 32), cache + 4 * queries)
    assert shape.inputs()["lengths"].tolist() == [300, 300]


def test_floor_is_the_larger_of_operations_and_bytes():
    ceilings = Ceilings(operations=100.0, bytes=10.0)
    assert ceilings.floor(Cost(200, 10)) == 2.0
    assert ceilings.floor(Cost(200, 50)) == 5.0


def task(case, parts, peers):
    programs = [Candidate("ours xla", False, lambda x: x), *(Candidate(name, True, lambda x: x) for name in peers)]
    return Task(case, "fwd", Cost(2e9, 3e6), parts, programs)


TASKS = [
    task("both", ("full", "window"), []),
    task("window", ("window",), ["A", "B"]),
    task("full", ("full",), ["A", "B"]),
]
SECONDS = {
    "both fwd": {"ours xla": [6 * MILLI, 4 * MILLI, 5 * MILLI]},
    # By its median B is the faster one, by its mean and its minimum A.
    "window fwd": {"ours xla": [MILLI], "A": [1 * MILLI, 3 * MILLI, 3 * MILLI], "B": [2 * MILLI, 2 * MILLI, 9 * MILLI]},
    "full fwd": {"ours xla": [1 * MILLI], "A": [8 * MILLI], "B": [9 * MILLI]},
}


def test_table_compares_with_the_best_composition_of_peers():
    rows = {(r["case"], r["candidate"]): r for r in kernels.table(TASKS, SECONDS, Ceilings(1e12, 1e9))}
    best = rows["both fwd", "best peers: A (full) + B (window)"]
    assert best["ms"] == pytest.approx(10)
    ours = rows["both fwd", "ours xla"]
    assert (ours["ms"], ours["lowest_ms"], ours["highest_ms"]) == pytest.approx((5, 4, 6))
    assert ours["time_over_best_peers"] == pytest.approx(0.5)
    assert (ours["tflops"], ours["gbps"]) == pytest.approx((2e9 / 5e-3 / 1e12, 3e6 / 5e-3 / 1e9))
    assert ours["floor_over_time"] == pytest.approx(3 / 5)
    assert rows["window fwd", "ours xla"]["time_over_best_peers"] == pytest.approx(1 / 2)
    assert rows["window fwd", "A"]["time_over_best_peers"] == pytest.approx(3 / 2)
    assert [r["candidate"] for r in kernels.table(TASKS, SECONDS, Ceilings(1, 1)) if r["case"] == "full fwd"] == [
        "ours xla",
        "A",
        "B",
    ]


def test_without_a_peer_for_each_part_there_is_no_ratio():
    seconds = SECONDS | {"window fwd": {"ours xla": [MILLI]}}
    rows = {(r["case"], r["candidate"]): r for r in kernels.table(TASKS, seconds, Ceilings(1e12, 1e9))}
    assert rows["both fwd", "ours xla"]["time_over_best_peers"] is None
    assert rows["window fwd", "ours xla"]["time_over_best_peers"] is None
    assert rows["full fwd", "ours xla"]["time_over_best_peers"] == pytest.approx(1 / 8)


def test_programs_take_turns():
    called = []
    runs = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    times = kernels.alternate(runs, repeats=3)
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    warm_up, turn = ["a", "b"] * 2, ["a"] * kernels.CALLS + ["b"] * kernels.CALLS
    assert called == warm_up + turn * 3


def test_slow_programs_are_called_less_often(monkeypatch):
    now, called = [0.0], []
    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(seconds):
        called.append(seconds)
        now[0] += seconds

    runs = {name: partial(slow, share * kernels.SECONDS) for name, share in (("slow", 0.3), ("very slow", 7.0))}
    times = kernels.alternate(runs, repeats=1)
    assert times["slow"] == pytest.approx([0.3 * kernels.SECONDS])
    assert times["very slow"] == pytest.approx([7 * kernels.SECONDS])
    assert len(called) == 2 * 2 + 3 + 1


# Parity


def reference_of(truth, yardstick) -> Reference:
    return Reference({"dk": jnp.asarray(truth)}, {"dk": jnp.asarray(yardstick)})


def test_violations():
    truth = np.linspace(-1, 1, 64, dtype=np.float32)
    yardstick_error = np.full(64, 1e-3, np.float32)
    yardstick_error[5] = 1e-2
    known = reference_of(truth, truth + yardstick_error)

    def found(error, factor=OURS):
        return violations({"dk": jnp.asarray(truth + error)}, known, factor)

    assert found(1.9 * yardstick_error) == []
    assert found(np.where(np.arange(64) == 7, 2.5e-2, 0))[0].startswith("dk: maximum error 0.025 above 0.02")
    (message,) = found(np.full(64, 1.5e-2))
    assert message.startswith("dk: RMS error")
    assert len(found(np.full(64, np.nan))) == 2
    assert found(4 * yardstick_error) != []
    assert found(4 * yardstick_error, PEERS) == []
    # The slack: 1e-5 of the largest value where the yardstick happens to be exact.
    exact = reference_of(truth, truth)
    assert violations({"dk": jnp.asarray(truth + np.float32(8e-6))}, exact, OURS) == []
    assert violations({"dk": jnp.asarray(truth + np.float32(3e-5))}, exact, OURS) != []


def refused(inputs):
    raise NotImplementedError("op: impl='x' is not possible here: it needs a y\nand more")


def broken(inputs):
    raise RuntimeError("out of memory")


def test_why_a_program_is_not_timed():
    truth = jnp.ones(8)
    known = reference_of(truth, truth + 1e-3)

    def reason(program, is_peer):
        return kernels.why_not(Candidate("it", is_peer, program), program, {"dk": truth}, known)

    def wrong(inputs):
        return {"dk": 2 * inputs["dk"]}

    def rough(inputs):
        return {"dk": inputs["dk"] + 4e-3}

    assert reason(lambda inputs: inputs, True) is None
    assert reason(lambda inputs: inputs, False) is None
    assert reason(rough, True) is None
    with pytest.raises(WrongResult):
        reason(rough, False)
    assert reason(refused, True) == reason(refused, False) == "it needs a y"
    assert reason(broken, True) == "RuntimeError: out of memory"
    assert (reason(wrong, True) or "").startswith("wrong results: dk: maximum error 1 above")
    with pytest.raises(WrongResult, match="it failed: RuntimeError"):
        reason(broken, False)
    with pytest.raises(WrongResult, match="it breaks the numerics rule: dk: maximum"):
        reason(wrong, False)


def test_errors_of_tracing_and_of_compiling_are_kept():
    compiled = kernels.compile_all({"good": lambda x: {"y": 2 * x["x"]}, "bad": refused}, {"x": jnp.ones(3)})
    assert isinstance(compiled["bad"], NotImplementedError)
    assert compiled["good"]({"x": jnp.ones(3)})["y"].tolist() == [2, 2, 2]


# Programs


@pytest.mark.parametrize("case", STREAMS)
def test_training_programs_are_the_operation(case):
    inputs = in_float32(lambda inputs: inputs)(UNEVEN.inputs())
    found = jax.jit(training_program(UNEVEN, case, gradients=True))(inputs)
    x = {name: np.asarray(array) for name, array in inputs.items()}
    for stream in {"ctx", "out"} - set(STREAMS[case]):
        x[f"do_{stream}"] = np.zeros_like(x[f"do_{stream}"])
    operands, mask = (x["q_ctx"], x["q_out"], x["k"], x["v"]), {"window": 7, "segment_ids": x["segment_ids"]}
    values = reference.dual_stream_attention(*operands, **mask)
    grads = reference.dual_stream_attention_grad(*operands, x["do_ctx"], x["do_out"], **mask)
    truth = dict(zip(("o_ctx", "o_out", "dq_ctx", "dq_out", "dk", "dv"), (*values, *grads), strict=True))
    assert set(found) == {f"{kind}_{stream}" for kind in ("o", "dq") for stream in STREAMS[case]} | {"dk", "dv"}
    for name, array in found.items():
        # Sums of 50 float32 products of numbers around 1.
        np.testing.assert_allclose(array, truth[name], atol=1e-5, rtol=1e-5, err_msg=name)
    forward = jax.jit(training_program(UNEVEN, case, gradients=False))(inputs)
    assert set(forward) == {f"o_{stream}" for stream in STREAMS[case]}
    assert all((forward[name] == found[name]).all() for name in forward)


def test_our_backends_are_timed_but_xla_where_it_is_slow():
    shape = SHAPES["b8_t2048_h128"]
    assert isinstance(shape, TrainingShape)
    ours = {p: [c.name for c in training_candidates(shape, "both", p)] for p in (False, True)}
    assert ours == {
        False: ["ours hopper", "ours cudnn"],
        True: ["ours hopper", "ours cudnn"],
    }


# Peers


def fake_flash_attn3():
    """Stands in for flash-attn3-jax: the same arguments, on our XLA attention."""

    def attend(q, k, v, segment_ids, softmax_scale, is_causal=False, window_size=(-1, -1)):
        assert q.shape[-1] == 128
        assert is_causal == (window_size == (-1, -1))
        window = None if is_causal else window_size[0] + 1
        options = {"window": window, "segment_ids": segment_ids, "scale": softmax_scale, "impl": "xla"}
        return api.cross_attention(q, k, v, **options)

    def flash_mha(q, k, v, **options):
        return attend(q, k, v, None, **options)

    def flash_mha_varlen(q, k, v, starts, *, max_seqlen_q, max_seqlen_k, **options):
        assert max_seqlen_q == max_seqlen_k == 40
        ids = jnp.searchsorted(starts, jnp.arange(len(q)), side="right")
        return attend(q[None], k[None], v[None], ids[None], **options)[0]

    def flash_mha_with_kvcache(q, k, v, num_splits):
        assert num_splits > 1
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")

    return SimpleNamespace(
        flash_mha=flash_mha, flash_mha_varlen=flash_mha_varlen, flash_mha_with_kvcache=flash_mha_with_kvcache
    )


def fake_jla(extra=0):
    """Stands in for jla; its windows are `extra` keys too long."""

    def flash_attention(q, k, v, *, segment_ids, sliding_window, backward):
        assert backward in ("ranged", "fused")
        window = None if sliding_window is None else sliding_window + extra
        return api.cross_attention(q, k, v, window=window, segment_ids=segment_ids, impl="xla")

    return SimpleNamespace(flash_attention=flash_attention)


@pytest.fixture
def peers(monkeypatch):
    """Sets which modules of peers exist; None is an absent one."""

    def install(**modules):
        for name, found in {"flash_attn3_jax": None, "jla": None, "tokamax": None, **modules}.items():
            name = "jla.ops.mosaic_gpu.attention" if name == "jla" else name
            monkeypatch.setitem(sys.modules, name, found)

    return install


@pytest.mark.parametrize("case", ["window", "full"])
@pytest.mark.parametrize("name", ["tiny", "tiny_packed"])
def test_peers_are_asked_for_the_same_attention(name, case, peers):
    shape = TINY_SHAPES[name]
    assert isinstance(shape, TrainingShape)
    inputs = shape.inputs()
    truth = jax.jit(training_program(shape, case, False))(inputs)

    def differences(extra):
        peers(flash_attn3_jax=fake_flash_attn3(), jla=fake_jla(extra))
        found = {c.name: c.program for c in training_candidates(shape, case, False) if c.name in ("FA3", "jla")}
        assert set(found) == {"FA3", "jla"}
        return {
            key: max(float(jnp.abs(truth[o] - y).max()) for o, y in jax.jit(program)(inputs).items())
            for key, program in found.items()
        }

    # The fakes compute the same sums in the same blocks, but in longer or padded arrays: bfloat16 may round apart.
    assert max(differences(0).values()) < 0.02
    if case == "window":
        assert differences(1)["jla"] > 0.2


# Runs


def test_decode_run_on_a_processor(tmp_path, capsys, monkeypatch, peers):
    peers(flash_attn3_jax=fake_flash_attn3())
    monkeypatch.setattr(kernels, "CALLS", 2)
    kernels.main(["--shape", "tiny_decode", "--repeats", "1", "--results", str(tmp_path)])
    rows = json.loads((tmp_path / "kernels_cpu.json").read_text())["shapes"]["tiny_decode"]["rows"]
    found = {(row["case"], row["candidate"].partition(":")[0]) for row in rows}
    splits = {("one row fwd", f"FA3, {n} splits") for n in (8, 16, 32)}
    assert found == splits | {("pair fwd", "ours xla"), ("pair fwd", "best peers"), ("one row fwd", "ours xla")}
    assert "not run: ours triton: it needs an NVIDIA GPU" in capsys.readouterr().out


@pytest.mark.slow
def test_run_on_a_processor(tmp_path, capsys, monkeypatch, peers):
    peers(flash_attn3_jax=fake_flash_attn3())
    monkeypatch.setattr(kernels, "CALLS", 2)
    kernels.main(["--shape", "tiny", "--repeats", "3", "--results", str(tmp_path)])
    printed = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert path.name == "kernels_cpu.json"
    result = json.loads(path.read_text())
    assert result["device"] == "cpu"
    assert result["versions"]["jax"] == jax.__version__
    assert result["command"] == f"python -m benchmarks.kernels --shape tiny --repeats 3 --results {tmp_path}"
    assert set(result) >= {"driver", "date", "commit", "ceilings"}
    assert result["ceilings"]["assumed"] == {"operations": 790e12, "bytes": 4.3e12}
    assert min(result["ceilings"]["measured"].values()) > 0
    rows = result["shapes"]["tiny"]["rows"]
    found = {}
    for row in rows:
        found.setdefault(row["case"], set()).add(row["candidate"].partition(":")[0])
        assert row["ms"] > 0
        assert row["time_over_best_peers"] > 0
        assert f"{row['ms']:9.4f}" in printed
    both, single = {"ours xla", "best peers"}, {"ours xla", "FA3"}
    assert found == {
        f"{case} {passes}": both if case == "both" else single for case in STREAMS for passes in ("fwd", "fwd+bwd")
    }
    not_run = result["shapes"]["tiny"]["not_run"]
    assert any(reason.startswith("tokamax: ModuleNotFoundError") for reason in not_run)
    assert any(reason.startswith("ours hopper: it needs a Hopper GPU") for reason in not_run)
    assert all(f"not run: {reason}" in printed for reason in not_run)


def wrong_backend(flaw) -> ModuleType:
    """The XLA backend with a flaw in what it is given or in what it returns."""
    backend = ModuleType("wrong")
    vars(backend).update(unsupported=xla.unsupported, attention=flaw)
    return backend


def window_too_long(streams, k, v, segment_ids, scale):
    streams = tuple(s if s.window is None else s._replace(window=s.window + 1) for s in streams)
    return xla.attention(streams, k, v, segment_ids, scale)


def gradient_of_values_off(streams, k, v, segment_ids, scale):
    return xla.attention(streams, k, v + 0.02 * (v - jax.lax.stop_gradient(v)), segment_ids, scale)


@pytest.mark.slow
@pytest.mark.parametrize(("flaw", "output"), [(window_too_long, "o_ctx"), (gradient_of_values_off, "dv")])
def test_wrong_kernels_get_no_speed(flaw, output, tmp_path, capsys, monkeypatch, peers):
    peers()
    monkeypatch.setitem(api._BACKENDS, "hopper", wrong_backend(flaw))
    monkeypatch.setattr(candidates, "BACKENDS", {"hopper": (True,)})
    monkeypatch.setattr(kernels, "STREAMS", {"both": STREAMS["both"]})
    with pytest.raises(SystemExit) as end:
        kernels.main(["--shape", "tiny", "--results", str(tmp_path)])
    # A message as the code is printed to stderr, with exit code 1.
    assert "tiny: ours hopper breaks the numerics rule" in str(end.value.code)
    assert f"{output}: " in str(end.value.code)
    assert "ours hopper" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_large_shapes_need_a_gpu(capsys):
    with pytest.raises(SystemExit) as end:
        kernels.main(["--shape", "tiny", "b8_t2048_h128"])
    assert end.value.code == 2
    assert "need an NVIDIA GPU" in capsys.readouterr().err


PROGRAM = """HloModule jit_train_step

%fused_add (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%param_0, %param_0), metadata={op_name="jit(train_step)/optimizer/add"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %cublas-gemm.1 = f32[8]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %cublas-gemm.2 = f32[8]{0} custom-call(%x), custom_call_target="__cublas$gemm", metadata={op_name="a/loss_head/dot"}
  ROOT %loop_add_fusion.1 = f32[8]{0} fusion(%cublas-gemm.1), kind=kLoop, calls=%fused_add
}
"""


def test_kernels_are_told_by_their_instruction_and_what_is_fused_in_it():
    texts = profile.instruction_texts(PROGRAM)
    assert profile.kind("nvjet_hsh_128x256", texts["cublas-gemm.1"]) == "matrix products"
    assert profile.kind("nvjet_hsh_128x256", texts["cublas-gemm.2"]) == "loss head"
    assert profile.kind("loop_add_fusion_1", texts["loop_add_fusion.1"]) == "optimizer"
    assert profile.kind("nvjet_hsh_128x256", "") == "matrix products"
    assert profile.kind("loop_add_fusion_1", "") == "other: loop_add_fusion"


def test_time_covered_by_overlapping_intervals():
    assert profile.covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4


def test_train_step_on_a_processor(tmp_path, capsys, monkeypatch):
    # Compiling takes far longer than running.
    monkeypatch.setattr(train_step, "compiler_options", lambda mesh: {"xla_backend_optimization_level": 0})
    train_step.main(["--steps", "2", "--warm_up", "1", "--results", str(tmp_path)])
    (result,) = json.loads((tmp_path / "train_step_cpu.json").read_text()).values()
    assert result["tokens_per_step"] == 8 * 64
    assert result["documents_per_window"] > 1
    assert len(result["losses"]) == result["steps"] == 2
    assert "takes xla" in result["kernels"][0]
    assert "tokens/s" in capsys.readouterr().out
