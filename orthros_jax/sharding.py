"""Where arrays live: the mesh, and one table from parameter names to mesh axes.

Axes of the mesh: `data` replicates parameters, `fsdp` shards their width, `context` cuts sequences, `tensor` shards
heads, feed-forward width and vocabulary. The batch is split over `data` and `fsdp`. All axes are `AxisType.Auto`: the
compiler propagates shardings from the parameters and the batch, and the operations that it must not cut by itself
(embedding, attention and the loss) state theirs through `jax.shard_map`.
"""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orthros_jax.config import Config, ConfigError, MeshConfig, ModelConfig

MESH_AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")

# Logical axis -> mesh axis. Matrices that write to the residual stream are cut along the axes that they contract: the
# TPU compiler makes a reduce-scatter of a gradient that is cut along its first axis, but an all-reduce of the whole
# gradient where it is cut along another. Where fsdp does not divide the heads, their size is cut nevertheless.
_RULES = {
    "vocab": "tensor",
    "heads": "tensor",
    "ffn": "tensor",
    "model": "fsdp",
    "head": None,
    "fused": None,
    "heads_in": ("tensor", "fsdp"),
    "head_in": "fsdp",
    "ffn_in": ("tensor", "fsdp"),
    "residual": None,
    "norm": None,
}

# Name of a parameter (the end of its path) -> logical axes. Layers that are stacked have one more axis in front.
_PARAMETER_AXES = {
    ("embedding", "kernel"): ("vocab", "model"),
    ("query", "kernel"): ("model", "heads", "head"),
    ("query_context", "kernel"): ("model", "heads", "head"),
    ("query_output", "kernel"): ("model", "heads", "head"),
    ("key", "kernel"): ("model", "heads", "head"),
    ("value", "kernel"): ("model", "heads", "head"),
    ("query_key_value", "kernel"): ("model", "heads", "fused", "head"),
    ("output", "kernel"): ("heads_in", "head", "residual"),
    ("gate", "kernel"): ("model", "ffn"),
    ("up", "kernel"): ("model", "ffn"),
    ("gate_up", "kernel"): ("model", "fused", "ffn"),
    ("down", "kernel"): ("ffn_in", "residual"),
    ("head", "kernel"): ("model", "vocab"),
    ("scale",): ("norm",),
    ("gamma",): ("heads", "head"),
    ("beta",): ("heads", "head"),
}


def build_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """Mesh of all devices (or those given); `data: -1` takes what the other axes leave.

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    count, inner = len(devices), config.fsdp * config.context * config.tensor
    data = count // inner if config.data == -1 else config.data
    if data * inner != count:
        raise ConfigError(
            "mesh",
            f"data {config.data} x fsdp {config.fsdp} x context {config.context} x tensor {config.tensor} does not "
            f"make the {count} devices of this run; choose axes whose product is that number",
        )
    shape = (data, config.fsdp, config.context, config.tensor)
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def check_divisible(config: Config, mesh: Mesh) -> None:
    """Refuses a batch or model that the mesh does not cut into equal parts.

    Raises:
      ConfigError: names both numbers and the nearest values that work.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    unit = shards * config.training.accumulation
    batch = config.training.batch_size
    if batch % unit:
        lower, upper = batch // unit * unit, -(-batch // unit) * unit
        nearest = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigError(
            "training.batch_size",
            f"{batch} is not a multiple of {shards} batch shards (mesh.data x mesh.fsdp) x "
            f"{config.training.accumulation} accumulation steps; the nearest that work: {nearest}",
        )
    context, length = mesh.shape["context"], config.data.sequence_length
    if context > 1 and length % (2 * context):
        raise ConfigError(
            "mesh.context",
            f"each of {context} parts of a sequence is computed in two halves, and 2 x {context} does not divide "
            f"data.sequence_length {length}; choose another of the two",
        )
    check_model_divisible(config.model, mesh)


def check_model_divisible(model: ModelConfig, mesh: Mesh) -> None:
    """Refuses a model that the mesh does not cut into equal parts.

    Raises:
      ConfigError: names both numbers.
    """
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    for key, axis, size in (
        ("num_heads", "tensor", tensor),
        ("num_kv_heads", "tensor", tensor),
        ("ffn_dim", "tensor", tensor),
        ("vocab_size", "tensor", tensor),
        ("model_dim", "fsdp", fsdp),
    ):
        if getattr(model, key) % size:
            raise ConfigError(
                f"mesh.{axis}",
                f"{size} does not divide model.{key} {getattr(model, key)}; choose a divisor of it",
            )
    if model.ffn_dim % (fsdp * tensor):
        raise ConfigError(
            "mesh.fsdp",
            f"{fsdp} x mesh.tensor {tensor} does not divide model.ffn_dim {model.ffn_dim}; choose a divisor of it",
        )
    if model.num_heads % (fsdp * tensor) and model.head_dim % fsdp:
        raise ConfigError(
            "mesh.fsdp",
            f"{fsdp} divides neither model.num_heads {model.num_heads} / mesh.tensor {tensor} nor model.head_dim "
            f"{model.head_dim}; choose a divisor of one of them",
        )


def parameter_spec(path: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    """Partition of one parameter, by the end of its path; a leading axis of stacked layers stays whole."""
    axes = next((axes for name, axes in _PARAMETER_AXES.items() if path[-len(name) :] == name), None)
    if axes is None:
        raise KeyError(f"no sharding for parameter {'/'.join(path)}")
    if axes[0] == "heads_in" and shape[-3] % (mesh.shape["tensor"] * mesh.shape["fsdp"]):
        axes = ("heads", "head_in", "residual")
    mesh_axes: list = [_RULES[axis] for axis in axes]
    return P(*[None] * (len(shape) - len(axes)), *mesh_axes)


def state_shardings(abstract_state, mesh: Mesh):
    """Sharding of every array of a training state; moments and averages follow the parameter whose path they end in."""

    def sharding(path, leaf):
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        is_parameter = bool(names) and leaf.ndim > 0
        return NamedSharding(mesh, parameter_spec(names, leaf.shape, mesh) if is_parameter else P())

    return jax.tree_util.tree_map_with_path(sharding, abstract_state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch: its rows over both batch axes."""
    return NamedSharding(mesh, P(BATCH_AXES))


def rows_spec(*lengths: int) -> P:
    """Partition of arrays [B, rows, ...]: the batch over its axes, rows over `context` where all `lengths` allow it."""
    parts = jax.sharding.get_abstract_mesh().shape.get("context", 1)
    is_cut = parts > 1 and bool(lengths) and all(length % (2 * parts) == 0 for length in lengths)
    return P(BATCH_AXES, "context" if is_cut else None)


def constrain_rows(x: jax.Array) -> jax.Array:
    """Keeps activations [B, rows, ...] split by rows, so that the compiler gathers weights instead of them."""
    if not mesh_is_set():
        return x
    return jax.lax.with_sharding_constraint(x, rows_spec(x.shape[1]))


def host_share(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """(p, P): this process reads the p-th of P equal parts of each batch.

    Processes whose devices differ along `context` or `tensor` alone hold the same rows and so read the same part.

    Raises:
      ConfigError: the rows of two processes overlap in part.
    """
    rows: dict[int, set[int]] = {}
    for device, (index,) in batch_sharding(mesh).devices_indices_map((batch_size,)).items():
        rows.setdefault(device.process_index, set()).update(range(*index.indices(batch_size)))
    parts = sorted({tuple(sorted(held)) for held in rows.values()})
    if sum(map(len, parts)) != batch_size or len({len(part) for part in parts}) != 1:
        raise ConfigError(
            "mesh",
            "the devices of a process do not hold whole parts of a batch; choose mesh.tensor x mesh.context as a "
            "divisor or a multiple of the devices of one process",
        )
    return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)


def mesh_is_set() -> bool:
    """Whether the code being traced runs under a mesh (`jax.set_mesh`)."""
    return not jax.sharding.get_abstract_mesh().empty


def on_each_device(function, in_specs, out_specs):
    """`function` on each device's own part of its arguments; as it is where no mesh is set (`jax.set_mesh`)."""
    if not mesh_is_set():
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
