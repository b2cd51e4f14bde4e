"""Microbenchmarks of the local devices: small programs that each time one kind of op.

A program is compiled as a step is, and its HLO is returned with its time, so that the cost model
can predict the same program. All processes run the same programs at the same time.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbench.distributed import stragglers
from maxbench.hardware.gpus import Gpu
from maxbench.host import environment
from maxbench.model import attention
from maxbench.quantization import fp8_per_tensor
from maxbench.sharding import collectives
from maxbench.step import xla_options

BF16 = jnp.bfloat16
GEMM_FLOPS = 1e12  # per program; smaller GEMMs are repeated
AXES = ("dp", "tp")  # of a mesh of all devices: across and within NVLink domains
REPEATS = 5
WARMUP_S = 2.0  # of GEMMs, until clocks and power are stable
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the microbenchmarks."""

    gemms: tuple[tuple[int, int, int, int], ...]  # m, n, k, batch
    attention: tuple[int, int, int]  # tokens, heads, head_dim
    copies: tuple[int, ...]  # bytes
    kernels: tuple[int, ...]  # bytes of an operand
    messages: tuple[int, ...]  # bytes on one device, of the larger of operand and result
    repeats: int  # of a short op in one program
    min_row_s: float  # seconds of calls per reading of the clock


SMALL = Sizes(
    gemms=(
        *((n, n, n, 1) for n in (64, 128, 256)),
        *((128, 512, 128, 1), (128, 128, 256, 1), (128, 128, 512, 1), (512, 128, 128, 1)),
        *((128, 256, 128, 1), (512, 512, 128, 1), (64, 256, 128, 1), (64, 128, 256, 1)),
        *((64, 64, 16, 8), (64, 16, 64, 8), (128, 128, 128, 4), (32, 512, 128, 4)),
    ),
    attention=(128, 4, 32),
    copies=(1 << 20, 1 << 22),
    kernels=tuple(1 << n for n in range(10, 23, 2)),
    messages=(1 << 10, 1 << 14, 1 << 18, 1 << 21),
    repeats=20,
    min_row_s=5e-3,
)
# Of a GPU. GEMMs: square, of a layer of 8B, 70B with tp 4 and 405B with tp 8, LM head, experts.
LARGE = Sizes(
    gemms=(
        *((n, n, n, 1) for n in (512, 1024, 2048, 4096, 8192, 16384)),
        *((4096, 6144, 4096, 1), (4096, 28672, 4096, 1), (4096, 4096, 14336, 1)),
        *((4096, 2560, 8192, 1), (4096, 14336, 8192, 1), (4096, 8192, 7168, 1)),
        *((4096, 2304, 16384, 1), (4096, 13312, 16384, 1), (4096, 16384, 6656, 1)),
        *((8192, 32064, 4096, 1), (1024, 8192, 6144, 2), (1024, 6144, 4096, 8)),
    ),
    attention=(8192, 32, 128),
    copies=(1 << 28, 1 << 30),
    kernels=tuple(1 << n for n in range(12, 29, 2)),
    messages=(1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28),
    repeats=50,
    min_row_s=50e-3,
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A timed program.

    Attributes:
      kind: a kind in from_device.KINDS_OF, or 'kernel'.
      text: scheduled HLO.
      seconds: of one call.
      degrees: mesh axis -> devices along it.
    """

    kind: str
    name: str
    text: str
    seconds: float
    degrees: dict[str, int]


def all_microbenchmarks(sizes: Sizes, devices: Sequence, inside: int) -> Iterator[Measurement]:
    """Runs all microbenchmarks; all processes must iterate over them together.

    Args:
      devices: of all processes; those of an NVLink domain are adjacent.
      inside: devices per NVLink domain.
    """
    measure = functools.partial(_measure, sizes, None)
    for size in sizes.copies:
        yield measure("copy", f"{size / 2**20:g} MiB", lambda x: x + 1, _random(size // 2))
    add = lambda x: jax.lax.fori_loop(0, sizes.repeats, lambda _, y: y + x, x)
    yield measure("launch", f"{sizes.repeats} kernels", add, _random(8, 8).astype(jnp.float32))
    yield measure("host", f"{sizes.repeats} branches", _branches(sizes.repeats), _random(64, 64))
    yield from _kernels(sizes)
    yield from _gemms(sizes)
    yield from _attention(sizes)
    if len(devices) > 1:
        yield from _communication(sizes, Mesh(np.array(devices).reshape(-1, inside), AXES))


def node_size() -> tuple[int, int]:
    """Devices per host, and the number of hosts; all processes must call it."""
    names = {found["host"] for found in stragglers.allgather_json({"host": environment.hostname()})}
    return jax.device_count() // len(names), len(names)


def domain(gpu: Gpu | None) -> int:
    """Devices per NVLink domain: those of a node, or of several nodes for a GPU type whose domain
    spans nodes. All processes must call it."""
    per_node, nodes = node_size()
    return per_node * (gpu.segment(nodes) if gpu else 1)


def _measure(
    sizes: Sizes, mesh: Mesh | None, kind: str, name: str, function: Callable, *args
) -> Measurement:
    """Compiles, runs and times a function; without a mesh, on one device of each process."""
    options = xla_options.XLA_OPTIONS if jax.default_backend() == "gpu" else {}
    program = jax.jit(function, compiler_options=options).lower(*args).compile()
    call = functools.partial(program, *args)
    blocking = lambda: jax.block_until_ready(call())
    # On a CPU, collectives of concurrent calls could deadlock.
    cpu_mesh = mesh if jax.default_backend() == "cpu" else None
    seconds = median_s(blocking if cpu_mesh else call, sizes.min_row_s)
    degrees = dict(mesh.shape) if mesh else {}
    if cpu_mesh:
        seconds /= len(cpu_mesh.local_devices)
    text = program.as_text()
    assert text is not None  # XLA's compilers have it
    return Measurement(kind, name, text, seconds, degrees)


def median_s(call: Callable, min_row_s: float) -> float:
    """Seconds per call: the median over rows of calls and over processes. On a CPU, whose devices
    share the cores, CPU seconds.

    Args:
      min_row_s: seconds of one row.
    """
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter

    def row(times: int) -> float:
        start = clock()
        for _ in range(times):
            out = call()
        jax.block_until_ready(out)
        return (clock() - start) / times

    def over_processes(value: float) -> float:
        return statistics.median(x["value"] for x in stragglers.allgather_json({"value": value}))

    row(1)  # the first call loads the program
    times = max(1, round(min_row_s / over_processes(row(2))))
    return over_processes(statistics.median(row(times) for _ in range(REPEATS)))


def _random(*dims: int) -> jax.Array:
    """Random bf16 values: zeros would draw less power and clock higher."""
    return jax.random.normal(jax.random.key(0), dims, BF16)


def _has_fp8() -> bool:
    capability = getattr(jax.local_devices()[0], "compute_capability", "9.0")
    return float(capability) >= 8.9


def _chain(times: int) -> Callable:
    """Dependent GEMMs, which nothing is fused to."""
    return lambda x: jax.lax.fori_loop(0, times, lambda _, y: y @ x, x)


def _branches(times: int) -> Callable:
    """Host-side branches on the result of a kernel."""
    branch = lambda _, y: jax.lax.cond(y[0, 0] > 0, lambda y: y @ y, lambda y: y + y, y)
    return lambda x: jax.lax.fori_loop(0, times, branch, x)


def _after(seconds: float, ask: Callable[[], T]) -> T:
    time.sleep(seconds)
    return ask()


def sample_under_load(sizes: Sizes, ask: Callable[[], T]) -> T:
    """The result of `ask`, called while the largest GEMM runs, after WARMUP_S seconds of it."""
    m, n, k, batch = max(sizes.gemms, key=math.prod)
    call = functools.partial(jax.jit(jnp.matmul), _random(batch, m, k), _random(batch, k, n))
    with futures.ThreadPoolExecutor(1) as pool:
        sample = pool.submit(_after, WARMUP_S, ask)
        while not sample.done():
            jax.block_until_ready([call() for _ in range(4)])
    return sample.result()


def _gemms(sizes: Sizes) -> Iterator[Measurement]:
    """Each shape in each layout and dtype; on a CPU also in fp32: it may lack bf16 GEMMs."""
    dtypes = {"bf16": BF16} | ({"f32": jnp.float32} if jax.default_backend() == "cpu" else {})
    dtypes |= {"f8e4m3fn": fp8_per_tensor.FORWARD} if _has_fp8() else {}
    every = itertools.product(("mk", "km"), ("kn", "nk"))
    layouts = [layout for layout in every if layout != ("km", "nk")]
    for (m, n, k, batch), (lhs, rhs), dtype in itertools.product(sizes.gemms, layouts, dtypes):
        layout = ("t" if lhs == "km" else "n") + ("t" if rhs == "nk" else "n")
        b = "b" if batch > 1 else ""
        if dtype == "f8e4m3fn" and (layout != "nt" or b):  # the only layout of FP8 GEMMs
            continue
        dims = {"b": batch, "m": m, "n": n, "k": k}
        operands = [_random(*(dims[d] for d in b + x)).astype(dtypes[dtype]) for x in (lhs, rhs)]
        times = int(min(sizes.repeats, max(1, GEMM_FLOPS // (2 * m * n * k * batch))))
        multiply = functools.partial(_multiply, times, f"{b}{lhs},{b}{rhs}->{b}mn")
        name = f"{m} x {n} x {k} x {batch} {layout}"
        yield _measure(sizes, None, f"{dtype} GEMM", name, multiply, *operands, jnp.float32(1))


def _multiply(times: int, dims: str, a, b, scale):
    """Dependent GEMMs. An element of each result is written to the next operand: the compiler would
    hoist a loop-invariant GEMM."""
    read = lambda x: (
        fp8_per_tensor.dequantize(x, scale, BF16) if x.dtype == fp8_per_tensor.FORWARD else x
    )
    gemm = lambda a: jnp.einsum(dims, read(a), read(b))

    def body(_, state):
        a, y = state[0], gemm(state[0])
        return a.at[(0,) * a.ndim].set(y[(0,) * y.ndim].astype(a.dtype)), y

    y = jax.eval_shape(gemm, a)
    return jax.lax.fori_loop(0, times, body, (a, jnp.zeros(y.shape, y.dtype)))[1]


# Memory-bound kernels of a step on an array [rows, 256], by costs.kernel_kind.
KERNELS: Mapping[str, tuple[Callable, ...]] = types.MappingProxyType({
    "plain": (
        lambda x: jax.nn.silu(x) * x,
        lambda x: jax.nn.softmax(x, 1),
        lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True)),
        lambda x: 0.9 * x + x / (jnp.sqrt(0.95 * x * x) + 1e-5),
    ),
    "transposed": (
        lambda x: x.T.reshape(x.shape),
        lambda x: x.reshape(-1, 4, 64).swapaxes(0, 1).reshape(x.shape) * 0.5,
    ),
    "concatenated": (
        lambda x: jnp.concatenate([-x[:, 128:], x[:, :128]], 1) * x,
        lambda x: jnp.concatenate([jax.nn.silu(x[:, :128]), x[:, :128] * x[:, 128:]], 1),
    ),
})  # fmt: skip


def _kernels(sizes: Sizes) -> Iterator[Measurement]:
    """Dependent kernels of each kind and size."""
    unfused = lambda x, kernel: jax.lax.optimization_barrier(kernel(x))
    repeat = lambda kernels, x: jax.lax.fori_loop(
        0, sizes.repeats, lambda _, x: functools.reduce(unfused, kernels, x), x
    )
    for size, (kind, kernels) in itertools.product(sizes.kernels, KERNELS.items()):
        x = _random(size // 1024, 256).astype(jnp.float32)
        loop = functools.partial(repeat, kernels)
        yield _measure(sizes, None, "kernel", f"{size / 1024:g} KiB, {kind}", loop, x)


def _attention(sizes: Sizes) -> Iterator[Measurement]:
    tokens, heads, head_dim = sizes.attention
    kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
    forward, backward = attention.KERNELS[kind]
    q, logits = _random(1, tokens, heads, head_dim), attention.Logits(head_dim**-0.5)
    o, lse = jax.jit(lambda q: forward(q, q, q, True, logits))(q)
    name = f"{tokens} tokens, {heads} heads of {head_dim}"
    passes = {
        "attention forward": (lambda q, *_: forward(q, q, q, True, logits)),
        "attention backward": (lambda q, o, lse: backward(q, q, q, o, lse, o, True, logits)),
    }
    for label, function in passes.items():
        yield _measure(sizes, None, label, name, function, q, o, lse)


def _communication(sizes: Sizes, mesh: Mesh) -> Iterator[Measurement]:
    """Each kind of collective within and across NVLink domains, by size; then one that overlaps
    GEMMs."""
    for axis, link in zip(AXES, ("network", "NVLink"), strict=True):
        if (n := mesh.shape[axis]) == 1:
            continue
        for kind, size in itertools.product(COLLECTIVES, sizes.messages):
            rows = max(1, size // (2 * 256 * n)) * (1 if kind in SHARDED else n)
            step = functools.partial(COLLECTIVES[kind], axis=axis, n=n)
            times = sizes.repeats if size < 1 << 20 else 4
            loop = lambda x, step=step, times=times: jax.lax.fori_loop(
                0, times, lambda _, y: step(y), x
            )
            x = _on_each_device(mesh, rows, 256)
            whole = rows * 512 * (n if kind in SHARDED else 1)
            name = f"{kind}, {whole / 2**20:.3g} MiB, {n} devices"
            yield _measure(sizes, mesh, link, name, _shard(mesh, loop), x)
    axis = max(AXES, key=mesh.shape.get)
    rows = max(sizes.messages) // 512
    square = max(m for m, n, k, batch in sizes.gemms if m == n == k)
    operands = _on_each_device(mesh, rows, 256), _on_each_device(mesh, square, square)
    both = lambda x, a: (jax.lax.psum(x, axis), _chain(4)(a))
    name = "an all-reduce, 4 GEMMs"
    yield _measure(sizes, mesh, "contention", name, _shard(mesh, both), *operands)


# Collectives with a result of the operand's shape, to be chained.
COLLECTIVES: Mapping[str, Callable] = types.MappingProxyType({
    "all-reduce": lambda x, axis, n: jax.lax.psum(x, axis) * (1 / n),
    "all-gather": lambda x, axis, n: collectives.all_gather(x, axis, 0)[: len(x)],
    "reduce-scatter": lambda x, axis, n: collectives.reduce_scatter(jnp.tile(x, (n, 1)), axis, 0),
    "all-to-all": lambda x, axis, n: collectives.all_to_all(x, axis),
    "permute": lambda x, axis, n: collectives.ppermute_shift(x, axis),
})  # fmt: skip
SHARDED = ("all-gather", "reduce-scatter")  # their operand here is one shard of the data


def _shard(mesh: Mesh, function: Callable) -> Callable:
    return jax.shard_map(function, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)


def _on_each_device(mesh: Mesh, rows: int, columns: int) -> jax.Array:
    """An array with `rows` rows on each device."""
    return jax.jit(
        lambda: _random(rows * mesh.size, columns), out_shardings=NamedSharding(mesh, P(AXES))
    )()
