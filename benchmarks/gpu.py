"""One GPU: checks what a CPU cannot, times every workload, compares with plan. One table, last.

    python benchmarks/gpu.py [--quick] [--only TEXT]

Each case is a fresh process of the real command; benchmarks/results/ keeps its result.json with
what plan predicts for the same work. Llama 3.1 8B trains whole. Of the others a few layers at full
width do, with bf16 weights and moments where fp32 ones would not fit. Mocked cases run one GPU's
share of a recipe, the network mocked. FP8 goes through XLA and through Transformer Engine
(install_te.sh).
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

RESULTS = pathlib.Path(__file__).with_name("results")
SMALL_STATE = "--config.precision.weights=bf16 --config.precision.moments=bf16"
CASES = {
    "llama31_8b bf16": "llama31_8b.py --config.train.remat=full",
    "llama31_8b bf16, attention kept": "llama31_8b.py --config.train.remat=save_context "
    "--config.precision.moments=bf16",
    "llama2_70b:proxy bf16": "llama2_70b.py:proxy --mbs 2",
    "llama31_70b:proxy bf16": "llama31_70b.py:proxy --config.train.remat=full",
    "llama31_405b:proxy bf16": f"llama31_405b.py:proxy --layers 2 {SMALL_STATE}",
    "nemotron4_340b:proxy bf16": f"nemotron4_340b.py:proxy --layers 1 {SMALL_STATE}",
    "grok1_314b:proxy bf16": "grok1_314b.py:proxy --layers 1 --seq 4096",
    "grok1_314b:xai,proxy bf16": "grok1_314b.py:xai,proxy --layers 1 --seq 4096",
    "llama2_70b, 128 mocked": "llama2_70b.py --gpus 128 --mock_gpus 128",
    "llama31_8b, 8 mocked": "llama31_8b.py --gpus 8 --mock_gpus 8",
    "llama31_405b, 512 mocked": "llama31_405b.py --gpus 512 --mock_gpus 512",
}
FP8 = ("llama31_8b bf16", "llama2_70b:proxy bf16", "llama31_70b:proxy bf16")
FP8 += ("llama31_405b:proxy bf16", "nemotron4_340b:proxy bf16", "grok1_314b:proxy bf16")
CASES |= {
    f"{name.removesuffix('bf16')}fp8 {backend} {scaling}": f"{CASES[name]} --dtype fp8 "
    f"--config.precision.backend={backend} --config.precision.scaling={scaling}"
    for name in FP8
    for backend, scaling in (("xla", "current"), ("te", "current"), ("te", "delayed"))
}


def predicted(arguments: str, gpu_type: str) -> dict:
    """What plan says of the same work: seconds per step, bytes; {} where it cannot."""
    config, *flags = arguments.split()
    mocked = flags.index("--mock_gpus") if "--mock_gpus" in flags else len(flags)
    flags = [*flags[:mocked], *flags[mocked + 2 :], "--gpu_type", gpu_type]
    flags = [flag.replace("backend=te", "backend=xla") for flag in flags]
    command = [sys.executable, "-m", "maxbench.plan", "--json", "--config", f"configs/{config}"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    if done.returncode not in (0, 3):
        return {}
    found = json.loads(done.stdout)
    return {"step_s": found["step_s"], "bytes": found["memory"]["total"]}


def run(arguments: str, steps: int, gpu_type: str) -> dict:
    """Trains; returns result.json, or {'error': the last line that the run said}."""
    config, *flags = arguments.split()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "maxbench.train", "--config", f"configs/{config}"]
        command += [*flags, "--steps", str(steps), "--output_dir", folder, "--gpu_type", gpu_type]
        done = subprocess.run(command, capture_output=True, text=True)
        found = list(pathlib.Path(folder).rglob("result.json"))
        if done.returncode or not found:
            return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:160]}
        return json.loads(found[0].read_text())


def ceilings() -> dict:
    """What one GPU reaches: TFLOP/s of a bf16 and an FP8 product of size 8192^3, GB/s of a copy."""
    program = """
import json, time, jax, jax.numpy as jnp
def best(f, *x):
    jax.block_until_ready(f(*x))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(f(*x))
        times.append(time.perf_counter() - start)
    return min(times)
n = 8192
a, b = (jax.random.normal(k, (n, n), jnp.bfloat16) for k in jax.random.split(jax.random.key(0)))
x = jnp.zeros(1 << 30, jnp.bfloat16)
gemm = best(jax.jit(lambda a, b: a @ b), a, b)
wide = lambda x: x.astype(jnp.bfloat16) * jnp.bfloat16(1)
a8, b8 = a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn)
fp8 = best(jax.jit(lambda a, b: jax.lax.dot_general(wide(a), wide(b), (((1,), (1,)), ((), ())))),
           a8, b8)
copy = best(jax.jit(lambda x: x + 1), x)
rates = [2 * n**3 / seconds / 1e12 for seconds in (gemm, fp8)]
print(json.dumps({"device": jax.devices()[0].device_kind, "gemm_tflops": rates[0],
                  "fp8_gemm_tflops": rates[1], "copy_gbps": 2 * x.nbytes / copy / 1e9}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, result: dict) -> str:
    if "error" in result:
        return f"{name:<36} failed: {result['error']}"
    step, mfu, plan = result["step_s"], result["mfu"]["full"], result["predicted"]
    against = f"  predicted {plan['step_s'] / step['median'] - 1:+.1%}" if plan else ""
    return (
        f"{name:<36} {step['median']:8.3f} s  {result['tflops_per_gpu']['full']:7.1f} TFLOP/s  "
        f"MFU {mfu:6.1%}  peak {result['peak_bytes'] / 2**30:6.1f} GiB  "
        f"compiler {result['state_gib'] + result['temporary_gib']:6.1f} GiB  "
        f"{result['attention']:<6}{' mocked' if result['mocked'] else ''}{against}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="6 steps instead of 20")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--gpu_type", default="h200")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    found = ceilings()
    (RESULTS / "ceilings.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [
        f"{found['device']}: {found['gemm_tflops']:.0f} TFLOP/s bf16, "
        f"{found['fp8_gemm_tflops']:.0f} FP8, {found['copy_gbps']:.0f} GB/s"
    ]
    for name, arguments in CASES.items():
        if options.only not in name:
            continue
        result = run(arguments, 6 if options.quick else 20, options.gpu_type)
        result["predicted"] = predicted(arguments, options.gpu_type)
        file = RESULTS / f"{name.replace(' ', '_').replace(',', '').replace(':', '-')}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        lines.append(row(name, result))
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
