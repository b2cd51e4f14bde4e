"""Names of a program's ops for people: pass and scopes, from the name stacks that JAX writes.

They are for display alone: nothing is priced by them.
"""

import re
from collections.abc import Iterable

from maxbench.cost_model import hlo

PASSES = {"rematted": "recomputed", "transpose(": "backward", "jvp(": "forward"}
# Parts of a name stack that JAX writes, and no scope.
OF_JAX = re.compile(
    r"\(*\)*|while|body|cond|branch_\d+_fun|closed_call|core_call|eval_jaxpr|checkpoint|remat\d*"
    r"|shard_map|rematted_computation|custom_[jv][vj]p_call\w*|p?jit|scan|<\w+>|p?jit\(.*\)"
    r"|.*->.*|.*[:()].*"
)
TRANSFORM = re.compile(r"(?:transpose|jvp|vmap|checkpoint|remat)\((.*)\)")
HELPER = 4  # places that call a function, from which on it is a helper
# Frames of libraries: an op is explained by the code that calls them.
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?:jax|jaxlib|flax|optax|chex|equinox|haiku|qwix)/"
    r"|/maxbench/(?:api|cli|cost_model|planning)"
)


def scopes(op_name: str) -> list[str]:
    """The scopes of an op's name stack, outermost first, without JAX's own parts, einsum's
    subscripts, the primitive, and Linen's methods.

    'a/jvp(Net)/while/body/mlp/mlp.f/up/dot_general' -> ['a', 'Net', 'mlp', 'up'].
    """
    found: list[str] = []
    stack, _, _ = op_name.partition("[")  # older texts have parameters of the primitive
    for part in stack.split("/")[:-1]:
        inner = part
        while transformed := TRANSFORM.fullmatch(inner):
            inner = transformed[1]
        if not OF_JAX.fullmatch(inner) and "." not in inner:
            found.append(inner)
    return found


def pass_of(op_name: str) -> str:
    """'forward', 'backward' or 'recomputed'; '' outside of a derivative."""
    return next((name for marker, name in PASSES.items() if marker in op_name), "")


class OpNames:
    """Names of the ops of any program: the innermost scopes that tell them apart, or the innermost
    function of the program's own that is no helper of many others."""

    OUTSIDE = "outside passes"

    def __init__(self, program: hlo.Program):
        self.callers: dict[tuple[str, str], set[hlo.Frame]] = {}
        for frame, parent in program.frames.values():
            while parent in program.frames:
                caller, parent = program.frames[parent]
                if not LIBRARY.search(caller.file):
                    self.callers.setdefault(frame[:2], set()).add(caller)
                    break
        names = {op.op_name for c in program.computations.values() for op in c.ops}
        self.paths = [*dict.fromkeys(tuple(self.scopes(name)) for name in names)]

    def scopes(self, op_name: str) -> list[str]:
        """Scopes of an op, without numbers at their ends: layers of a model have one name."""
        return [re.sub(r"_?\d+$", "", scope) or scope for scope in scopes(op_name)]

    def module(self, op_name: str) -> str:
        """Pass and module of an op, 'backward mlp/up'; '' if its name has no scope."""
        path = tuple(self.scopes(op_name))
        if not path:
            return ""
        ends = (path[-n:] for n in range(1, len(path) + 1))
        is_own = lambda end: all(x[-len(end) :] != end for x in self.paths if x != path)
        end = next(filter(is_own, ends), path)
        return f"{pass_of(op_name)} {'/'.join(end)}".strip()

    def part(self, op_name: str) -> tuple[str, str]:
        """Pass and part of the network of an op, for sums."""
        path = self.scopes(op_name)
        return pass_of(op_name) or self.OUTSIDE, path[-1] if path else ""

    def event(self, op_name: str) -> str:
        """Event of a pipeline's tick that an op belongs to; '' if none."""
        return ""

    def is_generic(self, frame: hlo.Frame) -> bool:
        """Whether a frame is of a library, or of a helper, so that its caller explains an op."""
        return LIBRARY.search(frame.file) is not None or self._is_helper(frame[:2])

    def _is_helper(self, function: tuple[str, str]) -> bool:
        """Whether several places call a function, or the only one that does is in a helper."""
        seen: set[tuple[str, str]] = set()
        while function not in seen and len(callers := self.callers.get(function, set())) == 1:
            seen.add(function)
            function = next(iter(callers))[:2]
        return len(callers) >= HELPER


def source_of(frames: Iterable[hlo.Frame], names: OpNames) -> hlo.Frame | None:
    """The innermost frame that is not generic; the innermost of all if all are."""
    frames = [*frames]
    return next((f for f in frames if not names.is_generic(f)), frames[0] if frames else None)
