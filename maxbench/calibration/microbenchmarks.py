"""What the devices that are here do in a second: small programs, each about one thing, timed.

A program is compiled as a step is, and its text is kept beside its time: what a prediction says of
that text can be held against it. All processes run the same programs at the same time.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbench.config import environment
from maxbench.distributed import stragglers
from maxbench.hardware.gpus import Gpu
from maxbench.model import attention
from maxbench.quantization import fp8_per_tensor
from maxbench.sharding import collectives
from maxbench.step import xla_options

BF16 = jnp.bfloat16
WORK = 1e12  # FLOPs of products in one program, from which on one of them is enough
AXES = ("dp", "tp")  # of a mesh of all devices: over NVLink domains, and within one
REPEATS = 5
WARM = 2.0  # seconds of products until clocks and power are what they stay
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large what is measured is."""

    products: tuple[tuple[int, int, int, int], ...]  # m, n, k, batch
    attention: tuple[int, int, int]  # tokens, heads, their width
    copies: tuple[int, ...]  # bytes
    kernels: tuple[int, ...]  # bytes of an operand
    messages: tuple[int, ...]  # bytes on one device, before or after, where there are more
    times: int  # that something short is done in one program
    row_s: float  # seconds of calls between two looks at the clock, at least


SMALL = Sizes(
    products=(
        *((n, n, n, 1) for n in (64, 128, 256)),
        *((128, 512, 128, 1), (128, 128, 256, 1), (128, 128, 512, 1), (512, 128, 128, 1)),
        *((128, 256, 128, 1), (512, 512, 128, 1), (64, 256, 128, 1), (64, 128, 256, 1)),
        *((64, 64, 16, 8), (64, 16, 64, 8), (128, 128, 128, 4), (32, 512, 128, 4)),
    ),
    attention=(128, 4, 32),
    copies=(1 << 20, 1 << 22),
    kernels=tuple(1 << n for n in range(10, 23, 2)),
    messages=(1 << 10, 1 << 14, 1 << 18, 1 << 21),
    times=20,
    row_s=5e-3,
)
# Of a GPU: square products, those of a layer of 8B, 70B over tp 4 and 405B over tp 8, experts'.
LARGE = Sizes(
    products=(
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
    times=50,
    row_s=50e-3,
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program that ran.

    Attributes:
      kind: what it is about, a key of calibrate.ABOUT.
      text: its HLO.
      seconds: of one call.
      degrees: mesh axis -> devices along it.
    """

    kind: str
    name: str
    text: str
    seconds: float
    degrees: dict[str, int]


def all_microbenchmarks(sizes: Sizes, devices: Sequence, inside: int) -> Iterator[Measured]:
    """Measures one thing after another; all processes must go through it together.

    Args:
      devices: of all processes, those of a domain side by side.
      inside: how many make one NVLink domain.
    """
    one = functools.partial(_measured, sizes, None)
    for size in sizes.copies:
        yield one("copy", f"{size / 2**20:g} MiB", lambda x: x + 1, _random(size // 2))
    add = lambda x: jax.lax.fori_loop(0, sizes.times, lambda _, y: y + x, x)
    yield one("launch", f"{sizes.times} kernels", add, _random(8, 8).astype(jnp.float32))
    yield one("host", f"{sizes.times} decisions", _decisions(sizes.times), _random(64, 64))
    yield from _kernels(sizes)
    yield from _products(sizes)
    yield from _attention(sizes)
    if len(devices) > 1:
        yield from _communication(sizes, Mesh(np.array(devices).reshape(-1, inside), AXES))


def node_size() -> tuple[int, int]:
    """Devices of one host, and how many hosts there are; all processes must call it."""
    names = {found["host"] for found in stragglers.allgather_json({"host": environment.hostname()})}
    return jax.device_count() // len(names), len(names)


def domain(gpu: Gpu | None) -> int:
    """Devices that reach each other without the network: a node's, or of a GPU type whose NVLink
    domain spans nodes those of so many nodes."""
    here, nodes = node_size()
    return here * (gpu.segment(nodes) if gpu else 1)


def _measured(
    sizes: Sizes, mesh: Mesh | None, kind: str, name: str, function: Callable, *args
) -> Measured:
    """Compiles, runs and times a function; on one device of each process where there is no mesh."""
    options = xla_options.XLA_OPTIONS if jax.default_backend() == "gpu" else {}
    program = jax.jit(function, compiler_options=options).lower(*args).compile()
    # A CPU's collectives of several calls at once could wait for each other.
    call = functools.partial(program, *args)
    together = mesh is not None and jax.default_backend() == "cpu"
    seconds = median_s((lambda: jax.block_until_ready(call())) if together else call, sizes.row_s)
    degrees = dict(mesh.shape) if mesh else {}
    if together:
        seconds /= len(mesh.local_devices)
    return Measured(kind, name, program.as_text(), seconds, degrees)


def median_s(call: Callable, row_s: float) -> float:
    """Seconds of a call: the median over rows of calls, of which the last is waited for, and over
    processes. Of a CPU, whose cores all its devices share, seconds that it works."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter

    def row(times: int) -> float:
        start = clock()
        for _ in range(times):
            out = call()
        jax.block_until_ready(out)
        return (clock() - start) / times

    row(1)  # loads it
    agreed = lambda value: statistics.median(
        x["value"] for x in stragglers.allgather_json({"value": value})
    )
    times = max(1, round(row_s / agreed(row(2))))
    return agreed(statistics.median(row(times) for _ in range(REPEATS)))


def _random(*dims: int) -> jax.Array:
    """Zeros would draw less power and clock higher."""
    return jax.random.normal(jax.random.key(0), dims, BF16)


def _has_fp8() -> bool:
    capability = getattr(jax.local_devices()[0], "compute_capability", "9.0")
    return float(capability) >= 8.9


def _chain(times: int) -> Callable:
    """Products that nothing is fused to, one after the other."""
    return lambda x: jax.lax.fori_loop(0, times, lambda _, y: y @ x, x)


def _decisions(times: int) -> Callable:
    """Branches on what a kernel has made."""
    branch = lambda _, y: jax.lax.cond(y[0, 0] > 0, lambda y: y @ y, lambda y: y + y, y)
    return lambda x: jax.lax.fori_loop(0, times, branch, x)


def sample_under_load(sizes: Sizes, ask: Callable[[], T]) -> T:
    """What is answered once the largest product has run for WARM seconds, and runs."""
    m, n, k, batch = max(sizes.products, key=math.prod)
    call = functools.partial(jax.jit(jnp.matmul), _random(batch, m, k), _random(batch, k, n))
    with futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: time.sleep(WARM) or ask())
        while not answer.done():
            jax.block_until_ready([call() for _ in range(4)])
    return answer.result()


def _products(sizes: Sizes) -> Iterator[Measured]:
    """Each shape in each layout; on a CPU, which has no bf16, of fp32 too."""
    dtypes = {"bf16": BF16} | ({"f32": jnp.float32} if jax.default_backend() == "cpu" else {})
    dtypes |= {"f8e4m3fn": fp8_per_tensor.FORWARD} if _has_fp8() else {}
    layouts = itertools.product(("mk", "km"), ("kn", "nk"))
    ways = [(*one, dtype) for one in layouts if one != ("km", "nk") for dtype in dtypes]
    for (m, n, k, batch), (lhs, rhs, dtype) in itertools.product(sizes.products, ways):
        layout, b = ("t" if lhs == "km" else "n") + ("t" if rhs == "nk" else "n"), "b" * (batch > 1)
        if dtype == "f8e4m3fn" and (layout != "nt" or b):  # its kernel has no other
            continue
        dims = {"b": batch, "m": m, "n": n, "k": k}
        parts = [_random(*(dims[d] for d in b + one)).astype(dtypes[dtype]) for one in (lhs, rhs)]
        times = int(min(sizes.times, max(1, WORK // (2 * m * n * k * batch))))
        multiply = functools.partial(_multiply, times, f"{b}{lhs},{b}{rhs}->{b}mn")
        name = f"{m} x {n} x {k} x {batch} {layout}"
        yield _measured(sizes, None, f"{dtype} product", name, multiply, *parts, jnp.float32(1))


def _multiply(times: int, dims: str, a, b, scale):
    """One product after the other, each of an operand that a number of the last one is put into:
    the compiler would move what never changes out of the loop."""
    read = lambda x: (
        fp8_per_tensor.dequantize(x, scale, BF16) if x.dtype == fp8_per_tensor.FORWARD else x
    )
    product = lambda a: jnp.einsum(dims, read(a), read(b))

    def body(_, state):
        a, y = state[0], product(state[0])
        return a.at[(0,) * a.ndim].set(y[(0,) * y.ndim].astype(a.dtype)), y

    y = jax.eval_shape(product, a)
    return jax.lax.fori_loop(0, times, body, (a, jnp.zeros(y.shape, y.dtype)))[1]


# What a step does beside products, of an array [rows, 256]; each as costs.kernel_kind calls it.
KERNELS = {
    "plain": (
        lambda x: jax.nn.silu(x) * x,
        lambda x: jax.nn.softmax(x, 1),
        lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True)),
        lambda x: 0.9 * x + x / (jnp.sqrt(0.95 * x * x) + 1e-5),
    ),
    "turned": (
        lambda x: x.T.reshape(x.shape),
        lambda x: x.reshape(-1, 4, 64).swapaxes(0, 1).reshape(x.shape) * 0.5,
    ),
    "joined": (
        lambda x: jnp.concatenate([-x[:, 128:], x[:, :128]], 1) * x,
        lambda x: jnp.concatenate([jax.nn.silu(x[:, :128]), x[:, :128] * x[:, 128:]], 1),
    ),
}


def _kernels(sizes: Sizes) -> Iterator[Measured]:
    """Kernels of a step, one after the other, by size."""
    apart = lambda x, part: jax.lax.optimization_barrier(part(x))  # no two become one kernel
    again = lambda parts, x: jax.lax.fori_loop(
        0, sizes.times, lambda _, x: functools.reduce(apart, parts, x), x
    )
    for size, (kind, parts) in itertools.product(sizes.kernels, KERNELS.items()):
        x = _random(size // 1024, 256).astype(jnp.float32)
        loop = functools.partial(again, parts)
        yield _measured(sizes, None, "kernel", f"{size / 1024:g} KiB, {kind}", loop, x)


def _attention(sizes: Sizes) -> Iterator[Measured]:
    tokens, heads, width = sizes.attention
    kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
    forward, backward = attention.KERNELS[kind]
    q = _random(1, tokens, heads, width)
    o, lse = jax.jit(lambda q: forward(q, q, q, True, 0.0))(q)
    name = f"{tokens} tokens, {heads} heads of {width}"
    ways = {
        "attention forward": (lambda q, *_: forward(q, q, q, True, 0.0)),
        "attention backward": (lambda q, o, lse: backward(q, q, q, o, lse, o, True, 0.0)),
    }
    for what, way in ways.items():
        yield _measured(sizes, None, what, name, way, q, o, lse)


def _communication(sizes: Sizes, mesh: Mesh) -> Iterator[Measured]:
    """Each kind of collective within a domain and over domains, by size, alone; then one beside
    products."""
    for axis, link in zip(AXES, ("network", "NVLink"), strict=True):
        if (n := mesh.shape[axis]) == 1:
            continue
        for kind, size in ((kind, size) for kind in KINDS for size in sizes.messages):
            rows = max(1, size // (2 * 256 * n)) * (1 if kind in PARTS else n)
            step = functools.partial(KINDS[kind], axis=axis, n=n)
            times = sizes.times if size < 1 << 20 else 4
            loop = lambda x, step=step, times=times: jax.lax.fori_loop(
                0, times, lambda _, y: step(y), x
            )
            x = _everywhere(mesh, rows, 256)
            whole = rows * 512 * (n if kind in PARTS else 1)
            name = f"{kind}, {whole / 2**20:.3g} MiB, {n} devices"
            yield _measured(sizes, mesh, link, name, _shard(mesh, loop), x)
    axis = max(AXES, key=mesh.shape.get)
    rows = max(sizes.messages) // 512
    wide = max(m for m, n, k, batch in sizes.products if m == n == k)
    parts = _everywhere(mesh, rows, 256), _everywhere(mesh, wide, wide)
    both = lambda x, a: (jax.lax.psum(x, axis), _chain(4)(a))
    yield _measured(sizes, mesh, "beside", "an all-reduce, 4 products", _shard(mesh, both), *parts)


# One of a chain: the result is shaped as the operand.
KINDS = {
    "all-reduce": lambda x, axis, n: jax.lax.psum(x, axis) * (1 / n),
    "all-gather": lambda x, axis, n: collectives.all_gather(x, axis, 0)[: len(x)],
    "reduce-scatter": lambda x, axis, n: collectives.reduce_scatter(jnp.tile(x, (n, 1)), axis, 0),
    "all-to-all": lambda x, axis, n: collectives.all_to_all(x, axis),
    "permute": lambda x, axis, n: collectives.ppermute_shift(x, axis),
}
PARTS = ("all-gather", "reduce-scatter")  # their operand is a part of what they make, or were given


def _shard(mesh: Mesh, function: Callable) -> Callable:
    return jax.shard_map(function, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)


def _everywhere(mesh: Mesh, rows: int, columns: int) -> jax.Array:
    """An array with so many rows on each device."""
    return jax.jit(
        lambda: _random(rows * mesh.size, columns), out_shardings=NamedSharding(mesh, P(AXES))
    )()
