"""plan with the real compiler: memory and communication against figures derived by hand."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import types
import xml.etree.ElementTree
from unittest import mock

import pytest

import maxbench
from benchmarks import plan_table
from maxbench.cli import entry
from maxbench.config import command_line, environment
from maxbench.cost_model import aot, compile_cache, hlo, memory, pipeline_timing, remat, simulate
from maxbench.cost_model.memory import GIB
from maxbench.hardware import published
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.pipeline.schedule import STEADY
from maxbench.planning import chrome_trace, planner
from maxbench.sharding import mesh
from maxbench.step.train_step import Step
from tests.conftest import CACHE, KEPT_FIGURES_JAX, resolve

# ml_collections loads config files this way.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
    pytest.mark.xdist_group("plan"),  # several plan the same row, which one worker compiles once
]
ROOT = pathlib.Path(__file__).parents[2]
compiler = pytest.mark.skipif(
    not compile_cache.versions()["jax-cuda13-plugin"], reason="needs pip install '.[plan]'"
)


def command(arguments: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "maxbench.plan", *arguments.split()]
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(CACHE)}
    variables = path | {"MAXBENCH_CACHE": os.environ["MAXBENCH_CACHE"]}
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=variables)


def planned(arguments: str) -> dict:
    """The plan of a command line, made in this process, which has loaded jax; no other test of this
    run compiles the same program again."""
    said = io.StringIO()
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(said):
        code = entry.run("plan", [*arguments.split(), "--json"])
    found = json.loads(said.getvalue())
    assert code == (0 if found["fits"] else 3)
    return found


def said_of_memory(folder: pathlib.Path) -> tuple[float, ...]:
    """GiB at the peak of the picture of memory, and the compiler's own."""
    text = (folder / "step.memory.svg").read_text()
    xml.etree.ElementTree.fromstring(text)
    said = re.search(r"([\d.]+) GiB at the peak; .* ([\d.]+) GiB<", text)
    return tuple(map(float, said.groups()))


def traffic(found: dict) -> dict:
    return {(x["kind"], x["axes"]): x for x in found["communication"]}


@compiler
@pytest.mark.skipif(not environment.version("nvidia-cuda-nvcc"), reason="needs a real ptxas")
def test_the_program_is_the_one_that_machine_code_is_made_of():
    overrides = {"model.layers": 1}
    run = resolve("llama31_8b", "tiny", overrides, gpu_type="h100", dp=2, gbs=8)
    step = Step(run, mesh.make_mesh(run.layout, aot.devices(run)))
    found = [step.compile(**more)[0] for more in ({}, aot.PROGRAM_ONLY)]
    whole, read = (re.sub(", metadata=.*", "", p.as_text()).split("\n", 1)[1] for p in found)
    assert "__cublas$lt$matmul" in read
    assert read == whole
    assert len({p.memory_analysis().temp_size_in_bytes for p in found}) == 1


@compiler
def test_llama2_70b_on_128_gpus():
    """Layer weights are 856 M x 2 bytes; each is gathered twice and its gradient reduced once."""
    row = "--config configs/llama2_70b.py --gpus 128"
    more = planned(row)
    found = planned(f"{row} --sensitivity --config.train.remat=save_dot_except_mlpwi")
    half, *_, double = found["sensitivity_s"].pop("memory size")
    assert double < more["step_s"] < found["step_s"]  # what is computed again of fewer layers
    assert 1.05 < half / double < 1.3
    assert more["deltas_s"].keys() == {"recomputation"}
    # Of 22 layers, context and the MLP's first product.
    kept = more["memory"]["activations"] - found["memory"]["activations"]
    assert kept == pytest.approx(22 * 2 * 4096 * 2 * (8192 + 2 * 28672), rel=0.02)
    for seconds in found["sensitivity_s"].values():  # slower, slower, faster, faster; or latency
        assert sorted(seconds) in (seconds, seconds[::-1])
        assert min(seconds) <= found["step_s"] <= max(seconds)
    slower = found["sensitivity_s"]["matrix products"][0] - found["step_s"]
    assert slower == pytest.approx(found["parts_s"]["gemm"], rel=0.1)  # at half the rate
    m = found["memory"]
    arguments = 68_976_648_192 * 12 / 128  # fp32 weights and two moments, split by all
    assert m["weights"] + m["optimizer"] == pytest.approx(arguments * 14 / 12, rel=0.01)  # + copy
    tokens = 2 * 4096
    saved = tokens * 2 * (8192 + 8192 + 2 * 1024 + 8192) * 80  # input, q, k, v, attn_out
    assert m["activations"] == pytest.approx(saved, rel=0.01)
    assert m["gradients"] == pytest.approx(68_976_648_192 * 2 / 128, rel=0.01)
    assert m["total"] < 50 * GIB
    layers = 80 * 2 * (8192 * 128 * (64 + 8 + 8 + 64) + 3 * 8192 * 28672)
    by = traffic(found)
    gathered = 2 * layers + 2 * 32000 * 8192  # the head once; tokens travel to the embedding
    assert by["all-gather", "fsdp"]["bytes"] == pytest.approx(gathered, rel=0.01)
    # The head's gradient is reduced with the layers'; the embedding's may be in fp32.
    assert by["reduce-scatter", "fsdp"]["bytes"] == pytest.approx(layers, rel=0.02)
    assert by["all-gather", "fsdp"]["link"] == "network"
    waited = by["all-gather", "fsdp"]["exposed_s"] / by["all-gather", "fsdp"]["busy_s"]
    assert waited < 0.1
    # What is saved of layers, into its box and out of it: no gradient is turned to be scattered.
    assert found["parts_s"]["copy"] < 0.01 * found["step_s"]
    assert abs(found["published"]["error"]) < 0.05
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"], rel=1e-6)
    assert found["deltas_s"] == {}  # the published program is XLA's too
    assert found["published"]["error_as_published"] == found["published"]["error"]
    # Again, from the cache, without jax.
    again = json.loads(command(f"{row} --json").stdout)
    assert again["compile"]["cached"]
    assert again["step_s"] == more["step_s"]
    other = "--network_gbps 5 --memory_margin 0.2 --gpus_per_node 8 --nvlink_gpus 8"
    other = planned(f"--config configs/llama2_70b.py --gpus 128 {other} --tokens 1e12")
    assert other["compile"]["cached"]  # the program does not know
    assert other["memory"]["capacity"] == pytest.approx(m["capacity"] * 0.74 / 0.94, rel=1e-6)
    slow = traffic(other)["all-gather", "fsdp"]
    # A tenth of the network: ten times the time of the data, and the same of a ring's steps.
    assert 6 < slow["busy_s"] / by["all-gather", "fsdp"]["busy_s"] < 10
    assert other["step_s"] > slow["busy_s"]
    days = other["step_s"] * 1e12 / (256 * 4096) / 86400
    assert other["budget"]["days_without_failures"] == pytest.approx(days, rel=1e-4)


@compiler
def test_layers_as_code_are_recomputed_all_the_same():
    """XLA would merge recomputation with the forward pass, and keep what it gives."""
    row = "--config configs/llama31_8b.py --layers 2 --mbs 4 --config.train.remat="
    none, full = (planned(f"{row}{remat}") for remat in ("none", "full"))
    saves = lambda found: found["memory"]["total"]
    per_token = 4096 + 2 * 1024 + 4096 + 4096 + 3 * 14336  # q, k, v, context, attn_out, up, act
    layer = 4 * 8192 * 2 * per_token
    # Of two: the other is the one computed again. If XLA had merged them, nothing were saved.
    assert saves(none) - saves(full) > 0.95 * layer
    assert none["memory"]["activations"] > 0.9 * 2 * layer


@compiler
def test_norms_are_made_again_for_what_they_gave():
    row = "--config configs/llama31_8b.py --gpus 8 --layers 4 --config.train.remat="
    none, norms = (planned(f"{row}{remat}") for remat in ("none", "save_gemms_only"))
    stream = 2 * 2 * 4096 * 4096  # x of one place in a layer, of two sequences over cp
    # What both norms of a layer gave, and its queries in the order of pairs over cp.
    assert none["memory"]["total"] - norms["memory"]["total"] > 0.9 * 4 * 3 * stream
    assert norms["step_s"] < 1.01 * none["step_s"]
    # A product adds to the stream, which stays: after the embedding, of the two microbatches that
    # stand in a loop's body, nothing copies it.
    program = hlo.parse(
        compile_cache.load(command_line.run_of(f"{row}save_gemms_only".split())).text
    )
    ops = [op for place in program.computations.values() for op in place.ops]
    assert sum(op.base == "copy" and hlo.size(op.shape) == stream for op in ops) <= 2


@compiler
def test_what_is_offloaded_waits_in_the_hosts_memory(tmp_path):
    """Of 4 layers, over fsdp; its way there and back is waited for as far as nothing hides it."""
    row = "--layers 4 --fsdp 8 --mbs 2 --config.train.remat=none --config.train.offload=mlp_up"
    found = planned(f"--config configs/llama31_8b.py {row} --timeline {tmp_path}/step.json")
    size = 4 * 2 * 8192 * 2 * 14336 * 2
    assert found["memory"]["host"] == size
    per_token = 2 * 4096 + 2 * 1024 + 2 * 4096 + 14336  # input, q, k, v, context, attn_out, act
    kept = 4 * 2 * 8192 * 2 * per_token
    assert found["memory"]["activations"] == pytest.approx(kept, rel=0.02)
    there = size / (64e9 * GPU_TYPES["h100"].efficiency.memory)
    assert 0 < found["parts_s"]["offload"] < 2 * there
    assert chrome_trace.COLORS["offload"] in (tmp_path / "step.svg").read_text()
    peak, compiled = said_of_memory(tmp_path)
    assert peak == pytest.approx(compiled, rel=0.15)  # it is not on the GPU


@compiler
@pytest.mark.core
def test_llama31_405b_on_b200_does_not_run_its_forward_pass_twice():
    """The tensor-parallel layers, 4 microbatches: FLOPs are the model's, causal, 3 passes."""
    row = "--config configs/llama31_405b.py --gpu_type b200 --tp 8 --cp 2 --gbs 4 --layers 4"
    found = planned(row)
    executed = found["hfu"] * GPU_TYPES["b200"].bf16_tflops
    assert executed == pytest.approx(found["tflops_per_gpu"]["causal"], rel=0.05)
    by = traffic(found)
    assert by["all-gather", "tp"]["link"] == "NVLink"
    assert by["reduce-scatter", "tp"]["count"] >= 4 * 4 * 2
    # A ring of two sends k and v of half a sequence, forward; backward they are kept, and their
    # gradients go home: of each of 4 layers and 4 microbatches.
    ring, kv = by["permute", "cp"], 2 * 4096 * 8 * 128 * 2 / 8
    assert ring["link"] == "network"
    assert ring["bytes"] == 4 * 4 * (kv + kv)


@compiler
def test_grok1_brings_tokens_to_their_experts():
    """Dispatch and combine, forward and backward: at least four all-to-alls a layer."""
    found = planned("--config configs/grok1_314b.py --gpus 16")  # a row of the table, below
    exchanged = traffic(found)["all-to-all", "ep"]
    assert exchanged["link"] == "network"
    tokens = 8 * 4096 * 2 // 4  # of one GPU: mbs x seq / tp, top-2
    assert exchanged["count"] >= 4 * 4 * 32  # of 4 layers and 32 microbatches
    assert exchanged["bytes"] >= 4 * 4 * 32 * tokens * 6144 * 2


@compiler
def test_grok1_counts_choices_beside_a_product():
    """In a pipeline: they came behind dx on its way over the network, and were waited for."""
    counted = traffic(planned("--config configs/grok1_314b.py --gpus 128"))["all-reduce", "cp+tp"]
    assert counted["count"] >= 8 * 32  # of a stage's 8 layers and 32 microbatches
    assert counted["exposed_s"] < 0.05 * counted["busy_s"]


@compiler
def test_what_does_not_fit_is_told_what_would():
    """What the message offers fits, and --best_remat finds it. Compiled above, for a GPU on which
    29 of 79 GiB may be used: of the 30 there is 1 too much, and 7 are activations."""
    row = "--config configs/llama31_8b.py --layers 2 --mbs 4 --memory_margin 0.57"
    done = command(f"{row} --config.train.remat=none")
    assert done.returncode == 3
    offer = r"does not fit: \d+\.\d GiB over; what would: --config\.train\.remat=(\w+)"
    best = planned(f"{row} --best_remat")
    assert best["fits"]
    assert best["remat"] == re.search(offer, done.stdout)[1]


def test_best_remat_keeps_layers_in_the_room_that_is_left(monkeypatch):
    """Also where what is kept takes more than by arithmetic."""
    run, tried = command_line.run_of(["--config", "llama2_70b", "--gpus", "128"]), []

    def plan(run):
        total = 15 * GIB + 1.3 * memory.activation_bytes(run)
        spare = 75 * GIB - total
        tried.append(run)
        found = types.SimpleNamespace(total=total, spare=spare)
        return types.SimpleNamespace(run=run, memory=found, fits=spare >= 0)

    monkeypatch.setattr(planner, "plan", plan)
    best = planner.best_remat(run)
    assert best.fits
    assert len(tried) <= 6
    policy, layers = best.run.train.remat, best.run.train.remat_layers
    assert 5 < layers < 80
    assert not plan(remat.with_remat(run, policy, layers=layers - 5)).fits


@compiler
def test_without_a_pipeline_too_a_pass_hides_the_traffic_of_the_other():
    """Of gathers nine tenths were waited for, of scatters half."""
    found = planned("--config configs/llama31_405b.py --gpus 32 --layers 2")
    for kind in ("all-gather", "reduce-scatter"):
        over_tp = traffic(found)[kind, "tp"]
        assert over_tp["exposed_s"] < 0.4 * over_tp["busy_s"]


@compiler
def test_llama31_405b_in_four_stages():
    """30 layers of Llama 3.1 405B: residuals of 36 chunks of four sequences, one slot to spare."""
    row = "--config configs/llama31_405b.py --gpus 64"
    found = planned(row)
    m = found["memory"]
    assert found["fits"]
    tokens = 4 * 8192 // 2  # over cp; the rest is over tp
    layer = 2 * tokens * (3 * 16384 + 4 * 1024 + 2 * 53248) // 8  # x, q, o; k, v of two; mlp up
    one = layer + 2 * tokens * 16384 // 8
    assert m["activations"] == pytest.approx(36 * one, rel=0.06)
    ends = 2 * 128256 * 16384
    weights = 2 * (99_833_823_232 - ends) * 32 / 30 / 32  # bf16, pp 4 x tp 8, 30 + 2 slots
    assert m["gradients"] == pytest.approx(weights + 2 * ends / 8, rel=0.01)
    by = traffic(found)
    # In pieces beside the fill and the drain: once, but for what comes again in ticks without one,
    # 33 of each for the pieces of 7 chunks in 4 ticks.
    for kind in ("all-gather", "reduce-scatter"):
        travels = by[kind, "cp"]
        assert weights <= travels["bytes"] < 33 / (7 * 4) * weights
        assert travels["count"] > 30
        assert travels["exposed_s"] < 0.6 * travels["busy_s"]
    # Each microbatch, each way for each of a stage's 8 chunks.
    sent, times = 2 * tokens * 16384 // 8, 2 * 16 * 8
    assert by["permute", "pp"]["count"] == pytest.approx(times, rel=1e-4)
    assert by["permute", "pp"]["bytes"] == pytest.approx(times * sent, rel=4e-4)  # ticks' averages
    assert found["parts_s"]["idle"] < 0.05 * found["step_s"]
    # Forward and backward pass hide each other's traffic: it was 15 % of the step.
    assert found["parts_s"]["exposed"] < 0.08 * found["step_s"]
    # Turns and slots: sequences lie as they travel, and nothing is turned round.
    assert found["parts_s"]["copy"] < 0.035 * found["step_s"]
    # Turns are had while what was sent is on its way, and y may come later than one takes.
    run = command_line.run_of(row.split())
    program = hlo.parse(compile_cache.load(run).text)
    first = simulate.simulate(
        program, planner.costs_of(run), planner.branch_frequencies(run, program)
    )
    orders = pipeline_timing.event_orders(program, first.slack_s)
    assert {(order[:3], order[3:5]) for order in orders} == {("Yfy", "Xb")}
    assert min(orders.values()) > first.branch_s[pipeline_timing.FORWARD_CHUNK_SWITCH]
    # Each box is made by itself, and what the optimizer gives is where the state was.
    copies = [hlo.size(op.shape) for op in program.entry.ops if op.base == "copy"]
    assert max(copies) < 0.6e9  # where the largest parts of a state have 3.5e9
    # 30 layers in 32 slots: a stage's work is that of 8 layers, 64 microbatches, causal.
    layers = 64 * 3 * 2 * (99_833_823_232 - ends) * 8 / 30 * 4096 / 8
    assert found["parts_s"]["gemm"] > layers / 989e12 / GPU_TYPES["h100"].efficiency.gemm_bf16
    as_published = found["step_s"] - sum(found["deltas_s"].values())
    assert found["published"]["as_published_s"] == pytest.approx(as_published)
    assert {"copies", "exposed tp"} <= set(found["deltas_s"])


@compiler
def test_a_pipeline_in_fp8_gathers_early_and_keeps_weights_once():
    """All collectives wait in one queue: of the gathers three quarters were waited for, when those
    of a drain left after its pieces. A chunk's weights are turned for the forward pass when its
    turn begins; where XLA turned the whole stack for that, copies were 15 % of the step."""
    row = "--config configs/nemotron4_340b.py --gpus 512 --dtype fp8"
    found = planned(row)
    over_tp = traffic(found)["all-gather", "tp"]
    assert over_tp["exposed_s"] < 0.5 * over_tp["busy_s"]
    assert found["parts_s"]["copy"] < 0.06 * found["step_s"]
    run = command_line.run_of(row.split())
    program = hlo.parse(compile_cache.load(run).text)
    steady = next(op for op in program.entry.ops if op.op_name.endswith(f"{STEADY}/while"))
    stack = "f8e4m3fn", (96 // 8,)  # of a stage's layers; as many heads has one layer
    weights = [s.bytes for s in hlo.leaves(steady.shape) if (s.dtype, s.dims[:1]) == stack]
    assert sum(weights) == pytest.approx(memory.stage_weights(run)[0], rel=0.01)


@compiler
def test_what_fp8_quantizes_is_read_once_for_it():
    """Left alone, XLA makes one kernel of a norm, whose y in fp32 is read once for FP8 and once for
    its largest magnitude; and puts magnitudes off, and reads what was quantized once more."""
    row = "--config configs/llama31_405b.py --gpus 128 --dtype fp8"
    found = planned(row)
    parts = found["parts_s"]
    assert parts.get("amax", 0) < 1e-3 * found["step_s"]
    program = hlo.parse(compile_cache.load(command_line.run_of(row.split())).text)
    ops = [op for place in program.computations.values() for op in place.ops]
    norms = [op for op in ops if "_norm/" in op.op_name and op.base == "fusion"]
    stream = 2 * 8192 * 16384 // 16  # of two sequences, over cp and tp
    wide = lambda op: any(s.dtype == "f32" and s.elements >= stream for s in hlo.leaves(op.shape))
    assert norms
    assert not any(map(wide, norms))
    # In most ticks the host decides twice: whether a turn begins, and whether it is one of few.
    assert parts["host"] < 0.0025 * found["step_s"]
    # And tp's traffic: y is scattered beside two products for weights, not one.
    assert parts["exposed"] < 0.03 * found["step_s"]


@compiler
def test_llama31_70b_screen_and_timeline(tmp_path):
    row = "--config configs/llama31_70b.py --fsdp 8 --tp 4 --layers 4 --gpu_type h200"
    done = command(f"{row} --timeline {tmp_path}/step.json")
    assert done.returncode == 0, done.stderr
    for text in ("fits, ", "all-gather", "predicted step", "matrix products", "MFU", "days to 1T"):
        assert text in done.stdout
    assert len(done.stdout.splitlines()) < 40
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    xml.etree.ElementTree.fromstring((tmp_path / "step.svg").read_text())
    peak, compiled = said_of_memory(tmp_path)
    assert peak == pytest.approx(compiled, rel=0.15)


@compiler
def test_a_notebook_gets_what_the_command_prints():
    row = "--config llama31_70b --fsdp 8 --tp 4 --layers 4 --gpu_type h200"  # compiled above
    done, before = command(row), dict(os.environ)
    found = maxbench.plan("llama31_70b", fsdp=8, tp=4, layers=4, gpu_type="h200", sensitivity=True)
    assert dict(os.environ) == before
    told = str(found).partition("\ncompiled in")[0]
    assert told == done.stdout.partition("\ncompiled in")[0]
    assert found.data() == found.figures
    assert found.figures["step_s"] == found.records()[0]["step_s"] == found.best.step_s
    assert len(found.figures["sensitivity_s"]["network bandwidth"]) == 4
    shown = found._repr_html_()
    assert shown.count("<table>") == 3
    for text in (f"{found.best.step_s:.3f} s a step", "matrix products", "activations", "x 0.5"):
        assert text in shown


@compiler
def test_search_finds_the_given_layout_among_others():
    row = "--config llama31_70b --fsdp 8 --tp 4 --layers 4 --gpu_type h200"  # compiled above
    done = command(f"{row} --search --compiled 1")
    assert done.returncode == 0, done.stderr
    assert "(as given)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--config configs/llama2_70b.py --gpus 100 --schedule", "nearest: --gpus"),
        ("--config configs/llama31_405b.py --gpus 4", "fits 4 h100; by arithmetic 128 do: --pp 16"),
        ("--config configs/llama31_405b.py --gpus 100", "by arithmetic 112 do: --pp 14"),
        ("--config configs/llama2_70b.py --gpus 128 --dtype fp4", "dtype='fp4' is not one of"),
        ("--config configs/llama2_70b.py --gpus 128 --gpu_type h300", "did you mean"),
        ("--config configs/llama2_70b.py --gpus 128 --timeline x.png", "must be a .json file"),
        ("--config configs/llama2_70b.py --fsdq 128", "fsdp"),
        ("--config configs/llama2_70b.py --gpus 128 --schedule", "pp=1 has none"),
        ("--config configs/llama2_70b.py --gpus 128 --compiled 0", "compiled"),
        (
            "--config configs/llama2_70b.py --gpus 128 --nvlink_gpus 4",
            "not a whole number of nodes",
        ),
        ("--config configs/llama2_70b.py --gpus 128 --memory_margin 0.95", "below 0.94"),
        ("--calibrate no_such_run", "no such file or folder: no_such_run"),
        ("--config configs/llama2_70b.py --gpus 64 --as_published --best_remat", "excludes"),
        (
            "--config configs/nemotron4_340b.py --gpus 128 --gpu_type gb200 --as_published",
            "nothing is published for nemotron4 340b bf16 on gb200",
        ),
    ],
)
def test_bad_input_is_exit_code_2(arguments, message):
    done = command(arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_as_published_takes_the_published_recomputation_and_microbatches():
    """Whatever else was asked for, or a workload file says."""
    for row in published.rows():
        words = f"--config {ROOT}/configs/{row.model}_{row.size}.py --gpus {row.gpus}".split()
        run = command_line.run_of([*words, "--dtype", row.dtype])
        theirs = planner.as_published(run)
        assert (theirs.train.remat, theirs.train.remat_layers) == (row.remat, 0)
        assert theirs.layout.mbs == row.mbs
        layout = dataclasses.replace(theirs.layout, mbs=run.layout.mbs)
        assert dataclasses.replace(theirs, train=run.train, layout=layout) == run
        full = dataclasses.replace(run, train=dataclasses.replace(run.train, remat="full"))
        assert planner.as_published(full) == theirs
    words = f"--config {ROOT}/configs/llama31_8b.py --gpus 32 --gbs 64".split()
    assert planner.as_published(command_line.run_of(words)).layout.mbs == 2  # other work, as it is


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(compile_cache, "versions", lambda: {"jax-cuda13-plugin": ""})
    with pytest.raises(ValueError, match=r"in a clone, '\.\[plan\]' brings it"):
        compile_cache.require_compiler()


def test_a_damaged_cache_entry_is_no_entry(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXBENCH_CACHE", str(tmp_path))
    run = command_line.run_of(f"--config {ROOT}/configs/llama2_70b.py --gpus 64".split())
    (tmp_path / f"{compile_cache.key(run)}.json.gz").write_bytes(b"\x1f\x8bnot gzip")
    assert compile_cache.load(run) is None


def test_the_key_knows_what_changes_a_program():
    def key(arguments):
        return compile_cache.key(
            command_line.run_of(f"--config {ROOT}/configs/{arguments}".split())
        )

    base = key("llama2_70b.py --gpus 64")
    assert key("llama2_70b.py --gpus 64 --output_dir elsewhere") == base
    assert key("llama2_70b.py --gpus 64 --gpu_type h200") != base
    assert key("llama2_70b.py --gpus 128") != base


def test_policies_are_ordered_by_what_they_keep():
    run = command_line.run_of(f"--config {ROOT}/configs/llama2_70b.py --gpus 64".split())
    names = [one.train.remat for one in remat.policies(run)]
    assert (names[0], names[-1]) == ("none", "full")
    assert "save_gemms_only" not in names  # as none in a loop, which keeps what a name says alone
    run = command_line.run_of(f"--config {ROOT}/configs/llama31_8b.py --gpus 8".split())
    assert [one.train.remat for one in remat.policies(run)][:2] == ["none", "save_gemms_only"]


def test_chips_and_gpus_are_the_same():
    for gpu in GPU_TYPES.values():
        assert gpu.chip.memory_bytes == pytest.approx(gpu.memory_gb * 1e9, rel=0.08)
        assert gpu.chip.memory_bytes_per_s == pytest.approx(gpu.memory_gbps * 1e9, rel=0.02)


# The table in docs/.


def table() -> list[dict]:
    with open(ROOT / "docs" / "plan.csv", newline="") as f:
        return list(csv.DictReader(f))


def test_the_table_has_every_row():
    configs = sorted(str(p) for p in (ROOT / "configs").glob("*.py"))
    every = plan_table.rows(configs)
    keys = ("gpu_type", "gpus", "dtype", "scaling")
    ours = [(pathlib.Path(r.config).stem, *(str(getattr(r, k)) for k in keys)) for r in every]
    assert [(x["workload"], *(x[k] for k in keys)) for x in table()] == ours
    assert plan_table.as_markdown(table()) in (ROOT / "docs/reference/plan_table.md").read_text()


@compiler
@pytest.mark.parametrize(
    ("workload", "gpus", "dtype", "gpu"),
    [
        pytest.param("llama2_70b", 128, "bf16", "h100", marks=pytest.mark.core),
        ("llama31_405b", 64, "bf16", "h100"),
        # 0.12.0.1 once turned all its weights round in each tick, and copied all sums in each turn.
        ("nemotron4_340b", 512, "fp8", "h100"),
        pytest.param("nemotron4_340b", 128, "fp8", "gb200", marks=pytest.mark.core),
        pytest.param("grok1_314b", 16, "bf16", "h100", marks=pytest.mark.core),
    ],
)
def test_the_table_is_current(workload, gpus, dtype, gpu):
    named = {"workload": workload, "gpus": str(gpus), "dtype": dtype, "gpu_type": gpu}
    line = next(x for x in table() if (named | {"scaling": "weak"}).items() <= x.items())
    row = f"--config configs/{workload}.py --gpus {gpus} --dtype {dtype} --gpu_type {gpu}"
    found = planned(row)
    # With 0.12.0.1 Grok-1's step is 1.9 % longer.
    time, memory = (0.01, 0.02) if KEPT_FIGURES_JAX else (0.04, 0.03)
    if gpu == "gb200" and not KEPT_FIGURES_JAX:
        memory = 0.08  # 7 GiB less
    assert found["step_s"] == pytest.approx(float(line["step_s"]), rel=time)
    assert found["memory"]["total"] / GIB == pytest.approx(float(line["memory_gib"]), rel=memory)


def test_predictions_of_the_rows_that_are_xla():
    """Llama 2 70B ran on XLA with this layout, and recomputed more, so compared as published: in
    BF16 every row within 2 %, in FP8 15.

    In FP8 the published program takes scales from the step before. Ours takes fewer passes over
    memory there, and waits for no gather: it is further ahead the more GPUs there are, most on
    1,024, 13 %.
    """
    rows = [x for x in table() if x["workload"] == "llama2_70b" and x["step_s"]]
    assert len(rows) == 12
    for row in rows:
        error = abs(float(row["error_as_published_pct"]))
        assert error < (2 if row["dtype"] == "bf16" else 15), row["gpus"]
    assert {float(x["published_s"]) for x in rows} <= {r.step_s for r in published.rows()}
