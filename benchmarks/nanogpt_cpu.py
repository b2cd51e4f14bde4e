"""Time to nanoGPT's held-out loss on the local CPU: nanoGPT's Shakespeare recipe and ours, in turn.

  python benchmarks/nanogpt_cpu.py NANOGPT INPUT_TXT [--python PYTHON] [--rounds 3]

NANOGPT is a clone of https://github.com/karpathy/nanoGPT, INPUT_TXT the 1 MB of
https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare, PYTHON one that has torch.
Both train 4 layers of width 128 with 4 heads on sequences of 64 characters, 12 to a batch, in fp32:
nanoGPT for the 2,000 steps of its README's recipe, maxbench's Llama for 1,000 steps with the same
peak and final learning rate, warm-up and data. A time is that of the command: start, compilation,
training and the last evaluation. Held-out losses are over all of val.bin by maxbench, and over 200
random batches by nanoGPT, in a command of its own that is not timed.
Result: benchmarks/results/nanogpt_cpu.json.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

PATH = pathlib.Path(__file__).parent / "results" / "nanogpt_cpu.json"
STEPS = 1000  # of ours
SHAPE = "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
NANOGPT = f"""
train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 {SHAPE}
--max_iters=2000 --lr_decay_iters=2000 --eval_interval=2000 --log_interval=100
"""
EVALUATION = "--init_from=resume --eval_only=True --eval_iters=200"
OURS = f"""
-m maxbench.train --config llama31_8b:tiny --dtype fp32 --layers 4 --seq 64 --mbs 12 --gbs 12
--config.model.embed=128 --config.model.heads=4 --config.model.kv_heads=4
--config.model.head_dim=32 --config.model.mlp=344 --config.model.vocab=65
--config.optim.lr=1e-3 --config.optim.lr_min=1e-4 --config.optim.warmup=100 --steps {STEPS}
"""


def run(command: list[str], folder: pathlib.Path) -> tuple[str, dict[str, float]]:
    """Output of a command, its seconds and its CPU seconds.

    Raises:
      SystemExit: the command failed; the end of its output.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, {"s": round(seconds, 1), "cpu_s": round(cpu_s, 1)}


def nanogpt(python: str, folder: pathlib.Path) -> dict[str, float]:
    """Time and held-out loss of one run of nanoGPT."""
    command = [python, *NANOGPT.split()]
    _, figures = run(command, folder)
    output, _ = run([*command, *EVALUATION.split()], folder)
    return figures | {"held_out_loss": float(re.findall(r"val loss ([\d.]+)", output)[-1])}


def ours(folder: pathlib.Path, data: pathlib.Path) -> dict[str, float]:
    """Time and held-out loss of one run of maxbench."""
    files = ["--data", str(data / "train.bin"), "--eval_data", str(data / "val.bin")]
    output, figures = run([sys.executable, *OURS.split(), *files], folder)
    loss = re.findall(r"evaluation after step \d+: loss ([\d.]+)", output)[-1]
    return figures | {"held_out_loss": float(loss)}


def main() -> None:
    """Runs both in turn, prints the ratio of their times and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nanogpt", type=pathlib.Path)
    parser.add_argument("input_txt", type=pathlib.Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    data = args.nanogpt.resolve() / "data" / "shakespeare_char"
    if args.input_txt.resolve() != data / "input.txt":
        shutil.copy(args.input_txt, data / "input.txt")
    run([args.python, str(data / "prepare.py")], args.nanogpt)
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            here = pathlib.Path(folder)
            rounds.append(
                {"nanogpt": nanogpt(args.python, args.nanogpt), "maxbench": ours(here, data)}
            )
        print(rounds[-1], flush=True)
    ratio = statistics.median(r["maxbench"]["s"] / r["nanogpt"]["s"] for r in rounds)
    gap = statistics.median(
        r["maxbench"]["held_out_loss"] - r["nanogpt"]["held_out_loss"] for r in rounds
    )
    print(f"maxbench's time over nanoGPT's: {ratio:.2f}; its held-out loss: {gap:+.3f} nats")
    commit = ["git", "-C", str(args.nanogpt), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(commit, capture_output=True, text=True).stdout.strip()
    result = {
        "nanogpt_commit": commit,
        "cores": os.cpu_count(),
        "steps": {"nanogpt": 2000, "maxbench": STEPS},
        "time_ratio": round(ratio, 3),
        "loss_difference": round(gap, 4),
        "rounds": rounds,
    }
    PATH.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
