"""Fuzzes commands with hostile command lines and damaged logs, in this process.

  python -m tests.drills.fuzz commands 10000
  python -m tests.drills.fuzz logs 10000 --seed 7

A command line must end with exit code 0 and finite figures, or with 2 and a one-line message. A
log of any program, however damaged, compressed, coloured or prefixed, must give a report that has
every intact step, or says that it is damaged. The first violation is printed with its seed.
"""

import argparse
import collections
import contextlib
import gzip
import io
import json
import os
import pathlib
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from unittest import mock

from maxbench.cli import entry, train
from maxbench.config import command_line, options, recipes
from maxbench.hardware import gpus
from maxbench.reporting import build_report
from maxbench.run_logs import formats, readers
from tools import log_samples

VALUES = """
0 1 2 3 4 8 16 64 100 4096 -1 -7 0.5 1.5 1e-5 1e38 1e39 1e999 nan inf -inf NaN 0x10 1_000 1e3 007 +8
true false none None ten ½ ٣ 8, (35,44) (44,35) (1,2,3) () (((( [1,2] 35,44 {1:2} 1is,2 exit() 'x'
((1,256),(3,256,4)) ((1,2),3) "x" a/b ../.. /dev/null /none full selective random bf16 fp8 fp32 h100
gb200 auto xla te mxfp8 delayed nsys n1:1234 n1:0 n1 [::1]:80 :80 swiglu rmsnorm topk_softmax tiny
""".split()  # noqa: SIM905
VALUES += ["", " ", "9" * 23, "9" * 5000, "x" * 5000, "(" * 300, "a\nb", "\x1b[2J", "\0", "\udc80"]
VALUES += ["日本", "--steps"]
FLAGS = [*options.FLAGS, "gpus", "strong_scaling", "dry_run", "flagfile", "undefok", "config"]
FLAGS += ["x" * 5000]
REPORT = ["format", "title", "window", "gpu_type", "hardware", "cost", "interval", "mtbf"]
REPORT += ["full-names", "diff", "flagfile"]
JUNK = bytes(range(256)) + b"\n\r\n{}[]\"':,0123456789.-+eE nan inf null true" * 4


class Violation(AssertionError):
    """A command did not answer as it must."""


def call(name: str, words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = entry.run(name, words)
    return code, out.getvalue(), err.getvalue()


def short(value: object) -> str:
    return f"{value!r}"[:600]


def check(good: bool, why: str, value: object) -> None:
    """Raises Violation unless good."""
    if not good:
        raise Violation(f"{why}: {short(value)}")


# --- command lines ---


def flag(rng: random.Random, *names: Sequence[str]) -> list[str]:
    """A flag, usually an existing one, with a valid or invalid value."""
    name = rng.choice(rng.choice(names))
    if rng.random() < 0.1:  # a typing error
        at = rng.randrange(len(name))
        name = name[:at] + rng.choice(["", "x", ".", "[0]", "=", " ", "\x07"]) + name[at + 1 :]
    value = rng.choice(rng.choice([VALUES, VALUES[:13]]))
    dashes = rng.choice(["--"] * 8 + ["-", "---", "--no"])
    return rng.choice([[f"{dashes}{name}={value}"]] * 4 + [[dashes + name, value], [dashes + name]])


def damage(rng: random.Random, text: bytes) -> bytes:
    """Text of which parts are cut, repeated, reversed, flipped or replaced."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        b = rng.choice([b, min(b, a + 1), min(b, a + 40)])
        junk = bytes(rng.choice(JUNK) for _ in range(rng.choice([1, 1, 3, 30])))
        text = rng.choice([
            text[:a] + text[b:], text[:a] + junk + text[b:], text[:a] + text[a:b] * 3 + text[b:],
            text[:b], text[a:], text[:a] + text[a:b][::-1] + text[b:],
            text[:a] + bytes(x ^ 1 << rng.randrange(8) for x in text[a : a + 1]) + text[a + 1 :],
        ])  # fmt: skip
    return text


def command(rng: random.Random, folder: pathlib.Path) -> list[str]:
    """A command line of the trainer; some have a damaged workload file or GPU file."""
    path = rng.choice([*recipes.workloads()])
    presets = rng.choice(["", "", ":tiny", ":tiny,fp8", ":proxy", ":rehearse", ":", ":tny", ":a:b"])
    words = [f"--gpus={rng.choice([8, 64, 128, 512])}"] * rng.randrange(2)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        words += flag(rng, FLAGS, [f"config.{path}" for path in options.SETTINGS])
    rng.shuffle(words)
    if rng.random() < 0.07:
        text = path.read_bytes()
        path = folder / "workload.py"
        path.write_bytes(damage(rng, text))
    if rng.random() < 0.03:
        toml = pathlib.Path(gpus.__file__).with_name("gpus.toml").read_bytes()
        (folder / "gpus.toml").write_bytes(damage(rng, toml))
        words += ["--hardware", str(folder / "gpus.toml")]
    config = f"--config={path}{presets}" if rng.random() < 0.98 else rng.choice(VALUES)
    return [config, *words, "--json", "--json"]  # the first may become the value of a flag


def report_command(rng: random.Random, folder: pathlib.Path) -> list[str]:
    """A command line of the report for one log."""
    if not (log := folder / "log-pretrain_llama31_8b_fp8_8.out").exists():
        log.write_text("".join(map(nemo_line, range(50))))
    words = [str(log), *rng.choice([[]] * 9 + [["x" * 5000], ["\0"], ["\x1b[2J"], ["--"]])]
    for _ in range(rng.randrange(4)):
        words += flag(rng, REPORT)
    rng.shuffle(words)
    return words


def commands(count: int, seed: int) -> collections.Counter:
    """Runs `count` command lines; counts their exit codes."""
    codes = collections.Counter()
    violation = Violation("it would train")
    no_training = mock.patch.object(train.runtime, "set_environment", side_effect=violation)
    with tempfile.TemporaryDirectory() as name, no_training:
        for i in range(count):
            rng = random.Random(f"{seed} {i}")
            choices = [(command, "train")] * 9 + [(report_command, "report")]
            make, subcommand = rng.choice(choices)
            words = make(rng, pathlib.Path(name))
            try:
                code, out, err = call(subcommand, words)
                check_answer(subcommand, code, out, err)
            except Exception as e:
                raise Violation(f"command {i} of seed {seed}, {short(words)}: {short(e)}") from e
            codes[code] += 1
    return codes


def check_answer(subcommand: str, code: int, out: str, err: str) -> None:
    """Raises Violation unless train --json, or report, answered as it must."""
    check(code in (0, 2), "exit code", code)
    if code == 0:
        check(err == "", "exit code 0 with an error", err)
        if subcommand == "train":
            json.loads(out, parse_constant=lambda x: check(False, "a figure is", x))
    else:
        check(out == "", "exit code 2 with output", out)
        check(err.startswith(f"maxbench {subcommand}: error: "), "no error line", err)
        check(err.count("\n") == 1 and err[:-1].isprintable(), "not one printable line", err)
        check(len(err) < 1500 and "Traceback" not in err, "not a short message", err)


# --- logs ---


def nemo_line(i: int) -> str:
    return (
        f"Training epoch 0, iteration {i}/49 | lr: 7.5e-06 | global_batch_size: 128 | global_step: "
        f"{i} | peak_memory_usage: 708334 | reduced_train_loss: 11.96 | train_step_timing in s: "
        f"{9.4 + i % 3 / 100:.4} | TFLOPS_per_GPU: 611.2 | consumed_samples: {(i + 1) * 128}\n"
    )


LINES = (
    nemo_line,
    lambda i: (
        f"completed step: {i}, seconds: 7.9{i}, TFLOP/s/device: 460.480, Tokens/s/device: 1035.97, "
        "total_weights: 524288, loss: 0.000\n"
    ),
    lambda i: (
        f"\r| {i + 1}/50 [07:57<00:00, reduced_train_loss=7.310, global_step={i}.00, "
        "consumed_samples=32.0, train_step_timing in s=4.770]"
    ),
    lambda i: (
        f" [2026] iteration {i + 1:8d}/      50 | elapsed time per iteration (ms): 9400.0 | global "
        "batch size: 128 | lm loss: 1.1E+01 | 612.0MODEL_TFLOP/s/GPU\n"
    ),
)
ENDS = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n",
    "ValueError: \x1b[2Jno\x07\n",
    "Global Checkpoint Save : Rank: 0 : Save duration: 4.389s\n",
    "",
)


def run_folder(rng: random.Random, base: pathlib.Path) -> pathlib.Path:
    """A run folder with most of the files that a run writes."""
    run = command_line.run_of(["--config", f"{recipes.ROOT}/configs/llama31_8b.py", "--gpus=8"])
    tool = rng.choice(["", "", "nccltrace"])
    config = run.config.asdict() | {"profile": {"tool": tool}}
    path = base / run.name / f"{run.name}_1"
    path.mkdir(parents=True)
    result = {"schema": 1, "name": run.name, "status": rng.choice(["done", "running", "stopped"])}
    result |= {"config": config, "run": run.asdict() | {"profile": {"tool": tool}}}
    result |= {"device": {"gpu_type": "h100", "kind": "H100", "count": 8}}
    result |= {"started": 1e9, "checkpoint_saves": [{"seconds": 2.0}], "versions": {"jax": "0.10"}}
    steps = ({"step": i, "step_s": 9.4, "loss": 2.0, "peak_bytes": 1 << 30} for i in range(50))
    call = ("0: n1:1:2 [0] NCCL INFO AllGather: opCount 3 sendbuff 0x1 recvbuff 0x2 count 64 "
            "datatype 9 op 0 root 0 comm 0xabc [nranks=8] stream 0x4\n")  # fmt: skip
    for file, text in {
        "result.json": json.dumps(result),
        "job.json": '{"job": "7", "started": 5}',
        "exit.json": '{"code": 1, "phase": "train", "reason": "x"}',
        "metrics.jsonl": "".join(json.dumps(x) + "\n" for x in steps),
        "gpu-n1.csv": "t, 0, 690.5, 60\n" * 50,
        "srun-train-7.log": call * 50 + rng.choice(ENDS),
        "log-x.out": "".join(map(nemo_line, range(50))),
    }.items():
        if rng.random() < 0.8:
            (path / file).write_text(text)
    return path


def damage_file(rng: random.Random, path: pathlib.Path) -> None:
    """Damages a file, or replaces it by something that is not a regular file."""
    kind = rng.choice(["bytes"] * 16 + ["empty", "pipe", "folder", "loop", "gone"])
    text = path.read_bytes()
    path.unlink()
    match kind:
        case "bytes":
            path.write_bytes(damage(rng, text))
        case "empty":
            path.touch()
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
    if kind in ("bytes", "empty") and rng.random() < 0.7:
        os.utime(path, (1e9, 1e9))


STEPS = (0, 3, 50)  # of a log
LOSSES = ("2.5", "2.5", "2.5", "nan.0", "inf", "x")
WRAPPINGS = (
    lambda line: line,
    lambda line: line,
    lambda line: f"  3: [default3]:{line}",
    lambda line: f"[pod/job-0/main] 2026-01-01T00:00:00.123456789Z {line}",
    lambda line: json.dumps({"textPayload": line, "timestamp": "2026-01-01T00:00:00Z"}),
    lambda line: line.replace(": ", ":\x1b[32m \x1b[0m"),
)


def sample(rng: random.Random) -> str:
    """An intact log of a random program."""
    steps = rng.choice(STEPS)
    if rng.random() < 0.2:
        return "".join(map(rng.choice(LINES), range(steps)))
    every = range(9, steps, 10) if rng.random() < 0.2 else range(steps)
    return rng.choice([*log_samples.LOGS.values()])(every, 50, loss=rng.choice(LOSSES))


def export(rng: random.Random) -> tuple[str, bytes]:
    """Name and content of an event file or of a CSV."""
    tags = rng.sample(["perf/step_time_seconds", "learning/loss", "iteration-time", "tflops",
                       "throughput(tps)", "runtime/samples_per_sec", "accuracy"], 3)  # fmt: skip
    steps = range(rng.choice(STEPS))
    if rng.random() < 0.5:
        scalars = ((tag, i, rng.choice([9.4, 9.5, float("nan")])) for i in steps for tag in tags)
        return "events.out.tfevents.1700000000.n", log_samples.event_file(scalars)
    heads = [rng.choice(["Step", "_step", "x"]), *(rng.choice(["", "a - "]) + x for x in tags)]
    rows = [heads, *([str(i), "9.4", rng.choice(["", "NaN"]), "7"] for i in steps)]
    return "export.csv", "\n".join(map(",".join, rows)).encode()


def encode(rng: random.Random, text: str) -> bytes:
    """A log as bytes, some of which are compressed or in UTF-16."""
    if rng.random() < 0.8:
        return text.encode()
    data = text.encode(rng.choice(["utf-8", "utf-16", "utf-16-le"]))
    return gzip.compress(data) if rng.random() < 0.7 else data


def write_damaged(rng: random.Random, base: pathlib.Path) -> int:
    """Writes a run folder, a log or an export and damages it; returns the number of intact steps,
    as far as the bytes of the file show it."""
    name = f"log-pretrain_llama31_8b_fp8_8_{rng.choice(['1', chr(27), chr(10), 'nccltrace'])}.out"
    if rng.random() < 0.3:
        path = run_folder(rng, base)
    else:
        path = base / "\x1b[2J\udc80" if rng.random() < 0.1 else base / "logs"
        path.mkdir()
        text = sample(rng) + rng.choice(ENDS)
        ends = rng.choice(["\n", "\n", "\r\n"])
        wrapped = ends.join(map(rng.choice(WRAPPINGS), text.split("\n")))
        data = encode(rng, wrapped)
        if rng.random() < 0.15:
            name, data = export(rng)
        (path / name).write_bytes(data)
    files = sorted(path.iterdir())
    steps = next((x for x in files if x.name in ("metrics.jsonl", name)), path)
    intact = {*_lines(steps)}
    for file in rng.sample(files, min(len(files), rng.choice([1, 1, 2, 3]))):
        damage_file(rng, file)
    left = intact & {*_lines(steps)}
    markers = (b'"step_s"', *formats.FORMATS.marks)
    return max(sum(marker in line for line in left) for marker in markers)


def _lines(path: pathlib.Path) -> list[bytes]:
    """Lines of a file about steps."""
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    lines = [x for x in lines if any(word in x for word in (b'"step_s"', *formats.FORMATS.marks))]
    return [x for x in lines if b"validate step" not in x]


def logs(count: int, seed: int) -> collections.Counter:
    """Reports on `count` damaged logs; counts the exit codes."""
    codes = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        os.environ["MAXBENCH_CACHE"] = f"{name}/cache"
        for i in range(count):
            rng, base = random.Random(f"{seed} {i}"), pathlib.Path(name, "runs")
            base.mkdir()
            intact = write_damaged(rng, base)
            try:
                records = readers.read([base])
                read = sum(len(record.step_s) for record in records)
                # Steps without a time of their own need an intact neighbour, gbs or seq.
                noted = any("no time" in note for record in records for note in record.unread)
                missed = read < intact - 1 if any(r.inferred for r in records) else read < intact
                check(noted or not missed, "intact step lines are not read", (intact, read))
                for kind in ("json", rng.choice([*build_report.FORMATS])):
                    flags = ["--cost=2.5", "--gpu_type=h100", f"--format={kind}"]
                    code = check_report(kind, *call("report", [*flags, str(base)]))
            except Exception as e:
                raise Violation(f"log {i} of seed {seed}: {short(e)}") from e
            codes[code] += 1
            shutil.rmtree(base)
    return codes


def check_report(kind: str, code: int, out: str, err: str) -> int:
    """Raises Violation unless the output is a report; returns the exit code."""
    if code == 2:  # no log is left
        check(err.startswith("maxbench report: error: no run and no log"), "refused", err)
        return code
    check(code in (0, 1) and err == "", "exit code", (code, err))
    check(all(line.isprintable() for line in out.split("\n")), "control characters", out)
    if kind == "json":
        results = json.loads(out, parse_constant=lambda x: check(False, "a figure is", x))
        check(len(results["results"]) > 0, "no run", out)
    if kind == "html":
        check(out.endswith("</html>\n"), "incomplete page", out[-99:])
    return code


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("commands", "logs"))
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    start = time.process_time()
    codes = {"commands": commands, "logs": logs}[args.what](args.count, args.seed)
    summary = ", ".join(f"{n} with exit code {code}" for code, n in sorted(codes.items()))
    print(f"{args.count} {args.what}: {summary}; {time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
