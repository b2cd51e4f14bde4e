"""How fast does a cluster pre-train large language models, and is that as fast as it should be?

In Python, `maxbench.plan(...)`, `maxbench.train(...)` and `maxbench.report(...)` do what the
commands of these names do, `maxbench.sweep(...)` many of them, and return what prints itself:
docs/how-to/use_from_python.md.
"""

import importlib

CALLED = ("plan", "report", "sweep", "train")


def __getattr__(name: str):
    if name in CALLED:  # late, so that `import maxbench` takes no time
        return importlib.import_module(f"maxbench.{name}")
    raise AttributeError(f"maxbench has no {name!r}; it has {', '.join(CALLED)}")


def __dir__() -> list[str]:
    return [*globals(), *CALLED]
