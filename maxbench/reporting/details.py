"""Details of each run on the page: settings, differences from its recipe, hosts, times."""

import collections
import functools
import json
import statistics
import time
from collections.abc import Mapping, Sequence

from maxbench.config import precedence, recipes, resolve
from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.reporting import difference
from maxbench.reporting.compare import RunSummary
from maxbench.run_logs.record import RunRecord, dig

HOSTS = 4  # of a run that are listed: the slowest
# Sections of the configuration that a recipe decides.
COMPARED = ("model", "layout", "train", "optim", "precision")
# A recipe names no backend: it would be that of the libraries where the report is written.
NOT_COMPARED = ("train.steps", "train.window", "train.seed", "precision.backend")


def settings(summary: RunSummary) -> dict[str, str]:
    """A run's settings by name, without those that only its output folder decides."""
    has_config = dig(summary.record.result, "config", {})
    return {
        key: value
        for key, value in difference.settings_of(summary).items()
        if not key.startswith(("run.output.dir", "run.output.stamp", "run.runtime.coor"))
        and not (has_config and key in difference.NAMED)  # config has them too
    }


def most_common(settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The most frequent value of each setting, among the runs that name it."""
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for named in settings:
        for key, value in named.items():
            counts[key][value] += 1
    return {key: counts[key].most_common(1)[0][0] for key in sorted(counts)}


def unusual(settings: Mapping[str, str], common: Mapping[str, str]) -> dict[str, str]:
    """Settings of a run that differ from the common ones.

    A run with a configuration names all settings, another program's log only a few, and only
    those are compared.
    """
    complete = any(key.startswith("run.") for key in settings)
    values = {k: settings.get(k, "(not set)") for k in (common if complete else settings)}
    return {k: value for k, value in values.items() if value != common[k]}


@functools.cache
def _recipe(
    model: str, size: str, dtype: str, gpu_type: str, gpus: int, gbs: int, gpu_types: GpuTypes
):
    """Name and settings of the recipe with the nearest GPU count; None if there is no recipe."""
    path = next(iter(recipes.find_workloads(model, size)), None)
    if path is None:
        return None
    candidates = []
    for strong in (False, True):
        build = functools.partial(
            precedence.build_config, recipes.workloads()[path], strong_scaling=strong,
            flags={"dtype": dtype}, overrides={"layout.gpu_type": gpu_type}, gpu_types=gpu_types,
        )  # fmt: skip
        try:
            candidates.append((strong, resolve.resolve(build(gpus=gpus), gpu_types)))
        except precedence.NoRow as e:
            config = build(gpus=gpus, row=e.nearest)
            candidates.append((strong, resolve.resolve(config, gpu_types)))
        except UserError:
            continue
    if not candidates:
        return None
    mismatch = lambda x: (x[1].layout.gpus != gpus, x[1].layout.gbs != gbs)
    strong, run = min(candidates, key=mismatch)
    name = f"{path.stem}, {run.layout.gpus} {gpu_type}, {dtype}"
    name += ", strong scaling" if strong else ""
    return name, dict(difference.leaves({"run": json.loads(json.dumps(run.asdict()))}))


def recipe_differences(
    summary: RunSummary, gpu_types: GpuTypes = GPU_TYPES
) -> tuple[str, list[tuple[str, str, str]]] | None:
    """The nearest recipe's name, and (setting, run's value, recipe's value) where they differ.

    None for logs of other programs, and for runs without a recipe.
    """
    r = summary.record
    if not (dig(r.result, "config", {}) and r.gpu_type and r.gpus):
        return None
    try:
        recipe = _recipe(r.model, r.size, r.dtype, r.gpu_type, r.gpus, r.gbs, gpu_types)
    except UserError:
        return None
    if not recipe:
        return None
    settings, (name, in_recipe) = difference.settings_of(summary), recipe
    return name, [
        (key.removeprefix("run."), settings[key], in_recipe[key])
        for key in sorted(settings.keys() & in_recipe.keys())
        if settings[key] != in_recipe[key]
        and key.split(".")[1] in COMPARED
        and key.removeprefix("run.") not in NOT_COMPARED
    ]


def hosts(r: RunRecord) -> tuple[dict[str, str], str]:
    """The slowest hosts (name -> TFLOP/s of the slowest GPU, median step); a line on the rest."""
    by_speed = []
    for name, host in dig(r.result, "hosts", {}).items():
        speeds = [x for x in dig(host, "gemm_tflops", []) if isinstance(x, int | float)]
        by_speed.append((min(speeds, default=0.0), str(name), dig(host, "step_s", 0.0)))
    by_speed.sort()
    slow = dig(r.result, "slow_hosts", [])
    listed = {}
    for speed, name, step_s in by_speed[:HOSTS]:
        step = f", {step_s:.3f} s a step" if step_s else ""
        listed[f"{name} (slow)" if name in slow else name] = f"{speed:,.0f}{step}"
    rest = [speed for speed, _, _ in by_speed[HOSTS:]]
    return listed, f"{len(rest)} more, median {statistics.median(rest):,.0f}" if rest else ""


def timeline(r: RunRecord) -> list[str]:
    """Events of a run and their times, as phrases."""
    first = dig(r.result, "start_to_first_step_s", 0.0)
    events = _moment("started" if r.source == "maxbench" else "last written", r.started)
    events += [f"first step after {first:,.0f} s"] if first else []
    events += [f"last step {r.last}"] if r.last >= 0 else []
    events += [f"loaded a checkpoint in {statistics.fmean(r.loads):,.1f} s"] if r.loads else []
    if r.saves:
        events.append(f"saved {len(r.saves)} times, {statistics.fmean(r.saves):,.1f} s each")
    if r.eval_loss:
        step, loss = list(r.eval_loss.items())[-1]
        events.append(f"held-out loss {loss:.4f} after step {step}")
    if e := r.reached:
        way = f"{e.step + 1:,} steps, {e.tokens:,} tokens, {e.elapsed_s:,.1f} s"
        events.append(f"target loss {e.target:g} reached after {way}")
    return events + _moment("ended", dig(r.result, "ended", 0.0))


def _moment(event: str, seconds: float) -> list[str]:
    """The event with its date; [] if a damaged file has a number that cannot be a date."""
    if not 0 < seconds < 4e9:
        return []
    return [f"{event} {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(seconds))}"]


def time_parts(summary: RunSummary) -> dict[str, float]:
    """Seconds of a whole run by phase; {} if result.json does not have them."""
    r, names = summary.record, ("start_to_first_step_s", "compile_s", "lower_s")
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
