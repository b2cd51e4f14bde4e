"""What a layer's kernels move beside its products and attention, as compiled for GPUs.

    python -m benchmarks.passes --config=llama31_8b --gpus=8

For each part of a layer: passes over its input, [tokens, embed] in BF16, of one layer and
microbatch, reads and writes together, as plan's program says it.
"""

import collections
import re
import sys

from maxbench.config import command_line
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import bytes_moved
from maxbench.planning import planner

KINDS = {"memory", "amax", "copy"}


class Counter(simulate.Simulator):
    """A player that also sums the bytes of kernels by part."""

    def _kernel(self, where, op, now, times):
        end = super()._kernel(where, op, now, times)
        found = re.search(r"Block/(\w+)", op.op_name or "")
        if found and self.prices[op][0] in KINDS:
            self.parts[found[1]] += bytes_moved(self.program, where, op) * times
        return end


def main():
    run = command_line.run_of(sys.argv[1:])
    program = hlo.parse(planner.plan(run).compiled.text)
    counter = Counter(program, planner.costs_of(run), planner.branch_frequencies(run, program))
    counter.parts = collections.Counter()
    counter.run(program.entry, 0.0, 1)
    m, a = run.model, run.layout
    tokens, layers = a.mbs * run.train.seq / (a.cp * a.tp), m.layers / a.pp
    unit = tokens * m.embed * 2 * layers * a.microbatches
    for part, size in sorted(counter.parts.items()):
        print(f"{part:12}{size / unit:6.1f}")
    print(f"{'all':12}{sum(counter.parts.values()) / unit:6.1f}")


if __name__ == "__main__":
    main()
