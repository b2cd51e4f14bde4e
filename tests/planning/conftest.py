"""Stored figures of compiled programs: tests/planning/figures.json.

The file has the figures of each program by jax version. A version without figures is compared with
the newest stored one, with wide tolerances. `pytest -n 0 --update tests/planning` rewrites the
figures of the installed version, for the programs of the tests that ran.
"""

import json
import pathlib
from importlib import metadata

import pytest

from maxbench.planning.plan_text import PURPOSES

PATH = pathlib.Path(__file__).with_name("figures.json")
JAX = metadata.version("jax")
SAME, OTHER = 0.01, 0.08  # tolerance of figures of the same jax version, and of another


def _version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def of_plan(plan: dict) -> dict[str, dict[str, float]]:
    """The figures of a plan: seconds of the parts of a step, and GiB of memory."""
    seconds = {"step": plan["step_s"], **plan["parts_s"]}
    sizes = {name: plan["memory"][name] / 2**30 for name in (*PURPOSES, "total", "host")}
    return {
        "seconds": {name: float(f"{s:.4g}") for name, s in seconds.items() if s},
        "gib": {name: float(f"{size:.4g}") for name, size in sizes.items() if size},
    }


@pytest.fixture
def check_figures(request):
    """check_figures(name, plan): compares a plan with the stored figures of a program."""
    updated = {}

    def check(name: str, plan: dict) -> None:
        measured = of_plan(plan)
        if request.config.getoption("--update"):
            updated[name] = measured
            return
        versions = json.loads(PATH.read_text())[name]
        newest = max(versions, key=_version)
        stored, tolerance = versions.get(JAX, versions[newest]), SAME if JAX in versions else OTHER
        for unit, whole in (("seconds", "step"), ("gib", "total")):
            # Absolute, because a small part may change by more than its size.
            allowed = tolerance * stored[unit][whole]
            assert measured[unit] == pytest.approx(
                dict.fromkeys(measured[unit], 0.0) | stored[unit], abs=allowed
            ), f"{name}: {unit} differ from figures.json; --update rewrites them"

    yield check
    if updated:
        figures = json.loads(PATH.read_text()) if PATH.exists() else {}
        for name, measured in updated.items():
            figures.setdefault(name, {})[JAX] = measured
            figures[name] = dict(sorted(figures[name].items(), key=lambda item: _version(item[0])))
        PATH.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")
