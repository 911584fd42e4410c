"""python -m orthros_jax compile: whole runs for machines that are not there, and what it refuses."""

import importlib.util
import re
from pathlib import Path

import jax
import pytest
from settings import make_config

from orthros_jax.__main__ import main
from orthros_jax.compilation import command
from orthros_jax.compilation.hlo import Array, Collective
from orthros_jax.compilation.topology import open_topology
from orthros_jax.config import MeshConfig
from orthros_jax.errors import UserError
from orthros_jax.sharding import build_mesh
from orthros_jax.training.lowering import abstract_state
from orthros_jax.training.step import make_program

CONFIGS = Path(__file__).parents[2] / "configs"
REFERENCE_RUN = ["--config", str(CONFIGS / "orthros_1b3_fineweb_edu.yaml")]
needs_compilers = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs the packages of requirements-kernels.txt",
)


def _compile(*arguments):
    return main(["compile", *arguments])


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "preset", "backend", "axes"),
    [
        ("h200:8", "1b3_h200_8", "hopper", "fsdp 8"),
    ],
)
def test_the_reference_run_fits(topology, preset, backend, axes, capsys):
    assert _compile("--topology", topology, *REFERENCE_RUN, "--config", str(CONFIGS / "pods" / f"{preset}.yaml")) == 0
    out, log = capsys.readouterr()
    assert f"dual_stream_attention: impl=auto takes {backend}" in log
    assert "1,364,490,240 parameters; 2,097,152 tokens a step" in out
    assert re.search(rf"Devices .*, {axes}\n", out)
    for kind in ("all-gather", "reduce-scatter"):
        assert re.search(rf"  {kind} +fsdp +[\d,]+ times", out)
    assert "100.0B tokens" in out


@needs_compilers
@pytest.mark.slow
def test_a_run_that_does_not_fit_names_the_largest_arrays(capsys):
    small = ["--model.num_layers", "2", "--model.ffn_dim", "512", "--model.remat", "none"]
    assert _compile("--topology", "h200:8", *REFERENCE_RUN, *small, "--training.accumulation", "1",
                    "--training.batch_size", "8192") == 2  # fmt: skip
    message = capsys.readouterr().err
    assert re.search(r"the step needs [\d.]+ GiB of memory on each h200 chip, which has 139\.80 GiB", message)
    sizes = [float(size) for size in re.findall(r"([\d.]+) GiB  [a-z0-9]+\[", message)]
    assert len(sizes) == 8
    assert sizes == sorted(sizes, reverse=True)


@needs_compilers
def test_machines_by_name():
    counts = {"v5e:16x16": 256, "v6e:16x16": 256, "v5p:8x8x8": 512, "h200:4x8": 32, "h200:8": 8}
    assert {name: len(open_topology(name).devices) for name in counts} == counts
    assert open_topology("h200:4x8").devices_per_host == 8


@needs_compilers
def test_a_slice_that_does_not_exist():
    with pytest.raises(UserError, match="the TPU compiler knows no v5p:3x5x7"):
        open_topology("v5p:3x5x7")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--topology NAME must be given once"),
        (["--topology", "h200:8", "--topology=h200:8"], "--topology NAME must be given once"),
        (["--topology", "v7x:2x2"], "'v7x:2x2' names no devices; write v5e:16x16"),
        (["--topology", "h200:2x2x2"], "h200:2x2x2 is no machine"),
        (["--topology", "v5e:0x4"], "v5e:0x4 is no machine"),
    ],
)
def test_names_that_are_no_machine(arguments, message, capsys):
    assert _compile(*arguments, "--config", str(CONFIGS / "quickstart.yaml")) == 2
    assert message in capsys.readouterr().err


def test_a_compiler_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"compiling for v5e:2x2 needs libtpu; install it with: pip install 'libtpu=="):
        open_topology("v5e:2x2")
    with pytest.raises(UserError, match="needs jax_cuda13_plugin; install it with: pip install -r requirements-kern"):
        open_topology("h200:8")


def test_an_all_reduce_of_whole_weights_is_refused():
    config = make_config({"model.num_layers": 3, "model.vocab_size": 512})
    mesh = build_mesh(MeshConfig(data=2, fsdp=4))
    state = abstract_state(make_program(config, 10), mesh)

    def check(kind, axes, *shape):
        command._refuse_whole_weights([Collective(kind, (Array("f32", shape),), axes, 4, 2, "x")], state, mesh)

    for shape in ((768, 3072), (2, 768, 3072), (768, 512)):  # one layer, the stack, the head
        with pytest.raises(UserError, match="FSDP became an all-reduce of whole weights"):
            check("all-reduce", ("data", "fsdp"), *shape)
    check("all-reduce", ("data",), 768, 3072)  # not over fsdp
    check("all-reduce", ("fsdp",), 192, 3072 // 4)  # a shard
    check("reduce-scatter", ("fsdp",), 768, 3072)
    check("all-reduce", ("fsdp",), 768)  # a norm
    assert jax.tree.leaves(state)
