"""Bytes that memory-bound kernels of a layer move, as compiled for GPUs.

    python -m tools.passes --config=llama31_8b --gpus=8

For each module of a layer: passes over its input [tokens, embed] in BF16, reads and writes
together, per layer and microbatch, from the compiled program.
"""

import collections
import re
import sys

from maxbench.config import command_line
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import bytes_moved
from maxbench.planning import planner

KINDS = {"memory", "amax", "copy"}


class ByteCounter(simulate.Simulator):
    """A simulator that also sums the bytes of memory-bound kernels by module."""

    def __init__(self, *args):
        super().__init__(*args)
        self.module_bytes = collections.Counter()

    def _kernel(self, where, op, now, times):
        end = super()._kernel(where, op, now, times)
        module = re.search(r"Block/(\w+)", op.op_name or "")
        if module and self.kernel_costs[op][0] in KINDS:
            self.module_bytes[module[1]] += bytes_moved(self.program, where, op) * times
        return end


def main():
    run = command_line.run_of(sys.argv[1:])
    compiled, _ = planner.compile_program(run)
    program = hlo.parse(compiled.text)
    counter = ByteCounter(program, planner.costs_of(run), planner.meaning_of(run, program))
    counter.run(program.entry, 0.0, 1)
    m, a = run.model, run.layout
    tokens, layers = a.mbs * run.train.seq / (a.cp * a.tp), m.layers / a.pp
    per_pass = tokens * m.embed * 2 * layers * a.microbatches
    for module, size in sorted(counter.module_bytes.items()):
        print(f"{module:12}{size / per_pass:6.1f}")
    print(f"{'all':12}{counter.module_bytes.total() / per_pass:6.1f}")


if __name__ == "__main__":
    main()
