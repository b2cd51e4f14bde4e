"""How fast does a cluster pre-train large language models, and is that as fast as it should be?

The Python API: plan(), train(), report() and sweep(); docs/how-to/use_from_python.md.
"""

from maxbench.api import plan, report, sweep, train

__all__ = ["plan", "report", "sweep", "train"]
