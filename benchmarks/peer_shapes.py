"""MaxText's CPU shapes (docs/reference/measurements.md): step time, peak memory, start-up.

    python benchmarks/peer_shapes.py [A B C tiny]

Each case runs the command line in a new process, and prints one line.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

SMALL = "embed=256 heads=8 kv_heads=8 head_dim=32 mlp=768 vocab=32000 layers=4"
LARGE = "embed=512 heads=8 kv_heads=4 head_dim=64 mlp=1536 vocab=32000 layers=4"
CASES = {
    "A": (SMALL, "--seq 256 --mbs 4 --cpu_devices 1"),
    "B": (LARGE, "--seq 512 --mbs 8 --cpu_devices 1"),
    "C": (SMALL, "--seq 256 --mbs 1 --fsdp 8 --cpu_devices 8"),
}
PEER = {
    "A": (0.512, 1.60),
    "B": (3.818, 3.03),
    "C": (1.153, None),
}  # s, GB, on an idle machine
WORKLOADS = sorted(p.stem for p in pathlib.Path("configs").glob("*.py"))


def run(config: str, flags: str) -> dict:
    """Runs the trainer and returns its result.json."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "maxbench.train", "--config", config, *flags.split()]
        subprocess.run([*command, "--output_dir", folder], check=True, stdout=subprocess.DEVNULL)
        return json.loads(next(pathlib.Path(folder).rglob("result.json")).read_text())


def shape(name: str) -> str:
    model, flags = CASES[name]
    settings = " ".join(f"--config.model.{x}" for x in model.split())
    steps = 12 if name == "B" else 20
    result = run(
        "configs/llama2_70b.py", f"{settings} {flags} --steps {steps} --config.train.remat=full"
    )
    step_s, gb = result["step_s"]["median"], result["peak_bytes"] / 1e9
    peer_s, peer_gb = PEER[name]
    memory = f"{gb:.2f} GB, {gb / peer_gb:.2f} of the peer's" if peer_gb else f"{gb:.2f} GB"
    return f"{name}: {step_s:.3f} s/step, {step_s / peer_s:.2f} of the peer's; {memory}"


def tiny() -> str:
    results = {n: run(f"configs/{n}.py:tiny", "--steps 4") for n in WORKLOADS}
    texts = [f"{n} {r['start_to_first_step_s']:.1f} s" for n, r in results.items()]
    return "start to first step of :tiny: " + ", ".join(texts)


if __name__ == "__main__":
    for name in sys.argv[1:] or [*CASES, "tiny"]:
        print(tiny() if name == "tiny" else shape(name), flush=True)
