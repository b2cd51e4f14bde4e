"""The stages of gpu.py. A stage yields cases: a name, and a function that returns figures.

The argument `small` selects toy sizes. A case raises UserError if it cannot run here, and any other
exception if it failed. The names of cases do not depend on the device, because each process creates
the cases anew.
"""

import collections
import dataclasses
import faulthandler
import functools
import gzip
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import tomllib
import traceback
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from maxbench.config import command_line, layout_table, recipes, resolve
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.config.sublayers import RULES
from maxbench.cost_model import memory
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.host import environment
from maxbench.metrics import flops, step_stats
from maxbench.model import attention as kernels
from maxbench.model import packed_attention
from maxbench.planning import planner
from maxbench.quantization import QuantizedArray, fp8_per_tensor, transformer_engine
from maxbench.run import loop
from maxbench.sharding import mesh
from maxbench.step import data, xla_options
from maxbench.step.train_step import Step, on_device

Cases = Iterator[tuple[str, Callable[[], dict]]]
GIB, BF16, FP32 = 2**30, jnp.bfloat16, jnp.float32
FP8_GEMM = "__cublas$lt$matmul$f8"
FAMILY = "llama31_8b"  # workload of stages that need one
FIRST = (
    "mixtral_8x7b",
    "deepseek_v3",
    "llama2_70b",
    "gpt_oss_20b",
    "nemotron4_340b",
    "qwen3_30b_a3b",
)


def init_process(log_path: str) -> None:
    """Starts a session, redirects output to a file, and disables the compilation cache: compilation
    is timed, and programs for mocked GPUs cannot be loaded from the cache."""
    os.setsid()
    with open(log_path, "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    jax.config.update("jax_enable_compilation_cache", False)


def results_folder() -> pathlib.Path:
    """$OUT, or benchmarks/results."""
    return pathlib.Path(os.environ.get("OUT") or pathlib.Path(__file__).with_name("results"))


@functools.cache
def cases(stage: Callable[[bool], Cases], small: bool) -> dict[str, Callable[[], dict]]:
    return dict(stage(small))


def record(stage: Callable[[bool], Cases], case: str, small: bool) -> dict:
    """The figures of a case, {'skipped': reason}, or {'error': traceback}."""
    try:
        return cases(stage, small)[case]()
    except UserError as reason:
        return {"skipped": str(reason)}
    except (Exception, SystemExit):
        return {"error": traceback.format_exc()}


def machine(small: bool) -> Cases:
    """The device and versions."""

    def device_and_versions():
        device, versions = jax.devices()[0], environment.versions()
        record = {"device": device.device_kind, "platform": device.platform}
        return record | {"git": environment.git_revision(), "versions": versions}

    yield "jax", device_and_versions


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def needs_gpu() -> None:
    if not on_gpu():
        raise UserError("needs a GPU")


def options(small: bool) -> Cases:
    """Compiles a GEMM with each compiler option of the workloads' rows, one at a time."""
    values: dict[str, dict] = collections.defaultdict(dict)
    for path, config in recipes.workloads().items():
        for row in layout_table.table(config.layouts):
            words = [f"--{flag}={row[flag]}" for flag in ("gpus", "gpu_type", "dtype")]
            words += ["--strong_scaling"] * (row["scaling"] == "strong")
            run = command_line.run_of([f"--config={path}", *words])
            for name, value in xla_options.xla_options("gpu", run).items():
                values[name][value] = None

    def compile_gemm(name):
        x = jnp.ones((256, 256), BF16)
        for value in values[name]:
            jax.jit(lambda x: x @ x, compiler_options={name: value})(x).block_until_ready()
        return {"values": ", ".join(map(repr, values[name]))}

    for name in values:
        yield name, functools.partial(compile_gemm, name)


def attention(small: bool) -> Cases:
    """Each kernel, forward and backward, against fp32: causal, unmasked, and two hops of a ring."""
    kinds = sorted(kernels.KERNELS, key=lambda kind: kind == "xla")
    for kind, width, mask in itertools.product(kinds, (128, 192), ("causal", "whole", "ring")):
        yield f"{kind} {width} {mask}", functools.partial(run_attention, kind, width, mask, small)


def run_attention(kind: str, width: int, mask: str, small: bool) -> dict:
    if kind != "xla":
        needs_gpu()
    keys, heads, groups = (256, 4, 2) if small else (4096, 32, 8)
    queries = keys // 2 if mask == "ring" else keys
    shapes = (queries, heads), (keys, groups), (keys, groups), (queries, heads)
    draw = lambda i, t, h: jax.random.normal(jax.random.key(i), (1, t, h, width), BF16)
    q, k, v, do = (draw(i, *shape) for i, shape in enumerate(shapes))
    logits = kernels.Logits(width**-0.5)
    forward, backward = kernels.KERNELS[kind]
    if mask == "ring":
        forward, backward = ring(forward, backward, logits)
    scores = heads * queries * (keys - queries / 2 * (mask != "whole"))
    record, outputs = {}, ()
    for name, kernel, flops_per_score in (("forward", forward, 4), ("backward", backward, 10)):
        args = (q, k, v, *outputs, do) if outputs else (q, k, v)
        call = jax.jit(lambda *x, kernel=kernel: kernel(*x, mask == "causal", logits))
        program = call.lower(*args).compile()
        outputs += tuple(program(*args))
        seconds = timed(program, *args)
        record[f"{name}_tflops"] = flops_per_score * scores * width / seconds / 1e12
        record[f"{name}_workspace_gib"] = program.memory_analysis().temp_size_in_bytes / GIB
    names, exact = ("o", "lse", "dq", "dk", "dv"), reference(q, k, v, do, mask != "whole")
    for name, x, y in zip(names, outputs, exact, strict=True):
        error = float(jnp.max(jnp.abs(x.astype(FP32) - y)) / jnp.max(jnp.abs(y)))
        record[f"{name}_error"] = error
        assert error < 0.02, f"{name} is off by {error:.1%} of its largest value; {record}"
    return record


def ring(forward, backward, logits):
    """Kernels of the later half of the sequence's queries: attention to the earlier half of the
    keys, unmasked, merged with attention to their own half, causal."""
    hops = lambda *x: zip(*(jnp.split(part, 2, 1) for part in x), (False, True), strict=True)

    def merged(q, k, v, *_):
        (o1, lse1), (o2, lse2) = (forward(q, *kv, causal, logits) for *kv, causal in hops(k, v))
        lse = jnp.logaddexp(lse1, lse2)
        weight = lambda part: jnp.exp(part - lse).swapaxes(1, 2)[..., None]
        return (o1 * weight(lse1) + o2 * weight(lse2)).astype(q.dtype), lse

    def gradients(q, k, v, *saved):
        parts = (backward(q, *kv, *saved[:3], causal, logits) for *kv, causal in hops(k, v))
        (dq1, *early), (dq2, *late) = parts
        return dq1 + dq2, *(jnp.concatenate(x, 1) for x in zip(early, late, strict=True))

    return merged, gradients


def documents(small: bool) -> Cases:
    """Attention within packed documents, forward and backward, against fp32: by cuDNN in one call
    and in several, in windows, and with values that are narrower than keys, where it has these
    widths, and by the XLA kernel; and the losses of training steps with each of the two."""
    cases = {
        "cudnn long": (128, 128, 1024, 0),
        "cudnn short": (128, 128, 64, 0),
        "cudnn heads of 64 window": (64, 64, 256, 128),
        "cudnn values narrower": (192, 128, 256, 0),
        "xla short": (128, 128, 64, 0),
    }
    for name, case in cases.items():
        yield name, functools.partial(run_documents, name.split()[0], *case, small)
    yield "cudnn step", functools.partial(step_of_documents, small)


def run_documents(
    kind: str, width: int, value_width: int, every: int, window: int, small: bool
) -> dict:
    """Each token ends a document with the probability 1 / `every`. Where they are long, also the
    time and scratch memory of causal attention without documents."""
    if kind != "xla":
        needs_gpu()
        capability = tuple(map(int, jax.devices()[0].compute_capability.split(".")))
        mixer = command_line.run_of(workload(FAMILY, "")).model.per_layer[0].mixer
        mixer = dataclasses.replace(mixer, head_dim=width, value_dim=value_width)
        if resolve.cudnn_kernel(mixer, "bf16", capability, documents=True) != kind:
            raise UserError(f"cuDNN packs no heads of {width} with values of {value_width} here")
    sequences, tokens, heads, groups = (2, 256, 4, 2) if small else (2, 4096, 32, 8)
    shapes = (heads, width), (groups, width), (groups, value_width), (heads, value_width)
    draw = lambda i, h, w: jax.random.normal(jax.random.key(i), (sequences, tokens, h, w), BF16)
    q, k, v, do = (draw(i, *shape) for i, shape in enumerate(shapes))
    ends = jax.random.bernoulli(jax.random.key(4), 1 / every, (sequences, tokens))
    of_tokens = jnp.cumsum(ends, 1, jnp.int32) - ends
    logits, kernel = kernels.Logits(width**-0.5, 0, window), kernels.KERNELS[kind]
    record: dict = {"documents": [int(n) + 1 for n in of_tokens[:, -1]]}
    if kind != "xla":
        packing = packed_attention.Documents.of(of_tokens, heads, max(width, value_width))
        record |= {"of_a_call": packing.size, "calls": int(packing.groups)}
    masks: dict = {"causal": None} if every == 1024 else {}
    masks["apart"] = of_tokens  # the last: its outputs are compared
    for mask, of_mask in masks.items():
        outputs = ()
        for name, of_pass in zip(("forward", "backward"), kernel, strict=True):
            args = (of_mask, q, k, v, *((*outputs, do) if outputs else ()))
            call = jax.jit(lambda documents, *x, f=of_pass: f(*x, True, logits, documents))
            program = call.lower(*args).compile()
            outputs += tuple(program(*args))
            record[f"{name}_{mask}_ms"] = 1e3 * timed(program, *args)
            scratch = program.memory_analysis().temp_size_in_bytes / GIB
            record[f"{name}_{mask}_workspace_gib"] = scratch
    one = lambda i: (x[i : i + 1] for x in (q, k, v, do))  # of which the scores fit in memory
    by_sequence = [
        reference(*one(i), True, of_tokens[i : i + 1], window=window) for i in range(sequences)
    ]
    exact = map(jnp.concatenate, zip(*by_sequence, strict=True))
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), outputs, exact, strict=True):
        error = float(jnp.max(jnp.abs(x.astype(FP32) - y)) / jnp.max(jnp.abs(y)))
        record[f"{name}_error"] = error
        # Not a number fails, too.
        assert error < 0.02, f"{name} is off by {error:.1%} of its largest value; {record}"
    return record


def step_of_documents(small: bool) -> dict:
    """Losses after some steps on documents of 32 tokens on average: many calls of a sequence."""
    needs_gpu()
    record: dict = {}
    for kind in ("cudnn", "xla"):
        words = [f"--config.train.attention={kind}", f"--seq={256 if small else 1024}"]
        vocab = command_line.run_of(proxy(FAMILY, small)).model.vocab
        words.append(f"--config.train.document_end={int(data.bigram_tokens(vocab)[0])}")
        figures, dispatch, text = trained(proxy(FAMILY, small, *words), 4)
        assert ('"PADDING_CAUSAL"' in text) == (kind == "cudnn"), f"{kind}: another kernel"
        record |= {f"{kind}_s": figures["step_s"], f"{kind}_loss": float(dispatch()["loss"])}
    apart = abs(record["cudnn_loss"] / record["xla_loss"] - 1)
    assert apart < 0.005, f"losses are {apart:.2%} apart: {record}"
    return record | {"apart": apart}


@functools.partial(jax.jit, static_argnums=4, static_argnames="window")
@jax.default_matmul_precision("highest")
def reference(q, k, v, do, causal: bool, documents_bt=None, *, window: int = 0):
    """o, lse, dq, dk, dv in fp32, from the full score matrix; the last query sees all keys."""

    def attend(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        t, s = scores.shape[2:]
        seen = jnp.tri(t, s, s - t, bool) if causal else jnp.ones((t, s), bool)
        seen &= ~jnp.tri(t, s, s - t - window, bool) if window else True
        if documents_bt is not None:
            seen = (seen & (documents_bt[:, :, None] == documents_bt[:, None]))[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, -1)
        return jnp.einsum("bhts,bshd->bthd", jnp.exp(scores - lse[..., None]), v), lse

    q, k, v, do = (x.astype(FP32) for x in (q, k, v, do))
    (o, lse), vjp = jax.vjp(attend, q, k, v)
    return o, lse, *vjp((do, jnp.zeros_like(lse)))


def timed(program, *args) -> float:
    """Seconds per call: the best of three series of ten calls, of which the host waits for the last
    one only."""
    ten = lambda: jax.block_until_ready([program(*args) for _ in range(10)][-1])
    ten()
    return min(timeit.repeat(ten, number=1, repeat=3)) / 10


def ceilings(small: bool) -> Cases:
    """TFLOP/s of large GEMMs, GB/s of a copy, and TFLOP/s of the GEMMs of the workloads' layers."""
    exact_of = {"bf16": None, "fp8 fast": False, "fp8 exact": True}
    side = 256 if small else 8192
    for name, exact in exact_of.items():
        yield name, functools.partial(gemm, side, side, side, exact)
    yield "copy", functools.partial(copy, side * side * 16)
    for path, config in recipes.workloads().items():
        rows = layout_table.table(config.layouts)
        bf16 = [r for r in rows if (r["dtype"], r["scaling"]) == ("bf16", "weak")]
        row = max(bf16 or rows, key=lambda r: (r["gpu_type"] == "h100", r["gpus"]))
        words = [f"--{name}={row[name]}" for name in ("gpus", "gpu_type", "dtype")]
        run = command_line.run_of([f"--config={path}", *words])
        for name in ("bf16", "fp8 fast"):
            yield f"{path.stem} {name}", functools.partial(layer_gemms, run, exact_of[name], small)


def gemm(m: int, k: int, n: int, exact: bool | None) -> dict:
    """[m, k] x [n, k]^T: in bf16 if exact is None, else in FP8, with exact accumulation or not."""
    a, b = (jax.random.normal(jax.random.key(i), (i, k), BF16) for i in (m, n))
    over, options = (((1,), (1,)), ((), ())), {"xla_gpu_enable_triton_gemm": False}
    multiply = lambda a, b: jax.lax.dot_general(a, b, over)
    if exact is not None:
        a, b = (QuantizedArray(x.astype(fp8_per_tensor.FORWARD), FP32(1)) for x in (a, b))
        multiply = lambda a, b: fp8_per_tensor.PerTensor(False).product(a, b, over, BF16, exact)
    program = jax.jit(multiply, compiler_options=options).lower(a, b).compile()
    text, tflops = program.as_text(), 2 * m * k * n / timed(program, a, b) / 1e12
    calls = {*re.findall(r'custom_call_target="(__cu[^"]*)"', text)}
    if on_gpu() and exact is not None:
        assert calls == {FP8_GEMM}, f"{calls} at {tflops:.0f} TFLOP/s is not {FP8_GEMM}"
        assert ("HIGHEST" in text) == exact, f"the GEMM does not have exact={exact}"
    return {"tflops": tflops, "calls": " ".join(calls) or "none"}


def copy(elements: int) -> dict:
    x = jnp.zeros(elements, BF16)
    return {"gbytes_per_s": 2 * x.nbytes / timed(jax.jit(lambda x: x + 1), x) / 1e9}


def layer_gemms(run: Run, exact: bool | None, small: bool) -> dict:
    """TFLOP/s of each GEMM of a layer and of the LM head, as shaped on one GPU of a large row."""
    m, a, divisor = run.model, run.layout, 64 if small else 1
    rows = a.mbs * run.train.seq // a.cp
    shapes = {"head": (rows, m.embed, m.vocab // a.tp)}
    for _, part in m.per_layer[-1].parts():
        for path, w in part.weights.items():
            if w.is_gemm and not w.plain:
                batch, *sides = w.sides
                share = w.owner.rows(a.ep) * a.ep / w.owner.experts if batch else 1
                local = lambda x, w=w: getattr(w.owner, x) // (a.tp if "tp" in RULES[x] else 1)
                k, n = (math.prod(map(local, side)) for side in sides)
                shapes[path.removesuffix("/w")] = int(rows * share), k, n
    rate = lambda dims: gemm(*(dim // divisor for dim in dims), exact)["tflops"]
    return {name: rate(dims) for name, dims in shapes.items()}


def workload(family: str, presets: str, *words: str) -> list[str]:
    """Flags of a workload on this GPU type; on an H100 if there is no GPU."""
    kind = GPU_TYPES.type_of(jax.devices()[0].device_kind) or "h100"
    return [f"--config={family}{presets}", f"--gpu_type={kind}", *words]


def proxy(family: str, small: bool, *words: str) -> list[str]:
    """Flags of a workload at full width, with as many layers as fit into memory, and with bf16
    weights and moments if needed; if `small`, of its tiny preset."""
    if small:
        return workload(family, ":tiny", "--layers=1", *words)
    bf16 = [f"--config.precision.{name}=bf16" for name in ("weights", "moments")]
    available = jax.local_devices()[0].memory_stats()["bytes_limit"] - 6 * GIB  # logits, scratch
    has_experts = command_line.run_of(workload(family, ":proxy")).model.experts > 0
    # Bytes per weight: master, two moments, gradient, and the compute copy.
    for layers, (bytes_per_weight, state) in itertools.product((4, 2, 1), ((16, []), (8, bf16))):
        flags = workload(family, ":proxy", f"--layers={layers}", *state, *words)
        run = command_line.run_of(flags)
        if has_experts and not run.model.experts:  # its first layers are dense
            continue
        size = bytes_per_weight * flops.params(run.model)
        size += memory.activation_bytes(run, run.train.remat)
        if 1.05 * size < available:
            return flags
        least = f"{layers} layers need {size / GIB:.0f} GiB"
    raise UserError(f"{family}: {least}, {available / GIB:.0f} are available")


def trained(words: list[str], steps: int = 8) -> tuple[dict, Callable, str]:
    """Trains with a wait after each step: returns the figures, a function that dispatches one more
    step without waiting, and the program's text."""
    run, seconds = command_line.run_of(words), []
    device = jax.local_devices()[0]
    run = on_device(run, device)
    step = Step(run, mesh.make_mesh(run.layout))
    compiled, lower_s, compile_s = step.compile()
    text = compiled.as_text()
    record = {"layers": run.model.layers, "attention": run.train.attention}
    record |= {"device": device.device_kind, "flags": words}
    if run.format.quantized and run.precision.backend == "xla":
        record["fp8_gemms"] = text.count(FP8_GEMM)
        assert record["fp8_gemms"] or not on_gpu(), f"no {FP8_GEMM} in the program"
    state, batches = jax.block_until_ready(step.init()), data.Synthetic(run, step.mesh)

    def dispatch():
        nonlocal state
        state, out = compiled(state, next(batches))
        return out

    for _ in range(steps):
        start = time.perf_counter()
        out = jax.block_until_ready(dispatch())
        seconds.append(time.perf_counter() - start)
    assert run.runtime.mock_gpus or math.isfinite(out["loss"]), f"the loss is {out['loss']}"
    gpu_type = run.hardware.type_of(device.device_kind) or None
    step_s = statistics.median(seconds[1:])
    rates = step_stats.performance_figures(run, gpu_type, step_s)
    record |= {"step_s": step_s, "tflops": rates["tflops_per_gpu"]["full"]}
    record |= {"mfu": rates["mfu"]["full"]}
    record |= {"seconds": seconds, "compile_s": lower_s + compile_s}
    sizes = compiled.memory_analysis()
    record["compiler_gib"] = (sizes.argument_size_in_bytes + sizes.temp_size_in_bytes) / GIB
    if stats := device.memory_stats():  # None on a CPU
        record["peak_gib"] = stats["peak_bytes_in_use"] / GIB
    return record, dispatch, text


def stamps(small: bool) -> Cases:
    """Step times of the run's log, against steps that the host waits for one by one."""

    def compare(toys):
        words = proxy(FAMILY, toys, f"--steps={4 if small else 20}")
        waited = trained(words, 4 if small else 20)[0]["seconds"]
        with tempfile.TemporaryDirectory() as folder:
            assert loop.train(command_line.run_of([*words, f"--output_dir={folder}"])) == 0
            log = next(pathlib.Path(folder).rglob("metrics.jsonl")).read_text().splitlines()
        record = {}
        stamped = [json.loads(line)["step_s"] for line in log]
        for name, seconds in (("waited", waited), ("stamped", stamped)):
            median = statistics.median(seconds)
            record |= {f"{name}_s": median, f"{name}_first": seconds[0] / median}
            record |= {f"{name}_last": seconds[-1] / median, name: seconds}
        return record

    for name in ("tiny",) if small else ("tiny", "proxy"):
        yield f"{FAMILY} {name}", functools.partial(compare, name == "tiny")


def fp8(small: bool) -> Cases:
    """A proxy in bf16, and in FP8 with each scaling on each backend."""

    def quantized(backend, scaling):
        if backend == "te":
            needs_gpu()
            transformer_engine.load()
        flags = [f"--config.precision.backend={backend}", f"--config.precision.scaling={scaling}"]
        return trained(proxy(FAMILY, small, "--dtype=fp8", *flags))[0]

    yield "bf16", lambda: trained(proxy(FAMILY, small))[0]
    for backend, scaling in itertools.product(("xla", "te"), ("current", "delayed")):
        yield f"{backend} {scaling}", functools.partial(quantized, backend, scaling)


def planned(record: dict) -> dict:
    """The plan of a measured case, without the time that it would wait for other GPUs."""
    words = [word for word in record["flags"] if "mock_gpus" not in word]
    p = planner.plan(command_line.run_of(words))
    step_s = p.step_s - p.timeline.exposed_s - p.timeline.idle_s
    predicted = {"step_s": step_s, "peak_gib": p.memory.total / GIB}
    return predicted | {f"{k}_off": x / record[k] - 1 for k, x in predicted.items() if k in record}


def families(small: bool) -> Cases:
    """A proxy of each family."""
    names = [path.stem for path in recipes.workloads()]
    for name in [*FIRST, *(name for name in names if name not in FIRST)]:
        yield name, lambda name=name: trained(proxy(name, small))[0]


def unrolled(small: bool) -> Cases:
    """The same layers as a loop and unrolled."""
    for name, layers in (("loop", 0), ("code", 40)):
        words = f"--layers={1 if small else 8}", f"--config.train.unroll_layers={layers}"
        yield name, lambda words=words: trained(proxy(FAMILY, small, *words))[0]


def profile(small: bool) -> Cases:
    """Three steps of a proxy: the kernels that take most time, and the longest gaps between two.

    Writes <name>.xplane.pb.gz and the program's <name>.hlo.txt.gz into the folder of the results.
    """

    def traced(name, *words):
        record, dispatch, text = trained(proxy(FAMILY, small, *words), 3)
        stem = f"{record['device']}-{name}".lower().replace(" ", "-")
        write = lambda end, data: (results_folder() / f"{stem}.{end}.gz").write_bytes(
            gzip.compress(data)
        )
        write("hlo.txt", text.encode())
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([dispatch() for _ in range(3)])
            file = next(pathlib.Path(folder).rglob("*.xplane.pb"))
            data = jax.profiler.ProfileData.from_file(str(file))
            write("xplane.pb", file.read_bytes())
        plane, line = ("/device:GPU:0", "Stream") if on_gpu() else ("/host:CPU", "tf_XLA")
        lines = [x for x in data.find_plane_with_name(plane).lines if x.name.startswith(line)]
        kernels = [(e.start_ns, e.end_ns, e.name) for x in lines for e in x.events]
        kernels = [k for k in kernels if on_gpu() or "::" not in k[2]]
        return {"step_s": record["step_s"], "file": f"{stem}.xplane.pb.gz"} | longest(kernels)

    for name, words in (("bf16", []), ("fp8", ["--dtype=fp8", "--config.precision.backend=xla"])):
        yield f"{FAMILY} {name}", functools.partial(traced, f"{FAMILY}-{name}", *words)


def longest(kernels: list[tuple[float, float, str]], most: int = 12) -> dict:
    """The kernels that take most time, the longest gaps, and the busy fraction.

    kernels: (start, end, name) of each, in ns.
    """
    total, gaps, (begin, end, last) = collections.Counter(), [], min(kernels)
    for start, stop, name in sorted(kernels):
        total[name] += stop - start
        gaps.append((start - end, f"{last} .. {name}"))
        end, last = max((end, last), (stop, name))
    gaps, span = sorted(gaps, reverse=True), end - begin
    top = [(seconds / span, name) for name, seconds in total.most_common(most)]
    record = {"busy": 1 - sum(max(0, gap) for gap, _ in gaps) / span, "top": top}
    record["longest"] = f"{top[0][1]} ({top[0][0]:.1%})"
    return record | {"widest": f"{gaps[0][1]} ({gaps[0][0] / span:.2%})", "gaps": gaps[:most]}


def mocked(small: bool) -> Cases:
    """One GPU's part of a recipe on mocked neighbours (--mock_gpus): received data is arbitrary."""

    def row(family, count):
        if os.environ.get("JAX_PLATFORMS") != "cpu":  # before JAX initializes its devices
            jax.config.update("jax_mock_gpu_topology", GPU_TYPES["h100"].topology(count, 1))
        needs_gpu()
        return workload(family, ":tiny" * small, f"--gpus={count}")

    for family, count in ((FAMILY, 8), ("llama2_70b", 128), ("llama31_405b", 512)):
        for name, more in (("ordered", []), ("off", ["--config.train.order=off"])):
            more = [f"--mock_gpus={count}", *more]
            run = lambda f=family, n=count, more=more: trained([*row(f, n), *more], 3)[0]
            yield f"{family}-{count} {name}", run


def calibrate(small: bool) -> Cases:
    """`maxbench calibrate`: a file of this machine's constants, for `plan --hardware`."""

    def constants():
        # Written in full or not at all. This process has not initialized the GPU, so the command
        # has all its memory.
        part = results_folder() / "constants.toml"
        words = ["--write", str(part), *(["--small", "--cpu_devices=1"] if small else [])]
        command = [sys.executable, "-m", "maxbench.calibrate", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        ((name, gpu_type),) = tomllib.loads(part.read_text()).items()
        file = part.rename(part.with_name(f"{name}-constants.toml"))
        return {**gpu_type["efficiency"], "file": file.name, "table": done.stdout.splitlines()}

    yield "constants", constants


def maxtext(small: bool) -> Cases:
    """MaxText on the workload of the stage fp8 in bf16."""

    def peer():
        home = importlib.util.find_spec("maxtext") or importlib.util.find_spec("MaxText")
        if home is None or small:
            raise UserError("needs a GPU and MaxText")
        module = "MaxText.train" if home.name == "MaxText" else "maxtext.trainers.pre_train.train"
        base = pathlib.Path(home.submodule_search_locations[0]) / "configs/base.yml"
        words = f"""{base} run_name=peer hardware=gpu dataset_type=synthetic steps=12
            model_name=llama3.1-8b override_model_config=True base_num_decoder_layers=4
            max_target_length=8192 per_device_batch_size=1 attention=cudnn_flash_jax
            enable_checkpointing=False base_output_directory={tempfile.gettempdir()}"""
        # This process has not initialized the GPU, so the subprocess has all its memory.
        command = [sys.executable, "-m", module, *words.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        log = done.stdout + done.stderr
        seconds = [*map(float, re.findall(r"completed step: \d+, seconds: ([\d.]+)", log))]
        assert len(seconds) == 12, log
        return {"step_s": statistics.median(seconds[1:]), "seconds": seconds}

    yield FAMILY, peer
