"""The variables of launch.sh (variables.toml), and the JobConfig that they determine.

resolve_job() reads them from an environment; no other code does.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from maxbench.config import command_line, flag_words, layout_table, options, recipes
from maxbench.config.errors import UserError, check_choice
from maxbench.config.recipes import CONFIGS, ROOT, Launch
from maxbench.config.run import Run
from maxbench.hardware.gpus import GPU_TYPES, Gpu, GpuTypes
from maxbench.run_logs.suite_file import Expectation


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvVar:
    """A variable."""

    meaning: str = ""
    default: str = ""  # '*' = by workload, GPU type or allocation
    also: tuple[str, ...] = ()  # aliases
    kind: str = "text"  # choice | bool | gpu type, or a name of KINDS
    choices: tuple[str, ...] = ()
    least: int = 1
    option: str = ""  # of maxbench train, with the same value: its kind, choices and meaning
    unused: str = ""  # why it has no effect
    refused: str = ""  # why it is refused, and the alternative


_OPTIONS = {field.name: field for field in dataclasses.fields(options.TrainOptions)}


def _variable(values: dict[str, Any]) -> EnvVar:
    """A variable of variables.toml; one that names an option takes from it what the file omits."""
    if option := _OPTIONS.get(values.get("option", "")):
        about, kind = option.metadata, options.type_of(option)
        choices = tuple(filter(None, about.get("options", ())))
        derived: dict[str, Any] = {"choices": choices, "least": about.get("at_least", 1)}
        derived["kind"] = {int: "count", bool: "bool"}.get(kind, "choice" if choices else "text")
        meaning = [about["text"].partition(" (default:")[0], values.get("meaning")]
        values = derived | values | {"meaning": "; ".join(filter(None, meaning))}
    return EnvVar(**values)


_TABLE = tomllib.loads(pathlib.Path(__file__).with_name("variables.toml").read_text())
_ALL = {name: _variable(values) for name, values in _TABLE.items()}
VARIABLES = {name: v for name, v in _ALL.items() if not (v.unused or v.refused)}
OPTIONS = {name: v.option for name, v in VARIABLES.items() if v.option}
UNUSED = {name: v.unused for name, v in _ALL.items() if v.unused}
REFUSED = {name: v.refused for name, v in _ALL.items() if v.refused}
BOOLS = {"true": "true", "1": "true", "yes": "true", "false": "false", "0": "false", "no": "false"}
KINDS = {  # a pattern that the value must match, and its description in messages
    "text": (r"(?s).*", "text"),
    "word": (r"[^\s;&|<>$`\"'\\]*", "one word"),
    # Slurm substitutes %, and container mounts are separated by , and :
    "path": (r"[\w /.+=@~-]*", "a path of letters, digits, spaces and / . _ + = @ ~ -"),
    "time": (r"([0-9]+-)?[0-9]{1,3}(:[0-9]{2}){0,2}", "HH:MM:SS, as 00:30:00"),
    "count": (r"[0-9]{1,9}", "a whole number, at least {least}"),
    "ranks": (r"[0-9]+( *, *[0-9]+)*", "whole numbers, for example 0,1,2,3"),
    "label": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "lower-case letters, digits, - and ."),
    "hosts": (r"[\w@.,:%\[\] -]*", "hosts, as 'node1 node2' or node[1-8]"),
    "gres": (r"0*[1-9][0-9]*", "a whole number, at least 1; none where the cluster has no gres"),
}
SECRETS = ("HF_TOKEN", "APP_SECRET")
MANY = ("MODEL_SIZE", "DTYPE", "JOB_TOTAL_GPUS")  # may be lists separated by spaces
GPUS = "JOB_TOTAL_GPUS"
# With GPUS they select the row of the recipe, and the devices.
ROW = ("DTYPE", "HARDWARE", "GPU_TYPE", "STRONG_SCALING", "CPU_DEVICES")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A run on a cluster, as its variables determine it."""

    values: dict[str, str]  # of all VARIABLES, with defaults
    launch: Launch  # defaults of the workload
    run: Run
    flags: tuple[str, ...]  # for maxbench.train
    nodes: int
    tasks_per_node: int
    out: pathlib.Path
    notes: tuple[str, ...] = ()
    expect: Expectation | None = None  # of a suite

    def describe(self) -> str:
        """'8 devices, dp 4 x cp 2, mbs 2, gbs 128 (16 microbatches); 1 node'."""
        return f"{self.run.layout.describe()}; {self.nodes} node{'s' * (self.nodes > 1)}"

    def on(self, name: str) -> bool:
        """Value of a boolean variable."""
        return self.values[name] == "true"

    def number(self, name: str) -> int:
        """Value of an integer variable."""
        return int(self.values[name])


def resolve_job(env: Mapping[str, str], extra: Sequence[str] = ()) -> JobConfig:
    """Checks the variables in env and further flags of the trainer.

    Raises:
      UserError: a variable is invalid; the message has its name and what is allowed.
    """
    notes = _check_other_variables(env)
    values = {name: _value(env, name, v) for name, v in VARIABLES.items()}
    if values["HARDWARE"]:
        values["HARDWARE"] = os.path.abspath(values["HARDWARE"])
    gpu_types = command_line.gpu_types(values["HARDWARE"])
    for name, v in VARIABLES.items():
        if values[name] not in ("", v.default):
            values[name] = checked(name, values[name], v, gpu_types)
    for word in extra:
        check_printable("a word after --", word)
    path = _workload(values, notes, gpu_types)
    config, gpu = recipes.load(path, gpu_types=gpu_types), gpu_types[values["GPU_TYPE"]]
    launch = Launch(**config.launch)
    launch = dataclasses.replace(launch, dtype=_dtype(values, config.known) or launch.dtype)
    per_node = _defaults(values, launch, gpu, env.get("SLURM_JOB_NUM_NODES", ""))
    out = pathlib.Path(values["RUN_CONF_RESULT_DIR"] or values["STAGE_PATH"] or ".").absolute()
    for name, folder in {"STAGE_PATH": out, "MAXBENCH_ROOT": ROOT}.items():
        checked(name, str(folder), EnvVar(kind="path"))
    flags = _flags(values, path, config.layouts, out, extra, gpu)
    given = {v.option for n, v in VARIABLES.items() if any(env.get(x) for x in (n, *v.also))}
    flags = [*flag_words.without(flags, flag_words.names(extra) - given), *extra]
    run = _run(flags)
    if not re.fullmatch(r"[A-Za-z0-9._+-]+", run.name):  # names a folder and a job
        raise UserError(
            f"model.name and model.size make {run.name!r}, the name of the run; use letters, "
            "digits and . _ + -"
        )
    devices = run.layout.gpus
    if devices > per_node and devices % per_node:
        raise UserError(
            f"JOB_TOTAL_GPUS={devices} is not a whole number of nodes of GPUS_PER_NODE={per_node}; "
            f"nearest that works: {round(devices / per_node) * per_node}"
        )
    one_process = values["PROCESSES"] == "node" or int(values["CPU_DEVICES"])
    return JobConfig(
        values=values,
        launch=launch,
        run=run,
        flags=tuple(flags),
        nodes=max(1, devices // per_node),
        tasks_per_node=1 if one_process else min(per_node, devices),
        out=out,
        notes=tuple(notes),
    )


def _value(env: Mapping[str, str], name: str, v: EnvVar) -> str:
    """Value of a variable, under the first of its names that is set, or its default."""
    for n in (name, *v.also):
        if text := check_printable(n, env.get(n, "")).strip(" "):
            return env[n] if v.kind == "path" else text
    return v.default


def check_printable(name: str, text: str) -> str:
    """Returns the text, if it can be part of a line of a script.

    Raises:
      UserError: it has a line break or another control character.
    """
    if not text.isprintable():
        raise UserError(f"{name}={text!r} has a line break or a control character; remove it")
    return text


def checked(name: str, text: str, v: EnvVar, gpu_types: GpuTypes = GPU_TYPES) -> str:
    """A variable's value in its normal form.

    Raises:
      UserError: the value is invalid.
    """
    choices = {"bool": BOOLS, "gpu type": gpu_types}.get(v.kind, v.choices)
    if choices:
        check_choice(name, text.lower(), choices)
        return BOOLS[text.lower()] if v.kind == "bool" else text.lower()
    if v.kind == "gres" and text.lower() in ("none", "null"):  # NVIDIA's recipes use null
        return "none"
    pattern, must = KINDS[v.kind]
    if not re.fullmatch(pattern, text) or (v.kind == "count" and int(text) < v.least):
        raise UserError(f"{name}={text!r} must be {must.format(least=v.least)}")
    return text.replace(" ", "") if v.kind == "ranks" else text


def _check_other_variables(env: Mapping[str, str]) -> list[str]:
    """Notes on variables without effect.

    Raises:
      UserError: a variable of NVIDIA's recipes that is refused, or a name of several words that is
        one typing error away from a variable. A single word may belong to another program.
    """
    if name := next((n for n in REFUSED if env.get(n, "0") not in ("", "0", "false")), ""):
        raise UserError(f"{name}={env[name]!r} is refused: {REFUSED[name]}")
    notes = [f"{n} is not used: {why}" for n, why in UNUSED.items() if env.get(n)]
    known = {n for name, v in VARIABLES.items() for n in (name, *v.also)}
    deletions = lambda word: {word} | {word[:i] + word[i + 1 :] for i in range(len(word))}
    for name in sorted(env.keys() - known - {*SECRETS, *UNUSED, *REFUSED}):
        close = (n for n in sorted(known) if len(n) >= 5 and abs(len(n) - len(name)) <= 1)
        if near := next((n for n in close if deletions(n) & deletions(name)), ""):
            message = f"{name} is not a variable of launch.sh; did you mean {near}?"
            if "_" in near:
                raise UserError(message)
            notes.append(message)
    return notes


def _workload(values: dict[str, str], notes: list[str], gpu_types: GpuTypes) -> pathlib.Path:
    """The workload file that MODEL and MODEL_SIZE name; adds a note if they are ambiguous.

    Sets MODEL and MODEL_SIZE to the name and size in the file.
    """
    model, size = values["MODEL"], values["MODEL_SIZE"].lower()
    if model.endswith(".py"):
        if not (path := pathlib.Path(os.path.abspath(model))).is_file():
            raise UserError(f"MODEL={model!r} is not a file")
        chosen = recipes.load(path, gpu_types=gpu_types).model
        if size != "*":
            check_choice(f"MODEL={model} MODEL_SIZE", size, [chosen.size])
        values |= {"MODEL": chosen.name, "MODEL_SIZE": chosen.size}
        return path
    if size != "*":
        check_choice("MODEL_SIZE", size, recipes.sizes())
    model = recipes.model_names().get(model.lower(), model.lower())
    if model == "*":
        having = [m for m in recipes.models() if size in ("*", *recipes.sizes(m))]
        gpu = gpu_types[values["GPU_TYPE"]]
        sizes = {m: recipes.sizes(m)[0] if size == "*" else size for m in having}
        with_recipe = [m for m in having if _rows(m, sizes[m], values, gpu)]
        model = with_recipe[0] if with_recipe else having[0]
        if model != having[0]:
            scale = f"{values['JOB_TOTAL_GPUS']} {values['GPU_TYPE']}"
            which = "the only one" if len(with_recipe) == 1 else "the first one"
            notes.append(f"MODEL={model}, {which} with a recipe for {scale}")
        elif size != "*" and len(having) > 1:
            notes.append(f"MODEL_SIZE={size} means MODEL={model}; {having[1]} has this size too")
    check_choice("MODEL", model, recipes.models())
    size = recipes.sizes(model)[0] if size == "*" else size
    check_choice(f"MODEL={model} MODEL_SIZE", size, recipes.sizes(model))
    values |= {"MODEL": model, "MODEL_SIZE": size}
    files = recipes.find_workloads(model, size)
    if len(files) > 1:
        both = " and ".join(f"configs/{path.name}" for path in files)
        raise UserError(
            f"MODEL={model} MODEL_SIZE={size} matches {both}: set MODEL to the path of one"
        )
    return files[0]


def _rows(model: str, size: str, values: Mapping[str, str], gpu: Gpu) -> bool:
    """Whether a workload has a recipe for JOB_TOTAL_GPUS of GPU_TYPE."""
    tables = (recipes.workloads()[path].layouts for path in recipes.find_workloads(model, size))
    wanted = {"gpus": values["JOB_TOTAL_GPUS"], "gpu_type": gpu.recipes}
    wanted["scaling"] = "strong" if values["STRONG_SCALING"] == "true" else "weak"
    rows = (row for table in tables for row in layout_table.table(table))
    return any(all(str(row[k]) == v for k, v in wanted.items()) for row in rows)


def _dtype(values: Mapping[str, str], presets: Mapping[str, Mapping]) -> str:
    """The dtype that presets set, or ''.

    Raises:
      UserError: two presets, or a preset and DTYPE, set different ones.
    """
    found = {"DTYPE": values["DTYPE"]} if values["DTYPE"] != "*" else {}
    for name in values["PRESET"].replace(" ", "").split(","):
        if dtype := presets.get(name, {}).get("precision", {}).get("dtype"):
            found[f"PRESET={name}"] = dtype
    if len({*found.values()}) > 1:
        both = " and ".join(f"{name} sets {dtype}" for name, dtype in found.items())
        raise UserError(f"{both}: they contradict each other; leave all but one out")
    return next(iter(found.values()), "")


def _defaults(values: dict[str, str], launch: Launch, gpu: Gpu, nodes: str) -> int:
    """Sets defaults that depend on workload, GPU type and allocation; returns devices per node.

    nodes: of the allocation, if sbatch started launch.sh itself (`sbatch -N 8 launch.sh`), or ''.
    """
    strong = values["STRONG_SCALING"] == "true"
    own = {
        "DTYPE": launch.dtype,
        "TIME_LIMIT": (strong and launch.strong_time) or launch.time,
        "GPUS_PER_NODE": str(gpu.gpus_per_node),
        "PROFILE_START_STEP": str(launch.profile[0]),
        "PROFILE_STOP_STEP": str(launch.profile[1]),
    }
    values |= {name: default for name, default in own.items() if values[name] == "*"}
    start, stop = int(values["PROFILE_START_STEP"]), int(values["PROFILE_STOP_STEP"])
    if start >= stop:
        raise UserError(f"PROFILE_START_STEP={start} must be below PROFILE_STOP_STEP={stop}")
    per_node = int(values["CPU_DEVICES"]) or int(values["GPUS_PER_NODE"])
    if values["JOB_TOTAL_GPUS"] == "*":
        usual = "" if values["PRESET"] else str(launch.gpus or "")
        values["JOB_TOTAL_GPUS"] = str(int(nodes) * per_node) if nodes else usual
    return per_node


def _flags(
    values: Mapping[str, str],
    path: pathlib.Path,
    layouts: str,
    out: pathlib.Path,
    extra: Sequence[str],
    gpu: Gpu,
) -> list[str]:
    """The variables as flags of the trainer."""
    presets = values["PRESET"].replace(" ", "")
    config = path.stem if path.parent == CONFIGS else path
    flags = ["--config", f"{config}:{presets}" if presets else str(config)]
    total = values["JOB_TOTAL_GPUS"]
    # Presets that have no row in the recipe's table.
    sizes_only = {"tiny", "proxy"} & set(presets.split(","))
    by_hand = any(re.match(r"--(pp|dp|fsdp|ep|cp|tp)\b", arg) for arg in extra)
    if total and not (sizes_only and by_hand):
        flags += ["--fsdp" if sizes_only else "--gpus", total]
    elif not total and not presets and not by_hand:
        raise UserError(_scales(layouts, values, gpu))
    row = _option_words(values, [name for name in OPTIONS if name in ROW])
    flags += row
    flags = flag_words.replaced(flags, *_fill_data_axes(values, flags))
    flags += _option_words(values, [name for name in OPTIONS if name not in (*ROW, GPUS)])
    flags += ["--output_dir", str(out)]
    if loaded := values["LOAD_CHECKPOINT_PATH"]:
        flags = flag_words.replaced(flags, "--steps", str(_checkpoint_step(loaded) + 1))
    if (every := values["CHECKPOINT_EVERY"]) != "0":
        flags += ["--checkpoint", f"--config.output.checkpoint_every={every}"]
    return flags


def _option_words(values: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Variables that stand for an option, as its flags; those that are unset or off have none."""
    words = []
    for name in names:
        value, v = values[name], VARIABLES[name]
        if v.kind == "bool" and value not in ("", v.default):
            words += [f"--{v.option}" if value == "true" else f"--no{v.option}"]
        elif v.kind != "bool" and value not in ("", "0"):
            words += [f"--{v.option}", value]
    return words


def _fill_data_axes(values: Mapping[str, str], flags: Sequence[str]) -> list[str]:
    """dp, fsdp and vp if TP, PP, CP or EP change the recipe's row, for the same number of GPUs."""
    given = {n.lower(): int(values[n]) for n in ("TP", "PP", "CP", "EP") if values[n]}
    if not given:
        return []
    layout = _run(flags).layout
    axes = {n: given.get(n, getattr(layout, n)) for n in ("tp", "pp", "cp", "ep")}
    data, left = divmod(layout.gpus, math.prod(axes.values()))
    if left or not data:
        sizes = " x ".join(map(str, axes.values()))
        raise UserError(
            f"JOB_TOTAL_GPUS={layout.gpus} is not a multiple of TP x PP x CP x EP = {sizes}"
        )
    fsdp = math.gcd(layout.fsdp, data)
    vp = ["--vp", "1"] if axes["pp"] == 1 and not values["VP"] else []
    return ["--dp", str(data // fsdp), "--fsdp", str(fsdp), *vp]


def _run(flags: Sequence[str]) -> Run:
    """The Run of flags of the trainer; errors name variables instead of flags."""
    try:
        return command_line.run_of(flags)
    except UserError as e:
        message = re.sub(r"(?<!plan )--gpus (\d+)", rf"{GPUS}=\1", str(e))
        message = re.sub(r"axes, (--fsdp)", r"axes, launch.sh -- \1", message)
        ours = {option: name for name, option in OPTIONS.items()} | {"preset": "PRESET"}
        if twice := re.match(r"--(\w+)(?==\S* and --\1=)", message):
            message = ours.get(twice[1], twice[0]) + message[twice.end() :]
            raise UserError(message) from None
        ours |= {options.FLAGS.get(option, option): name for option, name in ours.items()}
        name, _, rest = message.partition("=")
        raise UserError(f"{ours.get(name, name)}={rest}" if rest else message) from None


def _scales(layouts: str, values: Mapping[str, str], gpu: Gpu) -> str:
    """Message about allowed values of JOB_TOTAL_GPUS."""
    rows = layout_table.table(layouts)
    fits = {"gpu_type": gpu.recipes, "dtype": values["DTYPE"]}
    fits["scaling"] = "strong" if values["STRONG_SCALING"] == "true" else "weak"
    scales = {r["gpus"] for r in rows if all(r[k] == v for k, v in fits.items())}
    name = f"{values['MODEL']} {values['MODEL_SIZE']} {values['DTYPE']} on {values['GPU_TYPE']}"
    allowed = ", ".join(map(str, sorted(scales))) or "none on this GPU type"
    return f"JOB_TOTAL_GPUS is not set; {name} has recipes for: {allowed}"


def _checkpoint_step(path: str) -> int:
    """Step of the newest complete checkpoint at or below path.

    Raises:
      UserError: there is no complete checkpoint.
    """
    steps = []
    for place in ("about/run.json", "[0-9]*/about/run.json", "checkpoints/[0-9]*/about/run.json"):
        for file in pathlib.Path(path).glob(place):
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                steps.append(int(json.loads(file.read_text())["step"]))
    if not steps:
        raise UserError(
            f"LOAD_CHECKPOINT_PATH={path!r} has no complete checkpoint; give the folder of a run, "
            "its checkpoints/ or one step in it"
        )
    return max(steps)
