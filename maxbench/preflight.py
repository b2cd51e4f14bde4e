"""A look at the nodes before step 0, in seconds, as its own process: is the run worth starting?

  python -m maxbench.preflight --config configs/llama31_8b.py --gpus 8

XLA flags are tried in a throw-away process; GPUs, driver and versions must be the same everywhere;
a bare product and an all-reduce are scored beside their ceilings; NCCL says how it connects.
"""

import collections
import glob
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from absl import flags

from maxbench import cli, runtime
from maxbench.config import Run
from maxbench.hardware import GPUS

REPLACED = {
    "xla_gpu_graph_level": "--xla_gpu_enable_command_buffer=",
    "xla_gpu_enable_async_collectives": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_async_all_gather": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_pipeline_all_gather": "--xla_gpu_enable_pipelined_all_gather=true",
    "xla_gpu_pipeline_reduce_scatter": "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "xla_gpu_pipeline_all_reduce": "--xla_gpu_enable_pipelined_all_reduce=true",
}
REACHED = {"gemm": 0.8, "all-reduce": 0.8}  # of the datasheet, what good hardware reaches


def lint(words: Sequence[str]) -> list[str]:
    """What is wrong with these XLA flags ('--name=value'), tried in a throw-away process.

    An unknown flag in XLA_FLAGS aborts whoever parses it, so nothing else can try them. All
    builds of jaxlib share the parser: a CPU finds the mistakes of a GPU.
    """
    code = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    env = {**os.environ, "XLA_FLAGS": " ".join(words), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return ["XLA_FLAGS: the process that tried them did not end within 60 s"]
    if done.returncode == 0:
        return []
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: ([^\n]*)", done.stderr)
    if not unknown:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [f"XLA_FLAGS: {last}"]
    found = []
    for word in unknown[1].split():
        instead = REPLACED.get(word.lstrip("-").partition("=")[0])
        hint = f"; use {instead}" if instead else "; leave it out"
        found.append(f"XLA_FLAGS: this XLA does not know {word}, and would abort{hint}")
    return found


def xla_words(run: Run) -> list[str]:
    """The flags of a run on GPUs and those of the environment, as XLA_FLAGS would hold them."""
    text = lambda v: str(v).lower() if isinstance(v, bool) else str(v)
    ours = [f"--{k}={text(v)}" for k, v in runtime.xla_options("gpu", run).items()]
    return ours + os.environ.get("XLA_FLAGS", "").split()


def gpus_here() -> list[dict[str, str]]:
    """What nvidia-smi tells of the GPUs of this node; [] without it."""
    fields = "name,driver_version,ecc.errors.uncorrected.volatile.total,temperature.gpu"
    fields += ",clocks_throttle_reasons.hw_slowdown"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = ("name", "driver", "ecc", "celsius", "slowdown")
    lines = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return [dict(zip(names, cells, strict=True)) for cells in lines if len(cells) == len(names)]


def complaints(run: Run, found: Sequence[dict]) -> list[str]:
    """What must be put right before the run is worth its time.

    Args:
      found: one dict per process: host, devices, kind, versions, gpus.
    """
    wrong = []
    for host, each in _by_host(found).items():
        for i, gpu in enumerate(each[0]["gpus"]):
            if gpu["ecc"].isdecimal() and int(gpu["ecc"]):
                wrong.append(f"{host}: GPU {i} has {gpu['ecc']} uncorrected memory errors")
            if gpu["slowdown"].lower() == "active":
                wrong.append(f"{host}: GPU {i} is slowed down by its hardware ({gpu['celsius']} C)")
    for what, of in (
        ("devices", lambda o: f"{o['devices']} x {o['kind']}"),
        ("driver", lambda o: ", ".join(sorted({g["driver"] for g in o["gpus"]})) or "none"),
        ("GPUs on the node", lambda o: str(len(o["gpus"]))),
        *((p, lambda o, p=p: o["versions"].get(p, "none")) for p in sorted(found[0]["versions"])),
    ):
        kinds: dict[str, set[str]] = {}
        for one in found:
            kinds.setdefault(of(one), set()).add(one["host"])
        if len(kinds) > 1:
            parts = [f"{k} on {', '.join(sorted(v))}" for k, v in sorted(kinds.items())]
            wrong.append(f"{what} differ: {'; '.join(parts)}")
    total = sum(one["devices"] for one in found)
    if total < run.layout.gpus and not run.runtime.mock_gpus:
        wrong.append(f"{run.layout.describe()} needs {run.layout.gpus} devices, {total} are there")
    return wrong


def _by_host(found: Sequence[dict]) -> dict[str, list[dict]]:
    by_host: dict[str, list[dict]] = {}
    for one in found:
        by_host.setdefault(one["host"], []).append(one)
    return by_host


def all_reduce_gbps() -> float:
    """Bus bandwidth of an all-reduce over all devices, GB/s: 2 (n-1)/n x bytes / seconds."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec

    from maxbench import hosts

    count = jax.device_count()
    if count == 1:
        return 0.0
    elements = (1 << 26) if jax.default_backend() == "gpu" else (1 << 14)
    mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,))
    everywhere = PartitionSpec()
    shard = {"mesh": mesh, "in_specs": everywhere, "out_specs": everywhere}
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), **shard))
    x = jax.jit(lambda: jnp.ones(elements), out_shardings=jax.NamedSharding(mesh, everywhere))()
    return 2 * (count - 1) / count * x.nbytes / hosts.best_s(total, x) / 1e9


def table(run: Run, found: Sequence[dict]) -> str:
    """Scores beside their ceilings, a line per host, worst device each."""
    gpu, by_host = GPUS[run.layout.gpu_type], _by_host(found)
    on_gpu = found[0]["platform"] == "gpu"
    out = [f"{'host':<24} {'devices':<22} {'gemm TFLOP/s':>13}"]
    for host, each in by_host.items():
        score = min(s for one in each for s in one["gemm"])
        kind = f"{sum(o['devices'] for o in each)} x {each[0]['kind']}"
        out.append(f"{host:<24} {kind:<22} {score:>13.{1 if on_gpu else 3}f}")
    one_domain = len(by_host) * gpu.gpus_per_node <= gpu.nvlink_gpus
    link = gpu.nvlink_gbps / 2 if one_domain else gpu.network_gbps * gpu.gpus_per_node
    known = lambda what, ceiling, unit: (
        f"{ceiling * REACHED[what]:.0f} to {ceiling:.0f} {unit}" if on_gpu else "unknown here"
    )
    out.append(f"gemm ceiling: {known('gemm', gpu.bf16_tflops, 'TFLOP/s bf16')}")
    out.append(
        f"all-reduce over all devices: {found[0]['all_reduce']:.2f} GB/s bus; ceiling "
        + known("all-reduce", link, "GB/s")
    )
    ways = collections.Counter()
    for one in found:
        ways.update(one["transports"])
    said = ", ".join(f"{w} x {n}" for w, n in sorted(ways.items())) or "none (not NCCL, or one GPU)"
    out.append(f"NCCL transports: {said}")
    return "\n".join(out)


def look(log: str) -> list[dict]:
    """Facts and scores of every process; log is where NCCL's files of this one begin."""
    import jax

    from maxbench import hosts, nccl

    mine = {
        "host": hosts.name(),
        "platform": jax.default_backend(),
        "devices": jax.local_device_count(),
        "kind": jax.local_devices()[0].device_kind,
        "versions": runtime.versions(),
        "gpus": gpus_here(),
        "gemm": hosts.gemm_tflops(),
        "all_reduce": all_reduce_gbps(),
    }
    text = "".join(pathlib.Path(p).read_text(errors="replace") for p in glob.glob(f"{log}*"))
    mine["transports"] = nccl.transports(text)
    return hosts.gather(mine)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, the same in every process: 0 go on, 1 do not, 2 bad input."""
    fv = flags.FlagValues()
    cli.define(fv, argv)
    flags.DEFINE_bool("allow_tcp", False, "go on when NCCL falls back to TCP", flag_values=fv)
    flags.DEFINE_string("json", "", "write what was found to this file", flag_values=fv)
    start = time.perf_counter()
    with cli.clear_errors("preflight"):
        run = cli.parse(fv, argv)
        runtime.prepare(run)
    # Before jax starts: it would abort without a word about what to do.
    if os.environ.get("SLURM_LOCALID", "0") == "0" and (wrong := lint(xla_words(run))):
        print("\n".join(f"preflight: error: {text}" for text in wrong), flush=True)
        return 1
    log = os.path.join(tempfile.gettempdir(), f"nccl-preflight-{os.getpid()}.")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log}
    with cli.clear_errors("preflight"):
        runtime.connect(run)
    import jax

    from maxbench import hosts, nccl

    found = look(log)
    for path in glob.glob(f"{log}*"):
        os.unlink(path)
    wrong = complaints(run, found)
    by_host = _by_host(found)
    ways = {way: 1 for one in found for way in one["transports"]}
    if (why := nccl.falls_back(ways, len(by_host))) and not fv["allow_tcp"].value:
        wrong.append(why)
    late = hosts.slow({h: min(s for o in each for s in o["gemm"]) for h, each in by_host.items()})
    late = late if found[0]["platform"] == "gpu" else []  # a shared CPU's scores are noise
    if jax.process_index() == 0:
        print(table(run, found))
        if late:
            print(f"slow hosts (gemm below {hosts.SLOW:.0%} of the median): {', '.join(late)}")
            print(f"leave them out: EXCLUDE_NODES={','.join(late)}")
        for text in wrong:
            print(f"preflight: error: {text}")
        print(f"preflight {'failed' if wrong else 'passed'} in {time.perf_counter() - start:.1f} s")
        if fv["json"].value:
            with open(fv["json"].value, "w") as f:
                json.dump({"processes": found, "slow_hosts": late, "wrong": wrong}, f, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
