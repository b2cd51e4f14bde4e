"""Traces of each form whose truth is known: files that hold the same events."""

import gzip
import json
import pathlib
import sqlite3
from typing import NamedTuple

from jax.profiler import ProfileData

MS = 1_000_000  # ns
DEVICE = "NVIDIA H100 80GB HBM3"


class Run(NamedTuple):
    """Work of a device, times in ms."""

    start: float
    end: float
    name: str
    stream: int
    launched: float
    bytes: int = 0


# One step of 10 ms. Exposed communication: 4 to 6 and 7 to 8.
STEP = (
    Run(0, 4, "nvjet_tst_128x256_TNT", 7, -0.5),
    Run(1, 6, "ncclDevKernel_AllGather_RING_LL", 20, -0.4),
    Run(6, 7, "cudnn_sdpa_flash_fprop", 7, 0.1),
    Run(6.5, 8, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 20, 0.2),
    Run(8, 8.5, "Memcpy DtoD", 7, 0.3, 4096),
    Run(9.25, 10, "loop_add_fusion_3", 7, 9),  # the host launches it late: 8.5 to 9
)
PARTS = {
    "gemm": 4, "attention": 1, "kernel": 0.75, "copy": 0.5, "communication": 3, "late": 0.5,
    "idle": 0.25,
}  # fmt: skip
HIDDEN = 3.5
STEP_MS = 10


def steps(count: int, step=STEP) -> list[Run]:
    return [
        run._replace(start=run.start + at, end=run.end + at, launched=run.launched + at)
        for at in range(0, count * STEP_MS, STEP_MS)
        for run in step
    ]


def kineto(
    path: pathlib.Path, runs, marks=(), rank=0, world=1, late_info=False, listed=False, more=()
) -> pathlib.Path:
    """A profile of PyTorch; `marks` are (number, start, end) on the host."""
    us = lambda ms: 5e12 + ms * 1000
    events = list(more)
    add = lambda name, start, ms, **fields: events.append(
        {"ph": "X", "name": name, "ts": us(start), "dur": ms * 1000, "pid": 1, "tid": 1, **fields}
    )
    for i, run in enumerate(runs, 1):
        kind = "gpu_memcpy" if run.name.startswith("Memcpy") else "kernel"
        args = {"device": 0, "stream": run.stream, "correlation": i, "bytes": run.bytes}
        add(run.name, run.start, run.end - run.start, cat=kind, args=args)
        call = {"cat": "cuda_runtime", "args": {"correlation": i}}
        add("cudaLaunchKernel", run.launched, 0.005, **call)
    for number, start, end in marks:
        add(f"ProfilerStep#{number}", start, end - start, cat="user_annotation")
    info = {
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": world,
            "pg_config": [{}],
        },
        "deviceProperties": [{"id": 0, "name": DEVICE, "totalGlobalMem": 1}],
    }
    parts = {"traceEvents": events} | info if late_info else info | {"traceEvents": events}
    text = json.dumps(events if listed else parts).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def nsight(path: pathlib.Path, runs, marks=(), mhz=()) -> pathlib.Path:
    """An SQLite export of Nsight Systems, with the tables and columns that are read; with clocks
    (ms, MHz), also those of its GPU metrics."""
    ns = lambda ms: round((ms + 100) * MS)
    process, thread = 7 << 24, (7 << 24) + 9
    names = sorted({run.name for run in runs} | {"cudaLaunchKernel_v7000"})
    ids = {name: i for i, name in enumerate(names)}
    with sqlite3.connect(path) as db:
        db.executescript("""
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
              streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER,
              streamId INTEGER, correlationId INTEGER, globalPid INTEGER, copyKind INTEGER,
              bytes INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
              correlationId INTEGER, nameId INTEGER);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, globalTid INTEGER, text TEXT,
              textId INTEGER);
        """)
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, n) for n, i in ids.items()])
        db.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?)", (DEVICE,))
        for i, run in enumerate(runs, 1):
            row = (ns(run.start), ns(run.end), 0, run.stream, i, process)
            if run.name.startswith("Memcpy"):
                db.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,8,?)",
                    (*row, run.bytes),
                )
            else:
                db.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?)",
                    (*row, ids[run.name]),
                )
            call = (
                ns(run.launched),
                ns(run.launched) + 5000,
                thread,
                i,
                ids["cudaLaunchKernel_v7000"],
            )
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", call)
        for number, start, end in marks:
            row = (ns(start), ns(end), thread, f"iteration {number}")
            db.execute("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,NULL)", row)
        if mhz:
            db.executescript("""
                CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER, metricId INTEGER,
                  metricName TEXT);
                CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER, metricId INTEGER,
                  value INTEGER);
                INSERT INTO TARGET_INFO_GPU_METRICS VALUES (1280, 1, 'GPC Clock Frequency [MHz]'),
                  (1280, 2, 'SYS Clock Frequency [MHz]');
            """)
            rows = [(ns(at), 1280, metric, value) for at, value in mhz for metric in (1, 2)]
            db.executemany("INSERT INTO GPU_METRICS VALUES (?, ?, ?, ?)", rows)
    db.close()
    return path


def xplane(path: pathlib.Path, devices, op=lambda run: "") -> pathlib.Path:
    """An XPlane of GPUs: the runs of each device."""
    planes = []
    host = []
    correlation = 0
    for device, runs in enumerate(devices):
        names = {name: i for i, name in enumerate(dict.fromkeys(run.name for run in runs), 1)}
        lines = []
        for stream in sorted({run.stream for run in runs}):
            events = []
            for run in (x for x in runs if x.stream == stream):
                correlation += 1
                stats = f"stats {{ metadata_id: 1 int64_value: {correlation} }}"
                if run.bytes:
                    details = f"kind_src:device size:{run.bytes} async:1"
                    stats += f' stats {{ metadata_id: 2 str_value: "{details}" }}'
                if op(run):
                    stats += f' stats {{ metadata_id: 3 str_value: "{op(run)}" }}'
                events.append(_event(names[run.name], run.start, run.end, stats))
                launch = f"stats {{ metadata_id: 1 int64_value: {correlation} }}"
                host.append(_event(1, run.launched, run.launched + 0.005, launch))
            lines.append(f'lines {{ id: {stream} name: "Stream #{stream}(Compute)" '
                         f'timestamp_ns: {100 * MS} {" ".join(events)} }}')  # fmt: skip
        meta = " ".join(
            f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
            for name, i in names.items()
        )
        stats = "correlation_id", "memcpy_details", "hlo_op", "gpu_device_name"
        stat_meta = " ".join(
            f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
            for i, name in enumerate(stats, 1)
        )
        own = f'stats {{ metadata_id: 4 str_value: "{DEVICE}" }}'
        planes.append(
            f'planes {{ name: "/device:GPU:{device}" {" ".join(lines)} {meta} {stat_meta} {own} }}'
        )
    planes.append(
        f'planes {{ name: "/host:CPU" lines {{ id: 1 name: "python" timestamp_ns: {100 * MS} '
        f"{' '.join(host)} }} "
        'event_metadata { key: 1 value { id: 1 name: "PjitFunction(step)" } } '
        'stat_metadata { key: 1 value { id: 1 name: "correlation_id" } } }'
    )
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))
    return path


def _event(name: int, start: float, end: float, stats: str) -> str:
    offset, duration = round(start * 1e9), round((end - start) * 1e9)  # ps
    return f"events {{ metadata_id: {name} offset_ps: {offset} duration_ps: {duration} {stats} }}"
