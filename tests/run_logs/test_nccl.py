"""NCCL's log: transports, and the calls of a trace, in total and compared with a plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbench.run_logs import nccl


def call(name: str, count: int, kind: int, comm: str = "0x5", op: str = "1f", gpu: int = 0,
         ranks: int = 8, peer: int = 0) -> str:  # fmt: skip
    """A line as NCCL 2.2x logs a call; `op`, its opCount, is hexadecimal."""
    return (
        f"n1:91:207 [{gpu}] NCCL INFO {name}: opCount {op} sendbuff 0x7f4a recvbuff (nil) count "
        f"{count} datatype {kind} op 0 root {peer} comm {comm} [nranks={ranks}] stream 0x55e0\n"
    )


TRACE = "0: ".join(
    [
        "n1:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n",
        call("AllGather", 1024, 9),
        call("AllReduce", 256, 7),
        call("AllReduce", 256, 7, op="20"),
    ]
)


def test_calls_are_summed_by_collective_and_communicator():
    (first, second), damaged = nccl.calls(TRACE.splitlines())
    assert first == {
        "kind": "all-gather", "ranks": 8, "comm": "0x5", "count": 1, "bytes": 1024 * 2 * 8,
        "share": 8 / 9,
    }  # fmt: skip
    assert (second["kind"], second["count"], second["bytes"]) == ("all-reduce", 2, 2048)
    assert damaged == 0
    assert nccl.transports(TRACE) == {"P2P": 1}


def test_bytes_of_each_collective_and_type():
    """Bytes as plan counts them: the larger of one GPU's input and output."""
    lines = [
        call("ReduceScatter", 100, 7, comm="0x6"),  # fp32
        call("AllGather", 100, 10),  # fp8
        call("AllToAll", 100, 9, comm="0x7", ranks=4),
        "[2026-01-01 00:00:00] " + call("Broadcast", 100, 1, comm="0x8"),
    ]
    rows, _ = nccl.calls(lines)
    assert {(r["kind"], r["bytes"]) for r in rows} == {
        ("reduce-scatter", 3200), ("all-gather", 800), ("all-to-all", 800), ("broadcast", 100),
    }  # fmt: skip
    old = call("AllGather", 100, 9).replace("count", "acc (nil) count")  # as RCCL logs it
    assert nccl.calls([old])[0][0]["bytes"] == 1600


def test_sends_and_receives_of_a_group_are_one_permute_or_all_to_all():
    both = lambda op, *peers: [
        call(name, 50, 9, op=op, peer=p) for p in peers for name in ("Send", "Recv")
    ]
    rows, _ = nccl.calls([*both("a1", 3), *both("a2", 3), *both("a3", 0, 1, 2, 3)])
    assert {(r["kind"], r["count"], r["bytes"]) for r in rows} == {
        ("permute", 2, 200), ("all-to-all", 1, 400)
    }  # fmt: skip
    ring = [call("Send", 50, 9, op="b", peer=1), call("Recv", 50, 9, op="b", peer=7)]
    last = [call("Recv", 50, 9, op="c", peer=6)]  # the last stage of a pipeline sends nothing
    rows, _ = nccl.calls(ring + last)
    assert [(r["kind"], r["count"], r["bytes"]) for r in rows] == [("permute", 2, 200)]


def test_damaged_lines_are_counted_and_left_out():
    whole = call("AllGather", 1024, 9)
    other = call("AllReduce", 256, 7)
    unknown = call("AllReduce", 256, 77)
    log = (
        b"0: " + whole.encode() + b"0: " + whole[:70].encode() + b"0: " + other.encode()
        + b" 0: " + unknown.encode() + b"\xff\x00 NCCL INFO AllReduce: opCount\n"
        + b" 1: " + other.encode() + b"10: " + other.encode() + b"0: " + whole[:-40].encode()
    )  # fmt: skip
    rows, damaged = nccl.calls(log.decode(errors="replace").splitlines())
    assert [(r["kind"], r["count"]) for r in rows] == [("all-gather", 1), ("all-reduce", 1)]
    assert damaged == 3
    # One process with all GPUs of its node: the first of them is counted.
    rows, _ = nccl.calls([call("AllReduce", 256, 7, gpu=g) for g in (3, 1, 2, 1)])
    assert [(r["count"], r["bytes"]) for r in rows] == [(2, 2048)]


@given(st.lists(st.text() | st.sampled_from(TRACE.splitlines()).map(lambda x: x[:-9]), max_size=6))
def test_any_log_is_read(lines):
    rows, _ = nccl.calls(lines)
    assert sum(r["share"] for r in rows) == pytest.approx(1 if rows else 0)


def test_trace_is_compared_with_the_plan():
    """By collective and group size; XLA permutes over all GPUs, whatever the axis."""
    rows, _ = nccl.calls(
        [call("AllGather", 1024, 9), call("AllGather", 1024, 9), call("Send", 50, 9, op="a")]
    )
    plan = lambda kind, axes, members, count, size: {
        "kind": kind, "axes": axes, "members": members, "count": count, "bytes": size
    }  # fmt: skip
    planned = [
        plan("all-gather", "dp", 8, 1, 16384), plan("permute", "pp", 2, 1, 80),
        plan("permute", "cp", 2, 1, 20), plan("all-reduce", "tp", 4, 3, 5),
    ]  # fmt: skip
    gather, permute, reduce = nccl.compare_with_plan(rows, planned, steps=2)
    assert (gather["axes"], gather["traced"], gather["traced_bytes"]) == (["dp"], 1, 16384)
    assert gather["planned_bytes"] == gather["traced_bytes"]
    assert (permute["axes"], permute["planned"], permute["planned_bytes"]) == (["pp", "cp"], 2, 100)
    assert (permute["traced"], permute["traced_bytes"]) == (0.5, 50)
    assert (reduce["traced"], reduce["planned"]) == (0, 3)
    _, cells = nccl.plan_table([gather, permute, reduce])
    assert [c[-1] for c in cells] == ["100.0%", "50.0%", "not traced"]
    _, (alone,) = nccl.plan_table(nccl.compare_with_plan(rows[:1], [], steps=2))
    assert (alone[2], alone[-1]) == ("not in the plan", "-")


def test_tcp_between_nodes_is_slow():
    transports = nccl.transports(
        "n1:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0"
    )
    assert "NCCL uses TCP" in nccl.uses_slow_transport(transports, nodes=2)
    assert not nccl.uses_slow_transport(transports, nodes=1)
    transports = nccl.transports(
        "x NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA"
    )
    assert transports == {"NET/IB": 1}
    assert not nccl.uses_slow_transport(transports, nodes=2)
