"""What JAX 0.11's interpreter of Mosaic GPU kernels lacks and the Hopper kernels need; for tests alone.

* `wgmma` with its first operand in registers, and `pl.run_state`.
* Matrix products are asynchronous: they read shared memory until a wait covers them (`wgmma_wait`,
  `wgmma_accumulator_load`, the end of `run_state`). JAX's own interpreter neither checks their operands for races nor
  knows the waits, so that a stage that is handed back too early goes unseen.
* A race fails the test: JAX prints it and goes on.

It reaches into private modules of JAX, hence the check of its version. Drop a part when JAX does it itself (the marks
"TODO" in `jax/_src/pallas/mosaic_gpu/interpret` name what is missing), and the module with the last of them.
"""

from collections import defaultdict, deque
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from unittest import mock

import jax
from jax._src import callback
from jax._src.pallas import primitives
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.state import discharge
from jax._src.state.types import AbstractRef

# Imported by name: their types differ between the versions of JAX, and the type checker may see an older one.
gpu_callbacks, jaxpr_interpret, interpret_params, shared_memory = (
    import_module(f"jax._src.pallas.mosaic_gpu.interpret.{name}")
    for name in ("gpu_callbacks", "jaxpr_interpret", "params", "shared_memory")
)

_ASYNCHRONOUS_THREADS = 61
"""Positions in the vector clocks that asynchronous operations take in turn; two that share one may hide a race."""


@contextmanager
def interpreted():
    """Within it, Mosaic GPU kernels run in the interpreter, on memory that starts as NaN.

    Raises:
        AssertionError: on leaving, if a kernel had a race; the standard output says where.
    """
    assert jax.__version_info__[:2] == (0, 11), f"written for the interpreter of JAX 0.11, this is {jax.__version__}"
    races = []
    new_state = gpu_callbacks.GPURaceDetectionState

    def race_detection_state(**kwargs):
        races.append(new_state(**kwargs))
        return races[-1]

    params = interpret_params.InterpretGPUParams(
        detect_races=True, uninitialized_memory="nan", num_tma_threads_per_device=_ASYNCHRONOUS_THREADS
    )
    interpreter = jaxpr_interpret.JaxprInterpreter
    with (
        mock.patch.object(shared_memory, "GPUSharedMemory", _Memory),
        mock.patch.object(gpu_callbacks, "GPURaceDetectionState", race_detection_state),
        mock.patch.object(interpreter, "interpret", _with_our_primitives(interpreter.interpret)),
        mock.patch.object(interpreter, "_interpret_run_scoped_p", _dispatch(interpreter._interpret_run_scoped_p)),
        mock.patch.object(interpreter, "_interpret_wgmma_ref_p", _interpret_wgmma),
        mock.patch.object(gpu_callbacks, "wgmma_accumulator_deref", _accumulator_load),
        interpret_params.force_gpu_interpret_mode(params),
    ):
        try:
            yield
        finally:
            jax.effects_barrier()
            gpu_callbacks.reset_gpu_interpret_mode_state()
    assert races, "no kernel was interpreted"
    assert not any(state.races_found for state in races), "race in a kernel, see the output"


# JaxprInterpreter.interpret is one match over primitives. Those that it lacks travel through its case of run_scoped,
# which gives the token that orders the callbacks and takes back any number of results.


def _with_our_primitives(original):
    def interpret(self, jaxpr, token, *args):
        equations = [
            eqn.replace(primitive=primitives.run_scoped_p, params={**eqn.params, "handler": _HANDLERS[eqn.primitive]})
            if eqn.primitive in _HANDLERS
            else eqn
            for eqn in jaxpr.eqns
        ]
        return original(self, jaxpr.replace(eqns=equations), token, *args)

    return interpret


def _dispatch(run_scoped):
    def interpret(self, eqn, token, get_invals):
        return eqn.params.get("handler", run_scoped)(self, eqn, token, get_invals)

    return interpret


def _interpret_run_state(self, eqn, token, get_invals):
    """Accumulators start from the operands' values; references that the body closes over pass through."""
    values = get_invals()
    held = [not isinstance(var.aval, AbstractRef) for var in eqn.outvars]
    keys = list(values)
    for i, value in enumerate(values):
        if held[i]:
            token, request = gpu_callbacks.call_make_allocation_request_array(
                token=token,
                compute_unit=self.thread,
                memory_space_id=shared_memory.get_memory_space_idx(core.MemorySpace.REGS),
            )
            token, keys[i] = gpu_callbacks.call_allocate_buffer(
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_request_as_array=request,
                value=value,
                source_info=eqn.source_info,
            )
    token, _ = self.interpret(eqn.params["jaxpr"], token, *keys)
    results = list(values)
    for i, var in enumerate(eqn.outvars):
        if held[i]:
            token, results[i] = callback.io_callback(
                partial(_accumulator_load, source_info=eqn.source_info),
                (gpu_callbacks.TOKEN_SHAPE_DTYPE, jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)),
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                acc_allocation_key_as_array=keys[i],
                wait_n=0,
            )
            token = gpu_callbacks.call_deallocate_buffer(
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_key_as_array=keys[i],
                source_info=eqn.source_info,
            )
    return token, results


def _interpret_wgmma_wait(self, eqn, token, get_invals):
    del get_invals
    token = callback.io_callback(
        partial(_wgmma_wait, n=eqn.params["n"]), gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, thread=self.thread
    )
    return token, []


_HANDLERS = {discharge.run_state_p: _interpret_run_state, gpu_primitives.wgmma_wait_p: _interpret_wgmma_wait}


def _interpret_wgmma(self, eqn, token, get_invals):
    acc, a, b, *leaves = get_invals()
    trees = [eqn.params[f"{name}_transforms_tree"] or jax.tree.structure([]) for name in ("acc", "a", "b")]
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    refs = [
        jaxpr_interpret.resolve_ref(var.aval, key, list_)
        for var, key, list_ in zip(eqn.invars[:3], (acc, a, b), transforms, strict=True)
    ]
    in_registers = not isinstance(eqn.invars[1].aval, AbstractRef)
    token = callback.io_callback(
        partial(_wgmma, in_registers=in_registers, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        acc=refs[0],
        a=refs[1],
        b=refs[2],
    )
    return token, []


class _Memory(shared_memory.GPUSharedMemory):
    """Knows also the unfinished matrix products of each thread, oldest first: accumulator and clock of the reads."""

    def reset_per_cluster_state(self):
        super().reset_per_cluster_state()
        self.products = defaultdict(deque)


def _locate(memory, ref):
    key_array, transforms = ref
    key = gpu_callbacks.HostAllocationKey.from_array(key_array)
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    return key, memory.access(key, transforms)


@gpu_callbacks.fail_on_exception
def _wgmma(*, token, mesh_location, thread, acc, a, b, in_registers, source_info):
    del mesh_location
    memory = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())

    def operand(ref):
        key, access = _locate(memory, ref)
        gpu_callbacks.get_races().check_read(thread, clock.async_smem_clock.copy(), key, access, source_info)
        return memory.get_buffer_content(key, access, thread)[0]

    a, b = a[0] if in_registers else operand(a), operand(b)
    key, access = _locate(memory, acc)
    total = memory.get_buffer_content(key, access, thread)[0]
    assert total is not None
    memory.store_buffer_content(key, access, total + a.astype(total.dtype) @ b.astype(total.dtype), thread)
    memory.products[thread].append((key, clock))
    return token


@gpu_callbacks.fail_on_exception
def _wgmma_wait(*, token, thread, n):
    memory = gpu_callbacks._get_shared_memory()
    products = memory.products[thread]
    while len(products) > n:
        _, clock = products.popleft()
        with memory.lock:
            memory.clocks[thread].update(clock)
    return token


@gpu_callbacks.fail_on_exception
def _accumulator_load(*, token, mesh_location, thread, acc_allocation_key_as_array, wait_n, source_info=None):
    del mesh_location, source_info
    if wait_n is not None:
        _wgmma_wait(token=token, thread=thread, n=wait_n)
    memory = gpu_callbacks._get_shared_memory()
    key, access = _locate(memory, (acc_allocation_key_as_array, ()))
    if any(key == other for other, _ in memory.products[thread]):
        raise ValueError(f"an accumulator is read while a product that adds to it is in flight (wait_n={wait_n})")
    return token, memory.get_buffer_content(key, access, thread)[0]
