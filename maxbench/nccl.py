"""NCCL's log (NCCL_DEBUG=INFO): which transport it chose, and what it was asked to move.

  maxbench nccl experiments/NAME_nccltrace/NAME_nccltrace_TIME

sums up the trace of one process: calls, bytes and share, by collective and communicator.
"""

import collections
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence

from maxbench import cli

# ncclDataType_t -> bytes per element.
ELEMENT_BYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 1, 11: 1}
CALL = re.compile(
    r"NCCL INFO (?P<call>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|Send|Recv|AllToAll)"
    r": opCount \w+ .*?count (?P<count>\d{1,18}) datatype (?P<type>\d{1,2}) .*?"
    r"comm (?P<comm>\w+) \[nranks=(?P<ranks>\d{1,7})\]"
)
VIA = re.compile(r"NCCL INFO .* via (P2P|SHM|NET/(\w+))")
USING = re.compile(r"NCCL INFO Using network (\w+)")


def transports(text: str) -> dict[str, int]:
    """Transports and how many channels use each: {'P2P': 24, 'NET/IB': 8}."""
    found = collections.Counter(m[1] for m in VIA.finditer(text))
    if not any(name.startswith("NET/") for name in found):
        found.update(f"NET/{m[1]}" for m in USING.finditer(text))
    return dict(found)


def falls_back(found: dict[str, int], nodes: int) -> str:
    """Why these transports will be slow, or ''.

    On several nodes, NET/Socket means TCP: 10 to 20 % of a run's speed is gone in silence.
    """
    if (
        nodes > 1
        and "NET/Socket" in found
        and not {"NET/IB", "NET/AWS", "NET/GPUDirectTCPX"} & {*found}
    ):
        return (
            "NCCL talks TCP between nodes (NET/Socket): no InfiniBand or RoCE was found. See "
            "NCCL_IB_HCA, NCCL_SOCKET_IFNAME, the RDMA libraries; ALLOW_TCP=true goes on"
        )
    return ""


def calls(lines: Iterable[str]) -> list[dict]:
    """Count and bytes of each collective and communicator size, most bytes first.

    Bytes are what one process hands in or gets, whichever is more, summed over its calls: count x
    element size, times the number of ranks for all-gather and reduce-scatter.
    """
    total: dict[tuple[str, int], list[int]] = {}
    for line in lines:
        match = CALL.search(line)
        if not match:
            continue
        call, ranks = match["call"], int(match["ranks"])
        size = int(match["count"]) * ELEMENT_BYTES.get(int(match["type"]), 0)
        size *= ranks if call in ("AllGather", "ReduceScatter") else 1
        kept = total.setdefault((call, ranks), [0, 0])
        kept[0] += 1
        kept[1] += size
    everything = sum(size for _, size in total.values()) or 1
    rows = [
        {"call": call, "ranks": ranks, "count": n, "bytes": size, "share": size / everything}
        for (call, ranks), (n, size) in total.items()
    ]
    return sorted(rows, key=lambda r: -r["bytes"])


def summary(paths: Iterable[pathlib.Path], steps: int = 1) -> str:
    """A table of calls() over files; `steps` divides counts and bytes."""
    rows = calls(_lines(paths))
    if not rows:
        return "no NCCL call in the log (NCCL_DEBUG_SUBSYS needs COLL)"
    out = [f"{'call':<14} {'ranks':>6} {'count/step':>11} {'MiB/step':>12} {'share':>7}"]
    for r in rows:
        each = r["bytes"] / steps / 2**20
        out.append(
            f"{r['call']:<14} {r['ranks']:>6} {r['count'] / steps:>11.1f} {each:>12.2f} "
            f"{r['share']:>7.1%}"
        )
    return "\n".join(out)


def _lines(paths: Iterable[pathlib.Path]) -> Iterable[str]:
    """Lines of the first process: srun puts '0: ' before them."""
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as f:
            for line in f:
                if not re.match(r" *[1-9]\d*: ", line):
                    yield line


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 bad input."""
    with cli.clear_errors("nccl"):
        if len(argv) != 2 or argv[1] in ("-h", "--help"):
            raise ValueError("give the folder of a trace run, or one log: maxbench nccl PATH")
        path = pathlib.Path(argv[1])
        logs = [path] if path.is_file() else sorted(path.glob("srun-train-*.log"))
        if not logs:
            raise ValueError(f"no srun-train-*.log in {path}; ENABLE_NCCL_TRACE=true makes one")
        try:
            done = int(json.loads((path / "result.json").read_text())["steps_done"])
        except (OSError, ValueError, KeyError, TypeError):
            done = 1
        print(f"process 0, per step of {done}; bytes are one process's")
        print(summary(logs, max(1, done)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
