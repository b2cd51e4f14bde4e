"""How fast does a cluster pre-train large language models, and is that as fast as it should be?

The Python API: plan(), plan_program(), search_program(), train(), report(), trace() and sweep();
docs/how-to/use_from_python.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxbench.api import plan, plan_program, report, search_program, sweep, trace, train

__all__ = ["plan", "plan_program", "report", "search_program", "sweep", "trace", "train"]


def __getattr__(name: str) -> Any:
    """The functions of api.py, which is loaded when the first of them is used."""
    if name in __all__:
        from maxbench import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
