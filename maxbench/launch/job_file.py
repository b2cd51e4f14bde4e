"""Variables that stand in files: the cluster's own, and jobs of one call.

cluster.toml lies under STAGE_PATH and is a table of variables. A file of jobs has three parts:

  [defaults]                        variables of all jobs
  MAX_STEPS = 50

  [expect]                          what each run must reach, of a suite
  published = 0.95

  [[jobs]]                          variables of one; lists mean a run of each
  MODEL_SIZE = "8b"
  JOB_TOTAL_GPUS = [8, 16, 32]

What a job says goes before the environment, the environment before [defaults], and these before
cluster.toml.
"""

import dataclasses
import difflib
import itertools
import os
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxbench.config.errors import UserError, check_choice
from maxbench.launch.variables import (
    MANY,
    REFUSED,
    UNUSED,
    VARIABLES,
    JobConfig,
    resolve_job,
)
from maxbench.run_logs.suite_file import Expectation

Values = dict[str, str | list[str]]
NAMED = {n: name for name, v in VARIABLES.items() for n in (name, *v.also)}
STAGE = ("STAGE_PATH", *VARIABLES["STAGE_PATH"].also)
ONE = ("CLUSTER_TYPE", "RUN_CONF_RESULT_DIR", *STAGE)  # the same for all jobs of a call


def env_value(env: Mapping[str, str], name: str) -> str:
    """What an environment says of a variable, under whichever of its names; '' for nothing."""
    return next((env[n] for n in (name, *VARIABLES[name].also) if env.get(n)), "")


def cluster_file(env: Mapping[str, str]) -> pathlib.Path:
    """Where the file of the cluster is, or would be."""
    return pathlib.Path(env_value(env, "STAGE_PATH"), "cluster.toml")


def cluster_values(env: Mapping[str, str]) -> dict[str, str]:
    """What the cluster's file says; {} where there is none."""
    if not (file := cluster_file(env)).is_file():
        return {}
    values = variables(str(file), load(file), STAGE)
    if listed := next((name for name, value in values.items() if isinstance(value, list)), ""):
        raise UserError(f"{file}: {listed} is a list; a cluster has one value of each")
    return values


def overlay(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both; a variable of `low` that `high` has too, under whatever name, is left out."""
    there = {NAMED.get(name, name) for name in high}
    return {k: v for k, v in low.items() if NAMED.get(k, k) not in there} | dict(high)


def resolve_jobs(
    env: Mapping[str, str], extra: Sequence[str] = (), file: str = "", suite: bool = False
) -> list[JobConfig]:
    """The settings of each run that is asked for, by lists or by a file of jobs; largest first.

    Args:
      suite: the file must say what is expected of each run.

    Raises:
      UserError: as settle(), of any of them; a file that cannot be read, or what of it cannot be.
    """
    made, cluster = [], cluster_values(env)
    for where, table, about in _of_jobs(file, env, suite) if file else [("", env, {})]:
        for one in _each(overlay(cluster, table)):
            try:
                s = resolve_job(one, extra)
            except UserError as e:
                raise UserError(f"{where}{e}") from None
            notes = (*s.notes, *about.get("notes", ()))
            made.append(dataclasses.replace(s, **(about | {"notes": notes})))
    made.sort(key=lambda s: -s.run.layout.gpus)
    return [s for s in made for _ in range(s.number("REPEATS"))]


def _each(table: Mapping[str, str | list[str]]) -> Iterator[dict[str, str]]:
    """The environment of each combination of what has several values."""
    lists = {n: value for n, value in table.items() if isinstance(value, list)}
    texts = {n: value for n, value in table.items() if isinstance(value, str)}
    for name in (n for main in MANY for n in (main, *VARIABLES[main].also)):
        if len(words := texts.get(name, "").split()) > 1:
            lists[name] = words
    for one in itertools.product(*lists.values()):
        yield {**texts, **dict(zip(lists, one, strict=True))}


def _of_jobs(
    file: str, env: Mapping[str, str], suite: bool
) -> Iterator[tuple[str, Values, dict[str, Any]]]:
    """Where it stands, the variables, and further fields of Settings, of each job in a file."""
    name, data = pathlib.Path(file).name, _parts(file)
    given = overlay(variables(f"{name} [defaults]", data["defaults"], STAGE), env)
    for number, job in enumerate(data["jobs"], 1):
        where, own = f"{name} job {number}", job.pop("expect", {})
        values = variables(where, job, ONE)
        named = {NAMED.get(n) for n in values}
        unused = (n for n, text in env.items() if text and n in NAMED and NAMED[n] in named)
        notes = tuple(f"{n} of the environment is not used: {where} says it" for n in unused)
        if not isinstance(own, dict):
            raise UserError(f"{where}: expect={own!r} must be a table, {{ published = 0.95 }}")
        expect = _expect(where, {**data["expect"], **own}) if suite else None
        yield f"{where}: ", overlay(given, values), {"expect": expect, "notes": notes}


def _parts(file: str) -> dict[str, Any]:
    """The parts of a file of jobs, all of them tables, or lists of tables."""
    data, name = load(pathlib.Path(file)), pathlib.Path(file).name
    for key in data:
        check_choice(f"{name}: a part", key, ("defaults", "expect", "jobs"))
    jobs = data.get("jobs")
    if not (isinstance(jobs, list) and jobs and all(isinstance(job, dict) for job in jobs)):
        raise UserError(f"{name} has no job; a job is [[jobs]] and its variables below it")
    for table in ("defaults", "expect"):
        if not isinstance(data.setdefault(table, {}), dict):
            raise UserError(f"{name}: {table} must be a table, [{table}]")
    return data


def _expect(where: str, values: Mapping[str, Any]) -> Expectation:
    """What is expected of a run, checked."""
    for key in values:
        check_choice(f"{where}: expect", key, [f.name for f in dataclasses.fields(Expectation)])
    try:
        expect = Expectation(**values)
    except UserError as e:
        raise UserError(f"{where}: expect.{e}") from None
    if expect == Expectation():
        raise UserError(f"{where}: nothing is expected of it; [expect] published = 0.95 does")
    return expect


def variables(where: str, table: Mapping[str, Any], not_here: Sequence[str] = ()) -> Values:
    """A table's variables as texts, as an environment has them.

    Raises:
      UserError: a name that is none, or is said elsewhere; a value that is no text.
    """
    known, made = [*NAMED, *UNUSED, *REFUSED], {}
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "launch.sh --help lists them"
            raise UserError(f"{where}: {name} is no variable; {hint}")
        if name in not_here:
            raise UserError(f"{where}: {name} is not said here; set it in the environment")
        values = [_text(x) for x in (value if isinstance(value, list) else [value])]
        if None in values or not values:
            raise UserError(
                f"{where}: {name}={value!r} must be text, a whole number, true, false, or a list "
                "of such"
            )
        made[name] = values if isinstance(value, list) else values[0]
    return made


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | str) else None


def load(file: pathlib.Path) -> dict[str, Any]:
    """A TOML file.

    Raises:
      UserError: it cannot be read, or is none.
    """
    try:
        if not os.path.isfile(file):
            raise UserError(f"there is no file {str(file)!r}")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{str(file)!r} cannot be read: {e.strerror}") from None
    except ValueError as e:  # no TOML, or no text
        raise UserError(f"{str(file)!r} is no TOML: {e}") from None
