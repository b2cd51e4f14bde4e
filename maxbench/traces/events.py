"""The form in which every profile is read. Times are integers in nanoseconds, so that sums are
exact."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from maxbench.config.errors import escape_control

# Kinds of work on a device. Where several run at once, an instant counts for the first of these.
GEMM, ATTENTION, KERNEL, COPY, COMMUNICATION = (
    "gemm",
    "attention",
    "kernel",
    "copy",
    "communication",
)
KINDS = (GEMM, ATTENTION, KERNEL, COPY, COMMUNICATION)
# Patterns of the names of kernels and of HLO operations, in small letters. The first that matches
# gives the kind; KERNEL if none does. Convolutions count as GEMMs.
NAMES = (
    # Fusions of PyTorch, which are named after all that they fuse; writes to caches of keys.
    (KERNEL, r"^triton_(poi|per|red)_|reshape_and_cache|_kv_indices"),
    (COMMUNICATION, r"nccl|nvshmem|all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]?scatter"),
    (COMMUNICATION, r"collective[-_]?(permute|broadcast)|cross_device_reduce"),
    (COPY, r"^mem(cpy|set)|^copy(device|host)|^copy[.\d]*$"),
    (ATTENTION, r"sdpa|fmha|flash|attention|attn|sage_fwd"),
    (GEMM, r"gemm|gemv|nvjet|cutlass|xmma|cijk_|splitk|matmul|\bbmm_|(^|_)dot($|[._\d])|^dot_gen"),
    (GEMM, r"conv(?!ert)|winograd|scudnn|fprop|dgrad|wgrad"),
)
# Parts of names that say nothing of the kind: arguments, FBGEMM's name, CUTLASS's number types.
BESIDE = re.compile(r"\(anonymous namespace\)::|(?<=\w)\(.*|fbgemm|cutlass::\w+_t\b")
# Calls in which the host waits for a device or for another thread.
WAITS = re.compile(r"(?i)synchroni[sz]e|block_until_ready|\bwait|await|acquire|time\.sleep")
# Names that programs give to steps: PyTorch's profiler, and NVTX ranges.
MARK = re.compile(
    r"(?i)^(?:ProfilerStep#|(?:train(?:ing)?[ _]?)?(?:step|iter(?:ation)?)[ _#:=]*)(\d{1,9})$"
)
SHORT = 10_000  # ns: host calls below explain no gap and are not kept


class Work(NamedTuple):
    """What an event computes or moves.

    Attributes:
      shape: for people: 'bf16 4096x1024x8192' (m x n x k) of a GEMM.
      peak: key of Gpu.peak_tflops(), or ''.
      bytes: moved; of a collective those that its slowest link carries (bus bandwidth).
      group: ranks of a collective as text, or ''.
    """

    shape: str = ""
    peak: str = ""
    flops: float = 0
    bytes: float = 0
    group: str = ""


NOTHING = Work()


class Event(NamedTuple):
    """A kernel, copy or collective on a device, or a call on the host.

    Attributes:
      kind: of KINDS; 'host' on the host.
      stream: of the device, or thread of the host.
      op, run: HLO operation, and number of the execution of its program, where they are known.
      launched: start of the host's call that launched it; 0 where it is not known.
    """

    start: int
    end: int
    kind: str
    name: str
    stream: str
    op: str = ""
    run: str = ""
    launched: int = 0
    work: Work = NOTHING


class Mark(NamedTuple):
    """A step that the program marks, on the host."""

    number: int
    start: int
    end: int


@dataclasses.dataclass
class RankTrace:
    """What one rank recorded.

    Attributes:
      rank: of the process, or of the device where a file has several.
      source: name of the file.
      device: name of the GPU as its driver reports it, 'cpu', or ''.
      events: of the device, by start.
      host: calls of the threads that launch, by thread and start.
      marks: by start.
      world: ranks of the run; 0 where it is not known.
      clocks: (time, MHz) of the GPU's cores, by time; empty where they were not sampled.
    """

    rank: int
    source: str
    device: str
    events: list[Event]
    host: list[Event] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)
    world: int = 0
    clocks: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.events.sort()
        self.host.sort(key=lambda e: (e.stream, e.start, -e.end))
        self.marks.sort(key=lambda mark: mark.start)


@functools.cache
def kind_of(name: str) -> str:
    """The kind of a kernel or HLO operation, by its name."""
    small = BESIDE.sub("", name.lower())
    return next((kind for kind, pattern in NAMES if re.search(pattern, small)), KERNEL)


def short(name: str, width: int) -> str:
    """A name of a kernel or call in few columns: without namespaces and arguments of C++."""
    text = escape_control(name)
    text = re.sub(
        r"^void |\(anonymous namespace\)::|\b(?:at|native|cuda|cutlass|std|c10)::", "", text
    )
    text = re.sub(r"\((?:[^()]|\([^()]*\))*\)( const)?$", "", text) or text
    return text if len(text) <= width else f"{text[: width - 1]}…"


class Innermost(NamedTuple):
    """A part of a thread's time in which no call starts or ends.

    Attributes:
      name: of the innermost call, or of the outermost that waits.
      waits: whether one waits.
    """

    start: int
    end: int
    name: str
    waits: bool


def innermost(calls: Iterable[Event]) -> Iterator[Innermost]:
    """The innermost call at each time of a thread, of calls by start; outer ones first."""
    stack: list[tuple[Event, str]] = []  # and the name of the outermost call that waits
    now = 0

    def until(time: int) -> Iterator[Innermost]:
        nonlocal now
        while stack and now < time:
            call, waiting = stack[-1]
            end = min(call.end, time)
            if end > now:
                yield Innermost(now, end, waiting or call.name, bool(waiting))
            now = max(now, end)
            if call.end <= time:
                stack.pop()

    for call in calls:
        yield from until(call.start)
        now = max(now, call.start)
        around = stack[-1][1] if stack else ""
        stack.append((call, around or (call.name if WAITS.search(call.name) else "")))
    yield from until(max((call.end for call, _ in stack), default=0))
