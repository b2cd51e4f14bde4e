"""Variables from files: cluster.toml, and files of jobs.

cluster.toml is under STAGE_PATH and is a table of variables. A file of jobs has three parts:

  [defaults]                        variables of all jobs
  MAX_STEPS = 50

  [expect]                          what each run must reach, for a suite
  published = 0.95

  [[jobs]]                          variables of one job; a list means a run for each value
  MODEL_SIZE = "8b"
  JOB_TOTAL_GPUS = [8, 16, 32]

A job overrides the environment, the environment overrides [defaults], and these override
cluster.toml.
"""

import dataclasses
import difflib
import itertools
import os
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from maxbench.config.errors import UserError, check_choice
from maxbench.config.validation import parse_fields
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
SUITES = pathlib.Path(__file__).with_name("suites")  # that maxbench brings along, by name
NAMED = {n: name for name, v in VARIABLES.items() for n in (name, *v.also)}
STAGE = ("STAGE_PATH", *VARIABLES["STAGE_PATH"].also)
ONE = ("CLUSTER_TYPE", "RUN_CONF_RESULT_DIR", *STAGE)  # equal for all jobs of a launch


def env_value(env: Mapping[str, str], name: str) -> str:
    """Value of a variable in an environment, under any of its names; '' if it is not set."""
    return next((env[n] for n in (name, *VARIABLES[name].also) if env.get(n)), "")


def cluster_file(env: Mapping[str, str]) -> pathlib.Path:
    """Path of cluster.toml, which need not exist."""
    return pathlib.Path(env_value(env, "STAGE_PATH"), "cluster.toml")


def cluster_values(env: Mapping[str, str]) -> dict[str, str]:
    """Variables in cluster.toml; {} if there is none."""
    if not (file := cluster_file(env)).is_file():
        return {}
    values = variables(str(file), load(file), STAGE)
    if listed := next((name for name, value in values.items() if isinstance(value, list)), ""):
        raise UserError(f"{file}: {listed} is a list; cluster.toml has one value of each variable")
    return {name: str(value) for name, value in values.items()}


def overlay(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of both; `high` overrides `low`, also under another name of a variable."""
    overridden = {NAMED.get(name, name) for name in high}
    return {k: v for k, v in low.items() if NAMED.get(k, k) not in overridden} | dict(high)


def resolve_jobs(
    env: Mapping[str, str], extra: Sequence[str] = (), file: str = "", suite: bool = False
) -> list[JobConfig]:
    """Job configurations of all runs, from lists of values or a file of jobs; largest first.

    Args:
      suite: the file must state an expectation for each run.

    Raises:
      UserError: as resolve_job(), for any of them; the file cannot be read or is invalid.
    """
    configs, cluster = [], cluster_values(env)
    for job in _jobs_of_file(file, env, suite) if file else [FileJob("", env)]:
        for variables_of_run in _combinations(overlay(cluster, job.variables)):
            try:
                config = resolve_job(variables_of_run, extra)
            except UserError as e:
                raise UserError(f"{job.where}{e}") from None
            notes = (*config.notes, *job.notes)
            configs.append(dataclasses.replace(config, expect=job.expect, notes=notes))
    configs.sort(key=lambda config: -config.run.layout.gpus)
    return [config for config in configs for _ in range(config.number("REPEATS"))]


def suite_file(name: str) -> str:
    """Path of the file of a suite of SUITES; another name is a path already."""
    ours = {path.stem: str(path) for path in sorted(SUITES.glob("*.toml"))}
    if name and not os.path.isfile(name) and name not in ours:
        raise UserError(f"suite={name!r} is neither a file nor one of {', '.join(ours)}")
    return name if os.path.isfile(name) else ours.get(name, "")


def _combinations(table: Mapping[str, str | list[str]]) -> Iterator[dict[str, str]]:
    """One environment for each combination of the values of lists."""
    lists = {n: value for n, value in table.items() if isinstance(value, list)}
    texts = {n: value for n, value in table.items() if isinstance(value, str)}
    for name in (n for main in MANY for n in (main, *VARIABLES[main].also)):
        if len(words := texts.get(name, "").split()) > 1:
            lists[name] = words
    for values in itertools.product(*lists.values()):
        yield {**texts, **dict(zip(lists, values, strict=True))}


class FileJob(NamedTuple):
    """A job of a file: one or several runs."""

    where: str  # start of messages about it
    variables: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    expect: Expectation | None = None


def _jobs_of_file(file: str, env: Mapping[str, str], suite: bool) -> Iterator[FileJob]:
    """The jobs of a file, with the variables of the environment and of [defaults]."""
    name, data = pathlib.Path(file).name, _parts(file)
    shared = overlay(variables(f"{name} [defaults]", data["defaults"], STAGE), env)
    for number, job in enumerate(data["jobs"], 1):
        where, own_expect = f"{name} job {number}", job.pop("expect", {})
        values = variables(where, job, ONE)
        named = {NAMED.get(n) for n in values}
        unused = (n for n, text in env.items() if text and n in NAMED and NAMED[n] in named)
        notes = tuple(f"{n} of the environment is not used: {where} sets it" for n in unused)
        if not isinstance(own_expect, dict):
            raise UserError(
                f"{where}: expect={own_expect!r} must be a table, {{ published = 0.95 }}"
            )
        expect = _expect(where, {**data["expect"], **own_expect}) if suite else None
        yield FileJob(f"{where}: ", overlay(shared, values), notes, expect)


def _parts(file: str) -> dict[str, Any]:
    """The parts of a file of jobs; jobs is a list of tables, the others are tables."""
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
    """The expectation of a run."""
    fields = parse_fields(Expectation, values, f"{where}: expect.")
    try:
        expect = Expectation(**fields)
    except UserError as e:
        raise UserError(f"{where}: expect: {e}") from None
    if expect == Expectation():
        raise UserError(f"{where}: no expectation is set; [expect] published = 0.95 sets one")
    return expect


def variables(where: str, table: Mapping[str, Any], not_here: Sequence[str] = ()) -> Values:
    """Variables of a table as strings, as in an environment.

    Raises:
      UserError: an unknown name, or one in not_here; a value that is not a string.
    """
    known = [*NAMED, *UNUSED, *REFUSED]
    found: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "launch.sh --help lists them"
            raise UserError(f"{where}: {name} is not a variable; {hint}")
        if name in not_here:
            raise UserError(f"{where}: {name} cannot be set here; set it in the environment")
        values = [_text(x) for x in (value if isinstance(value, list) else [value])]
        if None in values or not values:
            raise UserError(
                f"{where}: {name}={value!r} must be text, a whole number, true, false, or a list "
                "of these"
            )
        found[name] = values if isinstance(value, list) else values[0]
    return found


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | str) else None


def load(file: pathlib.Path) -> dict[str, Any]:
    """Content of a TOML file.

    Raises:
      UserError: the file cannot be read, or is not TOML.
    """
    if not os.path.isfile(file):
        raise UserError(f"{str(file)!r} is not a file")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{str(file)!r} cannot be read: {e.strerror}") from None
    except ValueError as e:  # neither TOML nor UTF-8
        raise UserError(f"{str(file)!r} is not TOML: {e}") from None
