"""How fast does a cluster pre-train large language models, and is that as fast as it should be?

The Python API: plan(), plan_program(), search_program(), train(), report(), sweep() and trace(),
which raise UserError for invalid arguments; docs/how-to/use_from_python.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxbench.api import plan, plan_program, report, search_program, sweep, trace, train
    from maxbench.config.errors import UserError

    __version__: str

__all__ = [
    "UserError",
    "plan",
    "plan_program",
    "report",
    "search_program",
    "sweep",
    "trace",
    "train",
]


def __getattr__(name: str) -> Any:
    """The functions of api.py, which is loaded when the first of them is used; the version."""
    if name == "__version__":
        from maxbench.host import environment

        return environment.version("maxbench")
    if name == "UserError":
        from maxbench.config.errors import UserError

        return UserError
    if name in __all__:
        from maxbench import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
