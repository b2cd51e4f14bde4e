"""Parser of scheduled HLO text, a compiled program as XLA prints it.

    Program -> computations -> ops in execution order

It reads what a simulation needs: shapes and bytes, trip counts of loops, conditionals, start/done
pairs of asynchronous ops, replica groups, GEMMs, attention and fusions. All sizes are of one GPU:
the text is the program that each of them runs.
"""

import dataclasses
import functools
import itertools
import math
import operator
import re
from typing import Any, NamedTuple

import numpy as np

BITS = {"pred": 8, "token": 0, "opaque": 0}  # of dtypes without a number in their name
# Opcode without -start -> kind of collective in the rest of the package.
COLLECTIVES = {
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
HOST = "S(5)"  # memory space of host memory, in a layout
# Ops without a kernel: they name memory, or run on the host.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency", "domain", "async-update",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: dtype as in HLO ('bf16'), dims, and whether it is in host memory."""

    dtype: str
    dims: tuple[int, ...]
    host: bool = False

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(self.dims)

    @functools.cached_property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # 'bf16', 'f8e4m3fn'
        return self.elements * (int(bits[0]) if bits else BITS[self.dtype]) // 8


def leaves(shape: "Shape | tuple") -> list[Shape]:
    """All arrays of a shape, which may be a tuple of tuples."""
    return [shape] if isinstance(shape, Shape) else [x for part in shape for x in leaves(part)]


def size(shape: "Shape | tuple") -> int:
    """Bytes of all arrays of a shape."""
    return sum(s.bytes for s in leaves(shape))


@dataclasses.dataclass(eq=False)
class Op:
    """One instruction. `attrs` is the text after its operands, parsed on demand."""

    name: str
    opcode: str
    shape: Any  # Shape, or a tuple of such
    operands: tuple[str, ...]
    attrs: str
    root: bool
    literal: str = ""  # text in the parentheses of a parameter or constant

    def attr(self, key: str) -> str:
        """Value of an attribute, a name, number or quoted text: 'body=%b' -> 'b'; '' if absent."""
        name, at = f"{key}=", -1
        while (at := self.attrs.find(name, at + 1)) >= 0:  # faster than a search for a pattern
            starts = at == 0 or self.attrs[at - 1] in " \t\n,{"
            if starts and (found := VALUE.match(self.attrs, at + len(name))):
                return found[1] or found[2] or ""
        return ""

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name stack of the op: transforms, scopes and primitive."""
        return self.attr("op_name")

    @property
    def scope(self) -> str:
        """Scope directly around a conditional, loop or kernel: 'loss' of '.../loss/cond'."""
        return re.sub("/(cond|while|pallas_call)$", "", self.op_name).rpartition("/")[2]

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which a caller may mean the op: the scope around it, a custom call's target, and
        its own name in the program. Of custom calls, only those of Pallas are named by a scope."""
        named = self.opcode != "custom-call" or self.op_name.endswith("/pallas_call")
        return self.scope if named else "", self.target, self.name

    @functools.cached_property
    def target(self) -> str:
        """Library routine of a custom call, '__cublas$lt$matmul'."""
        return self.attr("custom_call_target")

    @functools.cached_property
    def branches(self) -> list[str]:
        """Computations of a conditional, in order; for a predicate, true first."""
        if found := re.search(r"branch_computations=\{([^}]*)\}", self.attrs):
            return re.findall(r"%?([\w.\-$]+)", found[1])
        return [b for key in ("true_computation", "false_computation") if (b := self.attr(key))]

    @functools.cached_property
    def sync(self) -> bool:
        """Whether the compiler runs this asynchronous collective synchronously."""
        return '"is_sync":true' in self.attrs

    @functools.cached_property
    def base(self) -> str:
        """The opcode without -start or -done."""
        return self.opcode.removesuffix("-start").removesuffix("-done")

    @property
    def is_done(self) -> bool:
        return self.opcode.endswith("-done")

    @functools.cached_property
    def groups(self) -> np.ndarray:
        """Replica groups, device ids [groups, members]; shape [0, 0] means all devices.

        Forms: {{0,1},{2,3}}; [2,2]<=[2,2]T(1,0), an iota of the shape on the right, transposed and
        reshaped; mesh['a'=2,'b'=4] {'a','b':(2)2}, groups along axes of a mesh of ids, here along
        one and the second of two factors of the other (jax 0.12, Shardy).

        Raises:
          ValueError: another form.
        """
        if found := re.search(rf"replica_groups=\[([\d,]+)\]<={IOTA}", self.attrs):
            to, *ids = found.groups()
            return _iota(*ids).reshape(_numbers(to))
        if found := re.search(f"replica_groups{MESH}", self.attrs):
            return _along_axes(*found.groups())
        text = self._listed("replica_groups")
        if not text and re.search(r"replica_groups=(?!\{\})", self.attrs):
            raise ValueError(f"replica groups of an unknown form: {self.attrs[:200]}")
        return _rows(text) if text else np.zeros((0, 0), int)

    @functools.cached_property
    def pairs(self) -> np.ndarray:
        """Source and target device of each message of a permute, [messages, 2]."""
        text = self._listed("source_target_pairs")
        return _rows(text) if text else np.zeros((0, 2), int)

    def _listed(self, key: str) -> str:
        """Value of an attribute that is a list of lists, {{0,1},{2,3}}, without the outer braces;
        '' if it is absent or empty."""
        start = self.attrs.find(f"{key}={{{{") + len(key) + 2
        return self.attrs[start : self.attrs.find("}}", start) + 1] if start > len(key) + 1 else ""

    def dims(self, key: str) -> tuple[int, ...]:
        """Dimension numbers of a dot or library call: dims('lhs_contracting_dimensions')."""
        found = re.search(rf'"{key}":\s*\[([^\]]*)\]', self.attrs)
        if not found:  # an attribute of a plain dot
            found = re.search(rf"{key.replace('dimensions', 'dims')}=\{{([^}}]*)\}}", self.attrs)
        return _numbers(found[1] if found else "")

    def integer(self, key: str, default: int) -> int:
        """An integer of a typed custom call's configuration: 'attn_heads = 32 : i64'."""
        found = re.search(rf"\b{key} = (-?\d+) : i", self.attrs)
        return int(found[1]) if found else default


@functools.lru_cache(64)  # many ops have the same ones, of all devices
def _rows(text: str) -> np.ndarray:
    """Numbers of '{0,1},{2,3}', a row of each list.

    Raises:
      ValueError: another form, or lists of several lengths.
    """
    rows = text.removeprefix("{").removesuffix("}").split("},{")
    if len({row.count(",") for row in rows}) > 1 or not re.fullmatch(r"[\d,{}]*", text):
        raise ValueError(f"lists of devices of an unknown form: {text[:200]}")
    return np.fromstring(",".join(rows), int, sep=",").reshape(len(rows), -1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


VALUE = re.compile(r'"([^"]*)"|%?([\w.\-$]+)')  # of an attribute
IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
AXIS = r"'([^']+)'(?::\((\d+)\)(\d+))?"  # 'a':(2)3, of an axis of 2 x 3 x n its factor of 3
MESH = rf"=mesh\[([^\]]*)\](?:, device_ids=\({IOTA}\))? \{{((?:'[^']+'(?::\(\d+\)\d+)?,?)+)\}}"


def _iota(over: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(over))).reshape(_numbers(over))
    return ids.transpose(_numbers(order or "") or range(ids.ndim))


@functools.lru_cache(64)
def _along_axes(axes: str, over: str | None, order: str | None, along: str) -> np.ndarray:
    """Groups [groups, members] of a mesh's device ids along axes or factors of axes.

    Args:
      axes: "'a'=2,'b'=4", the slowest first.
      over, order: of the ids, as of _iota(); None: they count.
      along: "'b':(2)2,'a'", as AXIS.
    """
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = []  # (axis, product of its factors before this one, product with it)
    for name, before, size in re.findall(AXIS, along):
        start = int(before or 1)
        parts.append((name, start, start * int(size) if size else sizes[name]))
    factors: dict[tuple[str, int, int], int] = {}  # all of them, the slowest first
    for name, n in sizes.items():
        ends = sorted({1, n, *(end for axis, *cut in parts for end in cut if axis == name)})
        for start, end in itertools.pairwise(ends) if n > 1 else [(1, 1)]:
            factors[name, start, end] = end // start
    ids = _iota(over or str(math.prod(sizes.values())), order).reshape([*factors.values()])
    last = [[*factors].index(part) for part in parts]
    size = math.prod(factors[part] for part in parts)
    return np.moveaxis(ids, last, range(-len(last), 0)).reshape(-1, size)


class Computation:
    """Ops in execution order."""

    def __init__(self, name: str, ops: list[Op]):
        self.name, self.ops = name, ops
        self.by_name = {op.name: op for op in ops}

    @property
    def root(self) -> Op:
        return next((op for op in self.ops if op.root), self.ops[-1])

    def operands(self, op: Op) -> list[Op]:
        return [self.by_name[name] for name in op.operands]

    @functools.cached_property
    def users(self) -> dict[str, list[Op]]:
        """Op's name -> the ops that read it."""
        users: dict[str, list[Op]] = {op.name: [] for op in self.ops}
        for op in self.ops:
            for name in dict.fromkeys(op.operands):
                users[name].append(op)
        return users


class Frame(NamedTuple):
    """A stack frame: '/home/me/model/layers.py', 'Attention.__call__', 243."""

    file: str
    function: str
    line: int


class Program:
    """An HLO module: its computations by name, its entry, and its stack frames.

    Args:
      frames: stack_frame_id -> (the Frame, the caller's stack_frame_id), or empty.
      devices: number of GPUs that it is compiled for.
    """

    def __init__(
        self,
        computations: dict[str, Computation],
        entry: str,
        frames: dict[str, tuple[Frame, str]] | None = None,
        devices: int = 1,
    ):
        self.computations, self.entry = computations, computations[entry]
        self.frames, self.devices = frames or {}, devices

    def stack(self, op: Op) -> list[Frame]:
        """Frames of the code that emitted an op, innermost first; empty if the program does not
        name them. A fusion without frames has those of its root."""
        frame_id, frames = op.attr("stack_frame_id"), []
        while frame_id in self.frames:
            frame, frame_id = self.frames[frame_id]
            frames.append(frame)
        if not frames and (file := op.attr("source_file")):  # of older versions: the innermost one
            return [Frame(file, "", int(op.attr("source_line") or 0))]
        if not frames and op.base == "fusion" and not op.is_done:
            return self.stack(self.called(op).root)
        return frames

    def called(self, op: Op, key: str = "calls") -> Computation:
        return self.computations[op.attr(key)]

    @staticmethod
    def counts(loop: Op) -> bool:
        """Whether a while loop's trip count is known, instead of depending on data."""
        return "known_trip_count" in loop.attrs or "known_induction_variable" in loop.attrs

    def trips(self, where: Computation, loop: Op) -> int:
        """Trip count of a while loop.

        Raises:
          ValueError: it depends on data, or is computed in a way that is not understood.
        """
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attrs):
            return int(found[1])
        counter = re.search(r'"known_induction_variable":\{"tuple_index":"(\d+)"', loop.attrs)
        if not counter:
            raise ValueError(f"loop {loop.name} has no known trip count: it depends on data")
        # XLA rotated the loop and dropped its trip count: run its induction variable.
        index = int(counter[1])
        condition, body = self.called(loop, "condition"), self.called(loop, "body")
        value = self._scalar(where, where.by_name[loop.operands[0]], _unknown, index)
        for count in range(1 << 20):
            state = {index: value}.__getitem__
            if not self._scalar(condition, condition.root, state):
                return count
            value = self._scalar(body, body.root, state, index)
        raise ValueError(f"loop {loop.name} does not end")

    def _scalar(self, where: Computation, op: Op, read, element: int = 0) -> int:
        """Evaluates an integer op; `element` selects of a tuple.

        `read(i)` is the value of parameter i, or of element i of a tuple parameter.
        """
        follow = lambda i=0, element=element: self._scalar(
            where, where.by_name[op.operands[i]], read, element
        )
        match op.opcode:
            case "constant":
                return int(op.literal)
            case "parameter":
                return read(element if isinstance(op.shape, tuple) else int(op.literal))
            case "copy" | "bitcast" | "convert":
                return follow()
            case "tuple":
                return follow(element)
            case "get-tuple-element":
                return follow(0, int(op.attr("index")))
            case "fusion":
                callee = self.called(op)
                return self._scalar(callee, callee.root, follow, element)
            case "add":
                return follow(0) + follow(1)
            case "compare":
                less = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "NE": operator.ne}
                return less[op.attr("direction")](follow(0), follow(1))
        raise ValueError(f"{op.name}: a trip count through {op.opcode} cannot be evaluated")


def _unknown(argument: int) -> int:
    """The value of an argument of the program."""
    raise ValueError(f"the trip count depends on argument {argument}")


def parse(text: str) -> Program:
    """Parses a module's text.

    Raises:
      ValueError: not a scheduled module; an unscheduled one has no execution order.
    """
    head = text.partition("\n")[0]
    if "is_scheduled=true" not in head:
        raise ValueError("not a scheduled HLO module: is_scheduled=true is missing")
    computations: dict[str, Computation] = {}
    name, ops, entry = "", [], ""
    lines = text.splitlines()
    for line in lines:
        if line.startswith((" ", "\t")) and " = " in line:
            ops.append(_op(line))
        elif line.endswith("{") and (found := re.match(r"(ENTRY )?%?([\w.\-$]+) \(", line)):
            name, ops = found[2], []
            entry = name if found[1] else entry
        elif line.startswith("}") and name:
            computations[name], name = Computation(name, ops), ""
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)
    return Program(computations, entry, _frames(lines), math.prod(map(int, sizes)))


def _frames(lines: list[str]) -> dict[str, tuple[Frame, str]]:
    """Program.frames, from the tables in front of the computations."""
    tables: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables.setdefault(line, {})
        elif tables and line[:1].isdigit():
            key, _, rows[key] = line.partition(" ")
        elif tables and line:
            break
    table = lambda name: tables.get(name, {}).items()
    number = lambda text, name: int(re.findall(rf"{name}=(\d+)", text)[0])
    names = {
        (kind, key): x[1:-1] for kind in ("FileNames", "FunctionNames") for key, x in table(kind)
    }
    at = {
        key: Frame(
            names["FileNames", str(number(x, "file_name_id"))],
            names["FunctionNames", str(number(x, "function_name_id"))],
            number(x, "line"),
        )
        for key, x in table("FileLocations")
    }
    # XLA prints the caller's id plus one; 1 is no caller.
    caller = lambda x: str(number(x, "parent_frame_id") - 1) if "parent_frame_id" in x else ""
    return {
        key: (at[str(number(x, "file_location_id"))], caller(x)) for key, x in table("StackFrames")
    }


_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"%([\w.\-$]+)")
# ROOT, name, shape, opcode, operands and attributes.
_OP = re.compile(r"\s+(ROOT )?%?([\w.\-$]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")


def _op(line: str) -> Op:
    found = _OP.fullmatch(_COMMENT.sub("", line))
    if not found:
        raise ValueError(f"not an HLO instruction: {line[:80]!r}")
    root, name, shape, opcode, rest = found.groups("")
    inside, attrs = _operands(opcode, rest)
    literal = inside if opcode in ("parameter", "constant") else ""
    operands = () if literal else tuple(_NAME.findall(inside))
    return Op(name, opcode, parse_shape(shape), operands, attrs, bool(root), literal)


def _operands(opcode: str, text: str) -> tuple[str, str]:
    """The operands and the attributes of an op, from the text after its opening parenthesis. Older
    texts have the shape of each operand, which may be a tuple."""
    if opcode in ("parameter", "constant"):
        inside, _, attrs = text.partition("), ")
        return inside if attrs else text[: text.rindex(")")], attrs
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return text[: found.start()], text[found.end() :].removeprefix(", ")
    return text, ""


@functools.lru_cache(maxsize=4096)
def parse_shape(text: str) -> Shape | tuple:
    """'bf16[2,8]{1,0}' -> Shape; '(f32[], (s32[2]))' -> nested tuples of them."""
    open_tuples: list[list] = [[]]
    for part in re.finditer(r"[()]|(\w+)\[([\d,]*)\](\{[^}]*\})?", text):
        if part[0] == "(":
            open_tuples.append([])
        elif part[0] == ")":
            done = tuple(open_tuples.pop())
            open_tuples[-1].append(done)
        else:
            shape = Shape(part[1], _numbers(part[2]), HOST in (part[3] or ""))
            open_tuples[-1].append(shape)
    return open_tuples[0][0]
