"""Reading programs: how often collectives run, over which axes, and how many bytes they move."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from orthros_jax.compilation.hlo import Array, Program
from orthros_jax.config import MeshConfig
from orthros_jax.sharding import build_mesh


def _program(body, mesh=None, more=""):
    text = f"""HloModule m

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{more}
ENTRY %main (p: f32[4,8]) -> f32[4,8] {{
  %p = f32[4,8]{{1,0}} parameter(0)
{body}
}}
"""
    return Program(text, mesh or build_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}", ("fsdp",), 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", ("data", "fsdp"), 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", ("tensor",), 2),
        ("replica_groups=[4,2]<=[8]", ("tensor",), 2),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor"), 4),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("fsdp",), 2),
        ("replica_groups={}", ("data", "fsdp", "tensor"), 8),
    ],
)
def test_groups(groups, axes, size):
    (found,) = _program(f"  ROOT %r = f32[4,8]{{1,0}} all-reduce(%p), {groups}, to_apply=%add").collectives()
    assert (found.kind, found.axes, found.group, found.count) == ("all-reduce", axes, size, 1)
    assert found.nbytes == 128
    assert found.sent_bytes == 2 * 128 * (size - 1) / size


def test_groups_in_an_unknown_form_are_refused():
    with pytest.raises(ValueError, match="in a form that is not known"):
        _program("  ROOT %r = f32[4,8] all-reduce(%p), replica_groups=@new, to_apply=%add").collectives()


@pytest.mark.parametrize(
    ("line", "kind", "arrays"),
    [
        ("f32[8,8] all-gather(%p), dimensions={0}, replica_groups=[4,2]<=[8]", "all-gather", ["f32[8,8]"]),
        (
            "((bf16[2,8]{1,0:T(8,128)(2,1)}, f32[4]), (bf16[4,8], f32[8])) all-gather-start(%p), dimensions={0}, "
            "replica_groups=[4,2]<=[8]",
            "all-gather",
            ["bf16[4,8]", "f32[8]"],
        ),
        ("(f32[2,8], f32[4,8]) all-gather-start(%p), replica_groups=[4,2]<=[8]", "all-gather", ["f32[4,8]"]),
        ("f32[4,4] reduce-scatter(%p), dimensions={1}, replica_groups=[4,2]<=[8]", "reduce-scatter", ["f32[4,8]"]),
        ("(f32[4], s32[2]) all-reduce-start(%p), replica_groups=[4,2]<=[8]", "all-reduce", ["f32[4]", "s32[2]"]),
        ("f32[4,8] collective-permute(%p), source_target_pairs={{0,1},{2,3}}", "collective-permute", ["f32[4,8]"]),
    ],
)
def test_arrays(line, kind, arrays):
    (found,) = _program(f"  ROOT %r = {line}").collectives()
    assert found.kind == kind
    assert [str(array) for array in found.arrays] == arrays


@pytest.mark.parametrize("annotation", ["", ', backend_config={"known_trip_count":{"n":"23"}}'])
def test_loops_and_fusions_multiply(annotation):
    more = """
%all-reduce-scatter.1 (q: f32[4,8]) -> f32[2,8] {
  %q = f32[4,8] parameter(0)
  %r = f32[4,8] all-reduce(%q), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %s = f32[2,8] slice(%r), slice={[0:2], [0:8]}
}

%body (t: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %t = (s32[], f32[4,8]) parameter(0)
  %f = f32[2,8] fusion(%t), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %u = (s32[], f32[4,8]) tuple(%t, %f)
}

%condition (t: (s32[], f32[4,8])) -> pred[] {
  %t = (s32[], f32[4,8]) parameter(0)
  %n = s32[] constant(23)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %c = pred[] compare(%i, %n), direction=LT
}
"""
    body = "  ROOT %w = (s32[], f32[4,8]) while(%p), condition=%condition, body=%body" + annotation
    (found,) = _program(body, more=more).collectives()
    assert (found.kind, found.count, found.nbytes) == ("reduce-scatter", 23, 23 * 128)


def test_a_real_program():
    """Eight devices gather a weight in each turn of a loop."""
    mesh = build_mesh(MeshConfig(fsdp=8))

    def step(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    arguments = array(P(("data", "fsdp")), 8, 64), array(P(None, "fsdp"), 5, 64, 64)
    program = Program(jax.jit(step).lower(*arguments).compile().as_text() or "", mesh)
    gathers = [c for c in program.collectives() if c.kind == "all-gather"]
    assert {c.axes for c in gathers} == {("fsdp",)}
    assert sum(c.nbytes for c in gathers) == 5 * 64 * 64 * 4
    assert program.largest_arrays(1)[0][0].size >= 64 * 64


def test_bytes():
    assert [Array(d, (3, 5)).nbytes for d in ("f32", "bf16", "s8", "pred", "f8e4m3fn", "u64")] == [
        60, 30, 15, 15, 15, 120,
    ]  # fmt: skip
