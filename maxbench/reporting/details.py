"""What the page tells of each run below its table: settings, the recipe beside it, hosts, times."""

import collections
import functools
import json
import statistics
import time
from collections.abc import Mapping, Sequence

from maxbench.config import recipes
from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.reporting import tables
from maxbench.reporting.compare import RunSummary
from maxbench.run_logs.record import RunRecord, dig

HOSTS = 4  # of a run that are listed, the slowest
COMPARED = ("model", "layout", "train", "optim", "precision")  # sections that a recipe decides
NO_RECIPE = ("config.train.steps", "config.train.window", "config.train.seed")


def settings(one: RunSummary) -> dict[str, str]:
    """The run's settings by name, without what its place on the disk decides."""
    own = dig(one.record.result, "config", {})
    return {
        key: value
        for key, value in tables.settings_of(one).items()
        if not key.startswith(("config.output.dir", "config.output.stamp", "config.runtime.coor"))
        and not (own and key in tables.NAMED)  # the same again
    }


def usual(told: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The value of each setting that most of the runs have which have it."""
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for one in told:
        for key, value in one.items():
            counts[key][value] += 1
    return {key: counts[key].most_common(1)[0][0] for key in sorted(counts)}


def apart(mine: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, str]:
    """Settings that are not the usual ones; of a log that names few, those it names."""
    whole = any(key.startswith("config.") for key in mine)
    keys = usual if whole else mine
    return {k: mine.get(k, "(not set)") for k in keys if mine.get(k, "(not set)") != usual[k]}


@functools.cache
def _recipe(
    model: str, size: str, dtype: str, gpu_type: str, gpus: int, gbs: int, gpu_types: GpuTypes
):
    """The recipe with the nearest GPU count: its name and its settings; None where none is."""
    path = next(iter(recipes.find_workloads(model, size)), None)
    made = []
    for strong in (False, True) if path else ():
        ask = functools.partial(
            recipes.build_run, recipes.workloads()[path], strong_scaling=strong,
            flags={"dtype": dtype}, overrides={"layout.gpu_type": gpu_type}, gpu_types=gpu_types,
        )  # fmt: skip
        try:
            made.append((strong, ask(gpus=gpus)))
        except recipes.NoRow as e:
            made.append((strong, ask(gpus=e.nearest)))
        except UserError:
            continue
    if not made:
        return None
    fits = lambda x: (x[1].layout.gpus != gpus, x[1].layout.gbs != gbs)
    strong, run = min(made, key=fits)
    name = f"{path.stem}, {run.layout.gpus} {gpu_type}, {dtype}" + ", strong scaling" * strong
    return name, dict(tables.leaves({"config": json.loads(json.dumps(run.asdict()))}))


def beside_recipe(
    one: RunSummary, gpu_types: GpuTypes = GPU_TYPES
) -> tuple[str, list[tuple[str, str, str]]] | None:
    """The nearest recipe and each setting that differs: its name, ours, theirs. None for runs that
    are not ours, or of which there is no recipe."""
    r = one.record
    if not (dig(r.result, "config", {}) and r.gpu_type and r.gpus):
        return None
    try:
        found = _recipe(r.model, r.size, r.dtype, r.gpu_type, r.gpus, r.gbs, gpu_types)
    except UserError:
        return None
    if not found:
        return None
    ours, (name, theirs) = tables.settings_of(one), found
    return name, [
        (key.removeprefix("config."), ours[key], theirs[key])
        for key in sorted(ours.keys() & theirs.keys())
        if ours[key] != theirs[key] and key.split(".")[1] in COMPARED and key not in NO_RECIPE
    ]


def hosts(r: RunRecord) -> tuple[dict[str, str], str]:
    """The slowest hosts: name -> TFLOP/s of the slowest GPU and median step; and of the others."""
    found = []
    for name, told in dig(r.result, "hosts", {}).items():
        speeds = [x for x in dig(told, "gemm_tflops", []) if isinstance(x, int | float)]
        found.append((min(speeds, default=0.0), str(name), dig(told, "step_s", 0.0)))
    found.sort()
    slow = dig(r.result, "slow_hosts", [])
    body = {}
    for speed, name, step_s in found[:HOSTS]:
        step = f", {step_s:.3f} s a step" if step_s else ""
        body[name + " (slow)" * (name in slow)] = f"{speed:,.0f}{step}"
    rest = [speed for speed, _, _ in found[HOSTS:]]
    return body, f"{len(rest)} more, median {statistics.median(rest):,.0f}" if rest else ""


def timeline(r: RunRecord) -> list[str]:
    """When what happened, in words."""
    first = dig(r.result, "start_to_first_step_s", 0.0)
    said = _moment("started" if r.source == "maxbench" else "last written", r.started)
    said += [f"first step after {first:,.0f} s"] if first else []
    said += [f"last step {r.last}"] if r.last >= 0 else []
    said += [f"loaded a checkpoint in {statistics.fmean(r.loads):,.1f} s"] if r.loads else []
    if r.saves:
        said.append(f"saved {len(r.saves)} times, {statistics.fmean(r.saves):,.1f} s each")
    return said + _moment("ended", dig(r.result, "ended", 0.0))


def _moment(what: str, seconds: float) -> list[str]:
    """A line of it; none where a damaged file has a number that is no time of ours."""
    if not 0 < seconds < 4e9:
        return []
    return [f"{what} {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(seconds))}"]


def time_parts(one: RunSummary) -> dict[str, float]:
    """Where the time of a whole run went, in seconds; {} where it does not tell."""
    r, names = one.record, ("start_to_first_step_s", "compile_s", "lower_s")
    start, compiled, lower = (dig(r.result, name, 0.0) for name in names)
    if not start or not r.step_s:
        return {}
    parts = {
        "start-up": start - compiled - lower,
        "trace and lower": lower,
        "compile": compiled,
        "steps": sum(r.step_s.values()) - r.step_s[min(r.step_s)],
        "checkpoints": sum(r.saves),
    }
    return {k: v for k, v in parts.items() if v > 0}
