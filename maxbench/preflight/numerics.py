"""Whether the GPUs compute the right gradients: `maxbench preflight --numerics`.

The workload's toy, in the run's number format, computes the gradients of one batch several times:

  on a CPU     one device, in another process: the reference
  alone        on each GPU by itself, twice: a GPU that differs computes wrongly
  together     on a mesh of all GPUs with the axes of the run, each of at most 2; if that differs,
               on a mesh of each axis
  reordered    together, but without train.order, and without XLA's latency hiding: a schedule in
               which something is read before it is written differs

Gradients on one device are compared array by array, by the norm of the difference over the norm of
the reference; those of meshes, whose arrays are arranged otherwise, by loss and gradient norm.
"""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from maxbench.config import precedence, recipes, resolve
from maxbench.config.errors import UserError
from maxbench.config.number_formats import SCALINGS
from maxbench.config.run import AXES, Device, Run, RunConfig
from maxbench.distributed import runtime, stragglers
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.host import environment
from maxbench.sharding import mesh
from maxbench.step import data, state
from maxbench.step.train_step import Step, on_device

COPY = "copy"  # axis of a mesh whose devices compute the same
REPEATS = 2
SPLIT = ("fsdp", "tp", "pp", "cp", "ep")  # axes of the run that the toy's mesh has too
# Largest relative error of an array's gradient, and of loss and gradient norm, by the peak of its
# GEMMs. Another order of sums rounds otherwise.
GRADIENT = {"bf16": 0.1, "fp8": 0.35, "fp4": 0.7}
SCALAR = {"bf16": 0.01, "fp8": 0.03, "fp4": 0.06}
APART = 0.02  # of one GPU from all others that agree, whatever the format
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
REFERENCE = "import sys; from maxbench.preflight import numerics; numerics.write(sys.argv[1])"
TIMEOUT_S = 900  # of the reference


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of one batch.

    Attributes:
      arrays: by path; empty on a mesh.
    """

    loss: float
    norm: float
    arrays: Mapping[str, np.ndarray]


def findings(run: Run, workload: str, devices: Sequence[jax.Device]) -> Iterator[tuple[bool, str]]:
    """Whether a comparison passed, and its line; all processes must iterate.

    Args:
      workload: of the run, without presets.
      devices: of all processes.

    Raises:
      UserError: the toy cannot have the run's number format here.
    """
    together = on_device(toy(run, workload, len(devices)), devices[0])
    alone = on_device(toy(run, workload, 1, gbs=together.layout.gbs), devices[0])
    peak = alone.format.peak
    reference = _broadcast(of_cpu(alone) if jax.process_index() == 0 else None, alone)
    yield from _alone(alone, devices, reference, GRADIENT[peak])
    name, whole = together.layout.describe(), _on_mesh(together, devices)
    right, text = _compare(whole, reference, SCALAR[peak])
    yield right, f"{name}: {text}"
    if not right:
        yield from _axes(run, workload, together, devices, reference)
    unordered = dataclasses.replace(
        together, train=dataclasses.replace(together.train, order="off")
    )
    options = {LATENCY_HIDING: False} if devices[0].platform == "gpu" else {}
    for what, other, more in (
        ("without train.order", unordered, {}),
        ("without latency hiding", together, options),
    ):
        if more or other is not together:
            right, text = _compare(_on_mesh(other, devices, **more), reference, SCALAR[peak])
            yield right, f"{name}, {what}: {text}"


def toy(
    run: Run,
    workload: str,
    devices: int,
    axes: Sequence[str] = SPLIT,
    gbs: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """The workload's toy in the number format of a run.

    Args:
      devices: of its mesh; 1, or as many as all axes of SPLIT need, times dp.
      axes: those of SPLIT that the mesh may have of the run's.
      gbs: the global batch; None, two microbatches.
      settings: others of the toy, by 'section.field'.

    Raises:
      UserError: there is no such toy.
    """
    wanted = [axis for axis in SPLIT if getattr(run.layout, axis) > 1 and axis in axes]
    degrees: dict[str, int] = {}
    for axis in wanted if devices > 1 else ():
        if devices % (2 * math.prod(degrees.values())) == 0:
            degrees[axis] = 2
    degrees["dp"] = devices // math.prod(degrees.values())
    shards = degrees["dp"] * degrees.get("fsdp", 1) * degrees.get("ep", 1)
    p = run.precision
    precision = {"backend": p.backend} if run.format.quantized else {}
    if p.scaling in SCALINGS:  # of a dtype with one format it is that
        precision["scaling"] = p.scaling
    overrides: dict[str, Any] = {
        **{f"layout.{axis}": n for axis, n in degrees.items()},
        "layout.mbs": 1,
        "layout.gbs": gbs or 2 * shards * degrees.get("pp", 1),
        "layout.gpu_type": run.layout.gpu_type,
        **{f"precision.{name}": value for name, value in precision.items()},
        # cp 2 x tp 2 must leave whole blocks.
        **({"train.seq": 128} if run.format.blocks else {}),
    }
    if run.train.document_end is not None:  # a token that the toy's data have
        vocab = recipes.TOY_SIZES["model"]["vocab"]
        overrides["train.document_end"] = int(data.bigram_tokens(vocab)[0])
    config = precedence.build_config(
        recipes.load_workload(f"{workload}:tiny", run.hardware),
        flags={"dtype": p.dtype},
        overrides={**overrides, **(settings or {})},
        gpu_types=run.hardware,
    )
    return resolve.resolve(config, run.hardware, run.device)


def of_cpu(run: Run) -> Gradients:
    """The gradients of a run on one CPU device, of another process.

    Raises:
      UserError: that process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "reference.npz")
        env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
        done = subprocess.run(
            [sys.executable, "-c", REFERENCE, str(path)],
            input=json.dumps(run.config.asdict()), env=env | {"JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"numerics: no reference of a CPU: {done.stderr.strip()[-300:]}")
        with np.load(path) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    return Gradients(float(found.pop("loss")), float(found.pop("norm")), found)


def write(path: str) -> None:
    """Writes the gradients of the config on stdin, on a CPU, to a file."""
    config = RunConfig.from_dict(json.load(sys.stdin))
    config = config.changed(precision={"backend": "xla"}) if config.precision.backend else config
    run = resolve.resolve(config, GPU_TYPES, Device("cpu"))
    step = Step(run, mesh.make_mesh(run.layout, jax.local_devices()))
    params, batch, layer_state = _inputs(step)
    grads, out, _ = jax.jit(step.gradients)(params, batch, layer_state)
    arrays: dict[str, Any] = {name: np.asarray(g, np.float32) for name, g in _named(grads)}
    np.savez(path, **arrays | {"loss": out["loss"], "norm": out["grad_norm"]})


def _inputs(step: Step) -> tuple[Any, jax.Array, Any]:
    """Weights, the first batch, and the state of layers."""
    start = step.init()
    batch = next(data.Synthetic(step.run, step.mesh))
    return start["params"], batch, start.get(state.KEY)


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in leaves]


def _broadcast(found: Gradients | None, run: Run) -> Gradients:
    """Process 0's gradients in all processes."""
    if runtime.process_count() == 1:
        assert found
        return found
    step = Step(run, mesh.make_mesh(run.layout, jax.local_devices()))
    empty = {name: np.zeros(x.shape, np.float32) for name, x in _named(step.abstract["params"])}
    start = (found.loss, found.norm, dict(found.arrays)) if found else (0.0, 0.0, empty)
    loss, norm, arrays = multihost_utils.broadcast_one_to_all(start)
    return Gradients(float(loss), float(norm), arrays)


def _alone(
    run: Run, devices: Sequence[jax.Device], reference: Gradients, tolerance: float
) -> Iterator[tuple[bool, str]]:
    """Gradients of each device by itself, against the reference and against each other."""
    names = [*reference.arrays]
    errors, apart = errors_alone(run, devices, reference)
    hosts = [f["host"] for f in stragglers.allgather_json({"host": environment.hostname()})]
    wrong = 0
    for i, device in enumerate(devices):
        worst = int(np.argmax(errors[i]))
        error, other = float(errors[i, worst]), float(np.max(apart[i]))
        far = other > APART and other > 4 * float(np.median(np.max(apart, axis=1)))
        if error <= tolerance and not far:
            continue
        wrong += 1
        array = names[worst] if error > tolerance else names[int(np.argmax(apart[i]))]
        where = f"GPU {device.id} of {len(devices)} on {hosts[device.process_index]}"
        yield (
            False,
            f"{where} computes wrong gradients: {array} is {error:.1%} from a CPU's (at most "
            f"{tolerance:.0%}), {other:.1%} from the mean of all",
        )
    if not wrong:
        most = f"at most {float(np.max(errors)):.1%} of an array's gradient from a CPU's"
        yield True, f"{len(devices)} devices, each alone: {most}, {np.max(apart):.2%} apart"


def errors_alone(
    run: Run, devices: Sequence[jax.Device], reference: Gradients
) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of each device's own gradients [devices, arrays], the largest of REPEATS:
    against the reference, and against the mean of all devices."""
    grid = np.array(devices).reshape(len(devices), *[1] * len(AXES))
    copies = Mesh(grid, (COPY, *AXES), axis_types=(AxisType.Auto,) * (1 + len(AXES)))
    step = Step(run, copies)
    expected = [jnp.asarray(x) for x in reference.arrays.values()]

    def errors(params, batch, layer_state, expected):
        grads, _, _ = step.local_gradients(params, batch, layer_state)
        grads = [g.astype(jnp.float32) for _, g in _named(grads)]
        means = jax.lax.pmean(grads, COPY)
        pair = lambda other: jnp.stack([*map(_relative, grads, other)])[None]
        return pair(expected), pair(means)

    whole, each = (P(),) * 4, (P(COPY),) * 2
    program = jax.shard_map(errors, mesh=copies, in_specs=whole, out_specs=each, check_vma=False)
    local = jax.jit(program)
    params, batch, layer_state = _inputs(step)
    layer_state = layer_state and state.read(layer_state)
    gather = lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True))
    found = [
        jax.tree.map(gather, local(params, batch, layer_state, expected)) for _ in range(REPEATS)
    ]
    worst = [np.max([pair[i] for pair in found], axis=0) for i in (0, 1)]
    return worst[0], worst[1]


def _relative(x: jax.Array, expected: jax.Array) -> jax.Array:
    """Norm of the difference over the norm of the expected array; infinity if it is not finite."""
    norm = lambda a: jnp.sqrt(jnp.sum(jnp.square(a)))
    error = norm(x - expected) / jnp.maximum(norm(expected), 1e-30)
    return jnp.where(jnp.isfinite(error), error, jnp.inf)


def _on_mesh(run: Run, devices: Sequence[jax.Device], **options: Any) -> Gradients:
    step = Step(run, mesh.make_mesh(run.layout, [*devices]))
    params, batch, layer_state = _inputs(step)
    program = jax.jit(lambda *x: step.gradients(*x)[1], compiler_options=options)
    out = program(params, batch, layer_state)
    return Gradients(float(out["loss"]), float(out["grad_norm"]), {})


def _compare(found: Gradients, reference: Gradients, tolerance: float) -> tuple[bool, str]:
    """Whether loss and gradient norm are within a tolerance, and the line."""
    pairs = {"loss": (found.loss, reference.loss), "gradient norm": (found.norm, reference.norm)}
    right = all(abs(x - y) <= tolerance * abs(y) for x, y in pairs.values())  # False of NaN
    text = ", ".join(f"{name} {x:.5g}, a CPU's {y:.5g}" for name, (x, y) in pairs.items())
    return right, text if right else f"{text}: more than {tolerance:.0%} apart"


def _axes(
    run: Run, workload: str, together: Run, devices: Sequence[jax.Device], reference: Gradients
) -> Iterator[tuple[bool, str]]:
    """The comparison for a mesh of each axis with data parallelism, and for that alone."""
    for axis in ("dp", *(a for a in SPLIT if getattr(together.layout, a) > 1)):
        try:
            one = toy(run, workload, len(devices), (axis,), together.layout.gbs)
        except UserError as e:
            yield True, f"{axis} alone is not tried: {e}"
            continue
        one = on_device(one, devices[0])
        right, text = _compare(_on_mesh(one, devices), reference, SCALAR[one.format.peak])
        yield right, f"{one.layout.describe()}: {text}"
