"""NCCL's log (NCCL_DEBUG=INFO): the transports that NCCL chose, and its calls.

The calls of a trace job are summed for one GPU, by collective and communicator, and compared with
the collectives that plan predicts for a step.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

# ncclDataType_t -> bytes per element; 10 and 11 are the two FP8 formats.
ELEMENT_BYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 1, 11: 1}
# NCCL's call -> the name of the collective in a plan. calls() combines sends and receives.
KINDS = {
    "AllGather": "all-gather",
    "AllReduce": "all-reduce",
    "ReduceScatter": "reduce-scatter",
    "AlltoAll": "all-to-all",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "Send": "sent",
    "Recv": "received",
}
PER_RANK = ("all-gather", "reduce-scatter", "all-to-all")  # `count` is one rank's share
# Each field is matched, so that of two interleaved lines only a complete one counts.
CALL = re.compile(
    r"\[(?P<gpu>\d{1,3})\] NCCL INFO (?P<call>\w+): opCount (?P<op>\w+) sendbuff \S+ recvbuff \S+ "
    r"(?:acc \S+ )?count (?P<count>\d{1,18}) datatype (?P<type>\d{1,2}) op \d+ root (?P<peer>\d+) "
    r"comm (?P<comm>\w+) \[nranks=(?P<ranks>\d{1,7})\]"
)
OTHER_PROCESS = re.compile(r" *0*[1-9]\d*: ")  # of srun --label: not process 0
VIA = re.compile(r"NCCL INFO .* via (P2P|SHM|NET/(\w+))")
USING = re.compile(r"NCCL INFO Using network (\w+)")
MIB = 2**20


def transports(text: str) -> dict[str, int]:
    """Channels of each transport: {'P2P': 24, 'NET/IB': 8}."""
    channels = collections.Counter(m[1] for m in VIA.finditer(text))
    if not any(name.startswith("NET/") for name in channels):
        channels.update(f"NET/{m[1]}" for m in USING.finditer(text))
    return dict(channels)


def uses_slow_transport(channels: dict[str, int], nodes: int) -> str:
    """Why the transports between several nodes are slow, or ''.

    NET/Socket is TCP, which costs 10 to 20 % of a run's speed without any warning.

    Args:
      channels: of transports().
    """
    fast = {"NET/IB", "NET/AWS", "NET/GPUDirectTCPX"} & {*channels}
    if nodes > 1 and "NET/Socket" in channels and not fast:
        return (
            "NCCL uses TCP between nodes (NET/Socket): it found no InfiniBand or RoCE. Check "
            "NCCL_IB_HCA, NCCL_SOCKET_IFNAME and the RDMA libraries, or set ALLOW_TCP=true"
        )
    return ""


def calls(lines: Iterable[str]) -> tuple[list[dict], int]:
    """NCCL calls of the first GPU of process 0, and the number of damaged lines.

    Returns:
      One {kind, ranks, comm, count, bytes, share} per collective and communicator, in descending
      order of bytes. Bytes are those of the GPU's input or output, whichever is larger, as in a
      plan. XLA issues a permute as a group of sends and receives with one opCount, and an
      all-to-all as such a group with several peers.
    """
    # Keys are (GPU, kind, ranks, comm).
    counts: collections.Counter[tuple] = collections.Counter()
    sizes: collections.Counter[tuple] = collections.Counter()
    # Sends and receives of a group, by peer.
    groups: dict[tuple, collections.Counter] = collections.defaultdict(collections.Counter)
    damaged = 0
    for line in (x for x in lines if ": opCount" in x and not OTHER_PROCESS.match(x)):
        match = CALL.search(line)
        kind = match and KINDS.get(match["call"].replace("AllToAll", "AlltoAll"))
        width = match and ELEMENT_BYTES.get(int(match["type"]))
        if not (match and kind and width):
            damaged += 1
            continue
        gpu, ranks, comm = int(match["gpu"]), int(match["ranks"]), match["comm"]
        size = int(match["count"]) * width * (ranks if kind in PER_RANK else 1)
        if kind in ("sent", "received"):
            groups[gpu, ranks, comm, match["op"]][kind, match["peer"]] += size
        else:
            counts[gpu, kind, ranks, comm] += 1
            sizes[gpu, kind, ranks, comm] += size
    for (gpu, ranks, comm, _), group in groups.items():
        sent = [x for (direction, _), x in group.items() if direction == "sent"]
        received = [x for (direction, _), x in group.items() if direction == "received"]
        kind = "all-to-all" if max(len(sent), len(received)) > 1 else "permute"
        counts[gpu, kind, ranks, comm] += 1
        sizes[gpu, kind, ranks, comm] += max(sum(sent), sum(received))
    first = min((gpu for gpu, *_ in counts), default=0)
    total = sum(x for (gpu, *_), x in sizes.items() if gpu == first) or 1
    rows = [
        {"kind": kind, "ranks": ranks, "comm": comm, "count": n, "bytes": x, "share": x / total}
        for ((gpu, kind, ranks, comm), n), x in zip(counts.items(), sizes.values(), strict=True)
        if gpu == first
    ]
    return sorted(rows, key=lambda r: -r["bytes"]), damaged


@dataclasses.dataclass
class Comparison:
    """Traced and planned calls of one collective and group size, per step."""

    axes: list[str] = dataclasses.field(default_factory=list)  # mesh axes in the plan
    traced: float = 0.0
    traced_bytes: float = 0.0
    planned: int = 0
    planned_bytes: int = 0


def compare_with_plan(rows: Sequence[dict], planned: Sequence[dict], steps: int) -> list[dict]:
    """Counts and bytes per step, traced and planned, by collective and group size.

    Args:
      rows: of calls(), over `steps` steps.
      planned: `communication` of a plan's figures, for one step.

    Returns:
      One {kind, members, axes, traced, traced_bytes, planned, planned_bytes} per collective and
      group size, in descending order of bytes.
    """
    # XLA permutes on the communicator of all GPUs, whatever the axis.
    key = lambda kind, members: (kind, 0 if kind == "permute" else members)
    totals: dict[tuple, Comparison] = collections.defaultdict(Comparison)
    for r in rows:
        total = totals[key(r["kind"], r["ranks"])]
        total.traced += r["count"] / steps
        total.traced_bytes += r["bytes"] / steps
    for x in planned:
        total = totals[key(x["kind"], x["members"])]
        total.axes.append(x["axes"])
        total.planned += x["count"]
        total.planned_bytes += x["bytes"]
    compared = [
        {"kind": kind, "members": members, **dataclasses.asdict(total)}
        for (kind, members), total in totals.items()
    ]
    return sorted(compared, key=lambda r: -max(r["traced_bytes"], r["planned_bytes"]))


def calls_table(rows: Sequence[dict], steps: int) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table of calls(), per step."""
    header = ["collective", "GPUs", "communicator", "calls", "MiB", "share"]
    return header, [
        [r["kind"], str(r["ranks"]), r["comm"], f"{r['count'] / steps:,.1f}",
         f"{r['bytes'] / steps / MIB:,.2f}", f"{r['share']:.1%}"]
        for r in rows
    ]  # fmt: skip


def plan_table(compared: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table of compare_with_plan()."""
    header = ["collective", "GPUs", "over", "calls", "planned calls", "MiB", "planned MiB"]
    header.append("traced/planned")
    cells = []
    for r in compared:
        traced, planned = r["traced_bytes"], r["planned_bytes"]
        share = f"{traced / planned:.1%}" if planned else "-"
        cells.append(
            [r["kind"], str(r["members"] or "all"), ", ".join(r["axes"]) or "not in the plan",
             f"{r['traced']:,.1f}", f"{r['planned']:,}", f"{traced / MIB:,.2f}",
             f"{planned / MIB:,.2f}", share if r["traced"] else "not traced"]
        )  # fmt: skip
    return header, cells
