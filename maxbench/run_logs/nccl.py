"""NCCL's log (NCCL_DEBUG=INFO): which transport it chose, and what it was asked to move.

The calls of a trace job are summed for one GPU, by collective and communicator, and set beside
what plan predicts for the step.
"""

import collections
import re
from collections.abc import Iterable, Sequence

# ncclDataType_t -> bytes per element; 10 and 11 are the two FP8 formats.
ELEMENT_BYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 1, 11: 1}
# NCCL's call -> its kind in the words of plan. Sends and receives are told apart later.
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
WHOLE = ("all-gather", "reduce-scatter", "all-to-all")  # `count` is one rank's share of these
# Every field is spelt out: of two lines that ran into each other only a whole one counts.
CALL = re.compile(
    r"\[(?P<gpu>\d{1,3})\] NCCL INFO (?P<call>\w+): opCount (?P<op>\w+) sendbuff \S+ recvbuff \S+ "
    r"(?:acc \S+ )?count (?P<count>\d{1,18}) datatype (?P<type>\d{1,2}) op \d+ root (?P<peer>\d+) "
    r"comm (?P<comm>\w+) \[nranks=(?P<ranks>\d{1,7})\]"
)
OTHERS = re.compile(r" *0*[1-9]\d*: ")  # srun --label: a line of a process other than 0
VIA = re.compile(r"NCCL INFO .* via (P2P|SHM|NET/(\w+))")
USING = re.compile(r"NCCL INFO Using network (\w+)")
MIB = 2**20


def transports(text: str) -> dict[str, int]:
    """Transports and how many channels use each: {'P2P': 24, 'NET/IB': 8}."""
    found = collections.Counter(m[1] for m in VIA.finditer(text))
    if not any(name.startswith("NET/") for name in found):
        found.update(f"NET/{m[1]}" for m in USING.finditer(text))
    return dict(found)


def uses_slow_transport(found: dict[str, int], nodes: int) -> str:
    """Why these transports will be slow, or ''.

    On several nodes, NET/Socket means TCP: 10 to 20 % of a run's speed is gone in silence.
    """
    fast = {"NET/IB", "NET/AWS", "NET/GPUDirectTCPX"} & {*found}
    if nodes > 1 and "NET/Socket" in found and not fast:
        return (
            "NCCL talks TCP between nodes (NET/Socket): no InfiniBand or RoCE was found. See "
            "NCCL_IB_HCA, NCCL_SOCKET_IFNAME, the RDMA libraries; ALLOW_TCP=true goes on"
        )
    return ""


def calls(lines: Iterable[str]) -> tuple[list[dict], int]:
    """What the first GPU of the first process in these lines asked of NCCL, and how many damaged
    lines were left out.

    Returns:
      One {kind, ranks, comm, count, bytes, share} per collective and communicator, most bytes
      first. Bytes are what the GPU hands in or gets, whichever is more, as plan counts them.
      Sends and receives with the same opCount are one permute, or, with several peers, one
      all-to-all: that is how XLA makes them.
    """
    counts, sizes = collections.Counter(), collections.Counter()  # (GPU, kind, ranks, comm)
    pairs = collections.defaultdict(collections.Counter)  # a group's sends and receives, by peer
    damaged = 0
    for line in (x for x in lines if ": opCount" in x and not OTHERS.match(x)):
        match = CALL.search(line)
        kind = match and KINDS.get(match["call"].replace("AllToAll", "AlltoAll"))
        width = match and ELEMENT_BYTES.get(int(match["type"]))
        if not (kind and width):
            damaged += 1
            continue
        gpu, ranks, comm = int(match["gpu"]), int(match["ranks"]), match["comm"]
        size = int(match["count"]) * width * (ranks if kind in WHOLE else 1)
        if kind in ("sent", "received"):
            pairs[gpu, ranks, comm, match["op"]][kind, match["peer"]] += size
        else:
            counts[gpu, kind, ranks, comm] += 1
            sizes[gpu, kind, ranks, comm] += size
    for (gpu, ranks, comm, _), group in pairs.items():
        ways = [[x for (way, _), x in group.items() if way == w] for w in ("sent", "received")]
        kind = "all-to-all" if max(map(len, ways)) > 1 else "permute"
        counts[gpu, kind, ranks, comm] += 1
        sizes[gpu, kind, ranks, comm] += max(map(sum, ways))
    first = min((gpu for gpu, *_ in counts), default=0)
    whole = sum(x for (gpu, *_), x in sizes.items() if gpu == first) or 1
    rows = [
        {"kind": kind, "ranks": ranks, "comm": comm, "count": n, "bytes": x, "share": x / whole}
        for ((gpu, kind, ranks, comm), n), x in zip(counts.items(), sizes.values(), strict=True)
        if gpu == first
    ]
    return sorted(rows, key=lambda r: -r["bytes"]), damaged


def compare_with_plan(rows: Sequence[dict], planned: Sequence[dict], steps: int) -> list[dict]:
    """Counts and bytes of one step, traced and planned, by kind and number of members.

    Args:
      rows: of calls(), over `steps` steps.
      planned: `communication` of plan.figures(), of one step.
    """
    # XLA permutes on the communicator of all GPUs, whichever axis it moves along.
    key = lambda kind, members: (kind, 0 if kind == "permute" else members)
    empty = {"axes": [], "traced": 0.0, "traced_bytes": 0.0, "planned": 0, "planned_bytes": 0}
    found: dict[tuple, dict] = collections.defaultdict(lambda: empty | {"axes": []})
    for r in rows:
        one = found[key(r["kind"], r["ranks"])]
        one["traced"] += r["count"] / steps
        one["traced_bytes"] += r["bytes"] / steps
    for x in planned:
        one = found[key(x["kind"], x["members"])]
        one["axes"].append(x["axes"])
        one["planned"] += x["count"]
        one["planned_bytes"] += x["bytes"]
    made = [{"kind": kind, "members": members, **one} for (kind, members), one in found.items()]
    return sorted(made, key=lambda r: -max(r["traced_bytes"], r["planned_bytes"]))


def by_communicator(rows: Sequence[dict], steps: int) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of calls(), per step."""
    heads = ["collective", "GPUs", "communicator", "calls", "MiB", "share"]
    return heads, [
        [r["kind"], str(r["ranks"]), r["comm"], f"{r['count'] / steps:,.1f}",
         f"{r['bytes'] / steps / MIB:,.2f}", f"{r['share']:.1%}"]
        for r in rows
    ]  # fmt: skip


def beside_plan(found: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of against()."""
    heads = ["collective", "GPUs", "over", "calls", "planned calls", "MiB", "planned MiB"]
    heads.append("traced/planned")
    cells = []
    for r in found:
        traced, planned = r["traced_bytes"], r["planned_bytes"]
        share = f"{traced / planned:.1%}" if planned else "-"
        cells.append(
            [r["kind"], str(r["members"] or "all"), ", ".join(r["axes"]) or "not in the plan",
             f"{r['traced']:,.1f}", f"{r['planned']:,}", f"{traced / MIB:,.2f}",
             f"{planned / MIB:,.2f}", share if r["traced"] else "not traced"]
        )  # fmt: skip
    return heads, cells
