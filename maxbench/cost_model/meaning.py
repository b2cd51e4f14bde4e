"""Meaning of the names in a program, which its author gives."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from maxbench.cost_model import hlo

# Scope of a conditional, or of a loop with 0 or 1 trips (hlo.Op.scope) -> the fraction of its
# executions that run the longest branch, and the fraction that wait while other devices run it (the
# rest runs the shortest branch). Scope of a loop -> the fraction of its iterations that work, and
# the fraction in which the device waits for others. Absent: (1, 0).
Frequencies = Mapping[str, tuple[float, float]]
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Meaning:
    """Meaning of names that the author of a program gave to scopes and arguments.

    A compiled program has these names (hlo.Op.op_name), but not what they mean. All fields are
    optional: without them, any program is priced, with one trip of each loop of unknown length, the
    longest branch of each conditional, and the bytes of each kernel that has no price.

    Attributes:
      trip_counts: name of a loop (hlo.Op.names) -> its trips, where XLA does not know them.
      branches: name of a conditional -> the share of its runs that each branch has.
      prices: name of a kernel -> seconds of a run.
      frequencies: of branches. A device's text does not say how often it runs each.
      label: op_name -> name of an op in drawings ('backward mlp/up'), or ''.
      amax: pattern of op_name; a reduction with such a name computes the scale of a tensor.
      arguments: pattern of op_name -> name of the memory of a parameter of the program.
      stash: pattern of op_name of a write to the activations that a loop keeps for the backward
        pass. Each such loop has activations of its own.
      shared_stash: likewise, of loops that all write to the same activations.
    """

    trip_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    branches: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    frequencies: Frequencies = dataclasses.field(default_factory=dict)
    label: Callable[[str], str] = lambda op_name: ""
    amax: re.Pattern | None = None
    arguments: Mapping[re.Pattern, str] = dataclasses.field(default_factory=dict)
    stash: re.Pattern | None = None
    shared_stash: re.Pattern | None = None

    def trips(self, program: hlo.Program, where: hlo.Computation, loop: hlo.Op) -> int | None:
        """Trip count of a loop; None if neither the program nor trip_counts has it."""
        try:
            return program.trips(where, loop)
        except ValueError:
            return by_name(self.trip_counts, loop)


UNKNOWN = Meaning()


def by_name(values: Mapping[str, Value], op: hlo.Op) -> Value | None:
    """The value under one of an op's names; None if there is none."""
    return next((values[name] for name in op.names if name in values), None)


def matches(pattern: re.Pattern | None, op: hlo.Op) -> bool:
    """Whether a pattern is found in the op_name of an op."""
    return pattern is not None and pattern.search(op.op_name) is not None
