"""Traces whose truth is known, of each form: sums, exposed communication, waits, faults."""

import gzip
import json
import pathlib
import random
import re
import shutil
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import maxbench as mb
from maxbench.cli import entry
from maxbench.config.errors import UserError
from maxbench.traces import accounts, events
from maxbench.traces.events import KINDS, Event
from tests.traces import made

H200 = pathlib.Path("benchmarks/results/h200")
MARKS = [(i, 10 * i - 0.9, 10 * i + 9.05) for i in range(3)]  # on the host, ahead of the device
FORMS = {
    "kineto": lambda folder: made.kineto(folder / "a.json", made.steps(3), MARKS),
    "kineto_gz": lambda folder: made.kineto(folder / "a.json.gz", made.steps(3), MARKS),
    "kineto_late_info": lambda folder: made.kineto(
        folder / "a.json", made.steps(3), MARKS, late_info=True
    ),
    "kineto_without_marks": lambda folder: made.kineto(folder / "a.json", made.steps(3)),
    "nsight": lambda folder: made.nsight(folder / "a.sqlite", made.steps(3), MARKS),
    "nsight_without_marks": lambda folder: made.nsight(folder / "a.sqlite", made.steps(3)),
    "xplane": lambda folder: made.xplane(folder / "a.xplane.pb", [made.steps(3)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_where_the_same_steps_went(form, tmp_path):
    found = mb.trace([FORMS[form](tmp_path)])
    (rank,) = found.ranks
    assert (rank.trace.device, found.gpu_type) == (made.DEVICE, "h100")
    assert len(rank.accounts) == 3
    for i, a in enumerate(rank.accounts):
        assert {part: ns / made.MS for part, ns in a.parts.items()} == made.PARTS
        assert a.step.end - a.step.start == sum(a.parts.values()) == made.STEP_MS * made.MS
        assert a.hidden == made.HIDDEN * made.MS
        assert a.step.number == i
        assert {name: ns / made.MS for name, ns in a.streams.items()} == {
            "stream 7": 6.25,
            "stream 20": 6.5,
        }
    (gap,) = {(g.after, g.before, g.ns) for g in rank.accounts[0].gaps}
    assert gap == ("Memcpy DtoD", "loop_add_fusion_3", 0.75 * made.MS)
    kernels = {k.name: k for k in found.kernels}
    assert kernels["Memcpy DtoD"].gbytes_per_s == pytest.approx(4096 / 0.5e6)
    assert sum(k.seconds for k in kernels.values()) == pytest.approx(9.25e-3)
    assert found.notes == ()


def test_an_interval_is_divided_without_rest():
    """Against an array with an entry for each nanosecond."""
    draw = random.Random(0)
    for _ in range(200):
        made_up = sorted(
            Event(start, start + draw.randint(0, 30), draw.choice(KINDS), "", "s")
            for start in (draw.randint(-20, 100) for _ in range(draw.randint(0, 12)))
        )
        own, idle = accounts.exclusive(made_up, 0, 90)
        expected = [0] * len(made_up)
        idle_ns = 0
        for now in range(90):
            running = [
                (KINDS.index(e.kind), e.start, i)
                for i, e in enumerate(made_up)
                if e.start <= now < e.end
            ]
            if running:
                expected[min(running)[2]] += 1
            else:
                idle_ns += 1
        assert [ns for _, ns in own] == expected
        assert sum(end - start for start, end in idle) == idle_ns
        assert accounts.union(made_up, 0, 90) == 90 - idle_ns


def test_the_innermost_call_at_each_time():
    call = lambda start, end, name: Event(start, end, "host", name, "t")
    calls = [call(0, 100, "main"), call(10, 40, "block_until_ready"), call(20, 30, "poll"),
             call(120, 130, "next")]  # fmt: skip
    assert [tuple(x) for x in events.innermost(calls)] == [
        (0, 10, "main", False),
        (10, 20, "block_until_ready", True),
        (20, 30, "block_until_ready", True),
        (30, 40, "block_until_ready", True),
        (40, 100, "main", False),
        (120, 130, "next", False),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(Args<4096ul>)", "communication"),
        ("all-gather-start.3", "communication"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<16>(int)", "communication"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("gemm_fusion_dot_15", "gemm"),
        ("dot_general.97", "gemm"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x64", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128>(Params)", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int const*)", "kernel"),
        ("void moe::finalizeKernel<Params<cutlass::bfloat16_t, 4> >(Params)", "kernel"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_cat_10", "kernel"),
        ("loop_convert_fusion_4", "kernel"),
        ("MemcpyD2D", "copy"),
        ("copy.233", "copy"),
    ],
)  # fmt: skip
def test_kinds_of_kernels_by_their_names(name, kind):
    assert events.kind_of(name) == kind


def test_gemms_have_rates_where_their_shapes_are_known(tmp_path):
    gemm = [made.Run(0, 1, "nvjet_tst", 7, -1), made.Run(1, 1.5, "splitKreduce_kernel", 7, -1)]
    file = made.kineto(tmp_path / "a.json", [])
    content = json.loads(made.kineto(file, gemm).read_text())
    for event in content["traceEvents"]:
        event["args"]["External id"] = 5
    content["traceEvents"].append(
        {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 1, "tid": 1, "ts": 5e12,
         "dur": 9,
         "args": {"External id": 5, "Input Dims": [[1024], [8192, 4096], [4096, 1024], []],
                  "Input type": ["c10::BFloat16"] * 3 + ["Scalar"]}}
    )  # fmt: skip
    file.write_text(json.dumps(content))
    found = {k.name: k for k in mb.trace(file).kernels}
    flops = 2 * 8192 * 4096 * 1024 / 2  # each kernel has half of the operator's work
    assert found["nvjet_tst"].shape == "bf16 8192x1024x4096"
    assert found["nvjet_tst"].tflops == pytest.approx(flops / 1e-3 / 1e12)
    assert found["nvjet_tst"].share == pytest.approx(flops / 1e-3 / 1e12 / 989)
    assert found["splitKreduce_kernel"].tflops == pytest.approx(flops / 0.5e-3 / 1e12)


def test_collectives_have_the_bus_bandwidth_of_what_pytorch_notes(tmp_path):
    file = made.kineto(tmp_path / "a.json", [made.Run(0, 2, "ncclDevKernel_AllReduce", 20, -1)])
    content = json.loads(file.read_text())
    content["traceEvents"][0]["args"] |= {
        "Collective name": "allreduce", "In msg nelems": 10**6, "Out msg nelems": 10**6,
        "Group size": 4, "dtype": "BFloat16", "Process Group Ranks": "[0, 1, 2, 3]",
    }  # fmt: skip
    file.write_text(json.dumps(content))
    (kernel,) = mb.trace(file).kernels
    assert kernel.gbytes_per_s == pytest.approx(2e6 * 2 * 3 / 4 / 2e-3 / 1e9)


def ranks_with_waits(folder, skew_ms=(0, 3, -5)):
    """Three ranks, of which rank 1 comes last to the all-gather: by 2 ms, and rank 2 by 1 ms to the
    reduce-scatter. The clocks differ."""
    arrive = {0: (1, 6.5), 1: (3, 6.75), 2: (1.5, 7.5)}
    for rank, (gather, scatter) in arrive.items():
        step = [
            run._replace(start=gather) if "AllGather" in run.name
            else run._replace(start=scatter) if "ReduceScatter" in run.name
            else run
            for run in made.STEP
        ]  # fmt: skip
        skew = skew_ms[rank]
        runs = [
            r._replace(start=r.start + skew, end=r.end + skew, launched=r.launched + skew)
            for r in made.steps(4, step)
        ]
        made.kineto(folder / f"rank{rank}.json", runs, rank=rank, world=3)
    return folder


def test_ranks_that_others_wait_for(tmp_path):
    found = mb.trace(ranks_with_waits(tmp_path))
    waits = {rank.trace.rank: rank.waits for rank in found.ranks}
    ms = lambda ns: ns / made.MS / 4  # of a step
    assert found.collectives == 8
    assert {r: w.last for r, w in waits.items()} == {0: 0, 1: 4, 2: 4}
    assert {r: ms(w.waits) for r, w in waits.items()} == {0: 2 + 1, 1: 0.75, 2: 1.5}
    assert {r: ms(w.waited_for) for r, w in waits.items()} == {0: 0, 1: 3.5, 2: 1.75}
    assert sum(w.waits for w in waits.values()) == sum(w.waited_for for w in waits.values())
    notes = " ".join(found.notes)
    assert "the clock of rank 1 is 0.003 s ahead" in notes
    assert "the clock of rank 2 is 0.005 s behind" in notes


def test_causes_by_their_seconds(tmp_path):
    """What computes nothing, and the rank that others wait for; below 5 % of a step it is none."""
    assert (
        mb.trace(ranks_with_waits(tmp_path))
        .causes()[0]
        .startswith("others wait for rank 1: 0.003500 s a step, last at 4 of 8 collectives")
    )
    found = mb.trace(made.kineto(tmp_path / "one.json", made.steps(3), MARKS))
    assert found.causes() == [
        "communication is exposed for 30% of the step, 67% of it ncclDevKernel_AllGather_RING_LL",
        "copies take 5% of the step",
        "the device waits for the host to launch for 5% of the step",
    ]


def test_a_low_clock_is_a_cause(tmp_path):
    clocks = [(-5, 345), (5, 1500), (15, 1400), (25, 1480), (40, 210)]  # two outside of the steps
    found = mb.trace(made.nsight(tmp_path / "a.sqlite", made.steps(3), MARKS, clocks))
    assert found.ranks[0].clock_mhz == 1460
    low = "the clock of rank 0 is 1,460 MHz in the steps, of 1,980: power, heat or a set limit"
    assert low in found.causes()
    full = [(5, 1950)]
    found = mb.trace(made.nsight(tmp_path / "b.sqlite", made.steps(3), MARKS, full))
    assert not any("clock" in cause for cause in found.causes())


def test_drawing_of_a_measured_step(tmp_path, capsys):
    file, picture = made.kineto(tmp_path / "a.json", made.steps(3), MARKS), tmp_path / "a.svg"
    assert entry.run("trace", [str(file), "--drawing", str(picture)]) == 0
    root = ElementTree.fromstring(picture.read_text())
    texts = {"".join(x.itertext()) for x in root.iter() if x.tag.endswith("text")}
    assert texts >= {"measured, step 0 of rank 0: 10.000 ms", "compute", "communication", "copies"}
    titles = {x.text for x in root.iter() if x.tag.endswith("title")}
    assert "ncclDevKernel_AllGather_RING_LL: 5.000 ms" in titles
    assert entry.run("trace", [str(file), "--drawing", "a.txt"]) == 2


def test_collectives_in_unequal_numbers_are_not_compared(tmp_path):
    made.kineto(tmp_path / "rank0.json", made.steps(2), MARKS[:2], rank=0, world=2)
    fewer = [run for run in made.steps(2) if run.end < 18 or "nccl" not in run.name]
    made.kineto(tmp_path / "rank1.json", fewer, MARKS[:2], rank=1, world=2)
    found = mb.trace(tmp_path)
    assert found.collectives == 3
    assert "ran in unequal numbers" in " ".join(found.notes)


def test_a_trace_that_begins_inside_a_step(tmp_path):
    runs = made.steps(4)[3:-1]
    marked = mb.trace(made.kineto(tmp_path / "a.json", runs, [(1, 9.1, 19.05), (2, 19.1, 29.05)]))
    assert [a.step.seconds for a in marked.ranks[0].accounts][:1] == [0.01]
    assert "3 kernels and copies before the first marked step are left out" in " ".join(
        marked.notes
    )
    repeated = mb.trace(made.kineto(tmp_path / "b.json", runs))
    assert [a.step.seconds for a in repeated.ranks[0].accounts] == [0.01] * 3
    for a in repeated.ranks[0].accounts:
        assert sum(a.parts.values()) == made.STEP_MS * made.MS


def test_a_trace_without_steps_is_one_interval(tmp_path):
    found = mb.trace(made.kineto(tmp_path / "a.json", made.STEP))
    (a,) = found.ranks[0].accounts
    assert (a.step.number, a.step.seconds) == (-1, 0.01)
    assert "no step is marked and no sequence of kernels repeats" in found.notes[0]
    assert "no step" in str(found)


def test_a_loop_within_a_step_is_no_step(tmp_path):
    """Layers are equal, and few kernels of a step are in none."""
    layer = [made.Run(i, i + 1, f"layer_{i}", 7, 0) for i in range(5)]
    shift = lambda run, by: run._replace(start=run.start + by, end=run.end + by)
    step = [made.Run(0, 1, "embed", 7, 0)]
    step += [shift(run, 1 + 5 * i) for i in range(20) for run in layer]
    step += [made.Run(101, 103, "loss", 7, 0)]
    runs = [shift(run, 110 * i) for i in range(3) for run in step]
    file = made.kineto(tmp_path / "a.json", runs)
    assert [a.step.seconds for a in mb.trace(file).ranks[0].accounts] == [0.11, 0.11, 0.103]


def refused(path):
    with pytest.raises(UserError) as e:
        mb.trace(path)
    return str(e.value)


def test_faults_of_files(tmp_path, monkeypatch):
    good = made.kineto(tmp_path / "good.json", made.steps(2))
    bad = tmp_path / "bad.json"
    bad.write_bytes(good.read_bytes()[:-500])
    assert refused(bad) == "bad.json is truncated: copy it again, or record it again"
    packed = tmp_path / "bad.json.gz"
    packed.write_bytes(gzip.compress(good.read_bytes())[:-50])
    assert "bad.json.gz is truncated" in refused(packed)
    bad.write_text("")
    assert "bad.json has no events: it is empty" in refused(bad)
    bad.write_text('{"traceEvents": []}')
    assert "bad.json has no events: it is empty" in refused(bad)
    bad.write_text("{]")
    assert "bad.json is no JSON" in refused(bad)
    bad.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}'
    )
    assert "bad.json has no kernels of a GPU; record with" in refused(bad)
    xplane = tmp_path / "bad.xplane.pb"
    content = made.xplane(xplane, [made.steps(2)]).read_bytes()
    xplane.write_bytes(content[: len(content) // 2])
    assert "bad.xplane.pb is no XPlane, or truncated" in refused(xplane)
    xplane.write_bytes(b"")
    assert "has no work of a GPU or CPU device" in refused(xplane)
    sqlite = tmp_path / "bad.sqlite"
    sqlite.write_bytes(b"no database" * 100)
    assert "bad.sqlite is no export of nsys, or is damaged" in refused(sqlite)
    report = tmp_path / "bad.nsys-rep"
    report.write_bytes(b"")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    text = "nsys export --type sqlite --output bad.sqlite bad.nsys-rep"
    assert refused(report).endswith(f"not installed; where it is: {text}")
    assert "no such file or folder" in refused(tmp_path / "absent")
    assert "is no profile: .xplane.pb" in refused(pathlib.Path(__file__))


def test_a_folder_says_what_it_leaves_out(tmp_path):
    made.kineto(tmp_path / "a_rank0.json", made.steps(2), rank=0, world=8)
    made.kineto(tmp_path / "b.json", made.steps(2), rank=0, world=8)
    made.kineto(tmp_path / "c.json", made.steps(2), rank=1, world=4)
    made.kineto(tmp_path / "d.json", made.steps(2), rank=9, world=8)
    (tmp_path / "e.json").write_text("")
    other = [run._replace(name=f"other_{run.name}") for run in made.steps(2)]
    made.kineto(tmp_path / "f.json", other, rank=2, world=8)
    found = mb.trace(tmp_path)
    assert [rank.trace.rank for rank in found.ranks] == [0, 1, 2, 9]
    notes = "\n".join(found.notes)
    assert "b.json is left out: it is rank 0, as a_rank0.json" in notes
    assert "c.json is of a run of 4 ranks, a_rank0.json of one of 8" in notes
    assert "d.json is rank 9 of 8: there is no such rank" in notes
    assert "e.json has no events: it is empty, or no Chrome trace; left out" in notes
    assert "f.json shares 0 of 6 kernel names with a_rank0.json" in notes


def test_several_gpus_of_one_xplane_are_ranks(tmp_path):
    file = made.xplane(tmp_path / "a.xplane.pb", [made.steps(2), made.steps(2)])
    found = mb.trace(file)
    assert [rank.trace.rank for rank in found.ranks] == [0, 1]
    assert found.collectives == 4


def test_tables_are_at_most_100_columns_wide(tmp_path):
    text = str(mb.trace(ranks_with_waits(tmp_path)))
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"^communication, exposed +0\.00", text, re.MULTILINE)
    for name in ("kineto.json.gz", "plain.xplane.pb.gz"):
        assert max(map(len, str(mb.trace(H200 / name)).splitlines())) <= 100


def test_json_of_the_command(tmp_path, capsys):
    file = made.kineto(tmp_path / "a.json", made.steps(3), MARKS)
    assert entry.run("trace", ["--json", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == 0.01
    (rank,) = found["ranks"]
    assert rank["steps"][0]["communication"] == 0.003
    assert entry.run("trace", []) == 2


def test_measured_steps_of_a_gpu():
    """Three steps in CUDA graphs, whose kernels have no operation: found by their repetition, in
    agreement with the host's clock."""
    found = mb.trace(H200 / "plain.xplane.pb.gz")
    (rank,) = found.ranks
    assert (len(rank.accounts), found.gpu_type) == (3, "h200")
    measured = json.loads((H200 / "plain.json").read_text())["step_s"]
    assert found.step_s == pytest.approx(measured, rel=0.03)
    assert rank.mean_s("gemm") / found.step_s > 0.6


def test_a_profile_of_jax_on_a_cpu(tmp_path):
    @jax.jit
    def step(x):
        return jnp.sin(x @ x) + jax.lax.fori_loop(0, 3, lambda _, y: y @ y * 0.1, x)

    x = jnp.ones((256, 256)) / 256
    step(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(4):
            step(x).block_until_ready()
    found = mb.trace(tmp_path)
    (rank,) = found.ranks
    assert rank.trace.device == "cpu"
    assert len(rank.accounts) == 4
    for a in rank.accounts:
        assert sum(a.parts.values()) == a.step.end - a.step.start
        assert a.parts["kernel"] > 0
    assert not any(event.op.startswith("while") for event in rank.trace.events)
