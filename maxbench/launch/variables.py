"""The variables of launch.sh, declared in variables.toml, and the Settings that they make.

settle() reads them from an environment; nothing else reads them.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence

from maxbench.hardware.gpus import GPUS
from maxbench.spec import cli, recipes
from maxbench.spec.errors import UserError, choose
from maxbench.spec.recipes import ROOT, Launch
from maxbench.spec.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
    """What is known of a variable."""

    meaning: str = ""
    default: str = ""  # '*' = found later
    also: tuple[str, ...] = ()  # other names that are understood
    kind: str = "text"  # choice | bool | gpu type, or a name of KINDS
    choices: tuple[str, ...] = ()
    least: int = 1
    unused: str = ""  # why it changes nothing here


_TABLE = tomllib.loads(pathlib.Path(__file__).with_name("variables.toml").read_text())
_ALL = {name: Variable(**values) for name, values in _TABLE.items()}
VARIABLES = {name: v for name, v in _ALL.items() if not v.unused}
UNUSED = {name: v.unused for name, v in _ALL.items() if v.unused}
BOOLS = {"true": "true", "1": "true", "yes": "true", "false": "false", "0": "false", "no": "false"}
KINDS = {  # what the whole text must match, and how a message says so
    "text": (r"(?s).*", "text"),
    "word": (r"[^\s;&|<>$`\"']*", "one word"),
    "time": (r"(\d+-)?\d{1,3}(:\d{2}){0,2}", "HH:MM:SS, as 00:30:00"),
    "count": (r"[0-9]+", "a whole number, at least {least}"),
    "ranks": (r"[0-9]+( *, *[0-9]+)*", "whole numbers, for example 0,1,2,3"),
    "gres": (r"0*[1-9][0-9]*", "a whole number, at least 1; none where the cluster has no gres"),
}
SECRETS = ("HF_TOKEN", "APP_SECRET")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for, checked."""

    values: dict[str, str]  # of VARIABLES, defaults filled in
    launch: Launch  # the workload's own defaults
    run: Run
    flags: tuple[str, ...]  # for maxbench.train
    nodes: int
    tasks_per_node: int
    out: pathlib.Path
    notes: tuple[str, ...] = ()

    def on(self, name: str) -> bool:
        """A boolean variable."""
        return self.values[name] == "true"

    def number(self, name: str) -> int:
        """An integer variable."""
        return int(self.values[name])


def settle(env: Mapping[str, str], extra: Sequence[str] = ()) -> Settings:
    """Checks the variables in env, and further flags for the trainer.

    Raises:
      UserError: a variable that cannot be, by name, with what is allowed.
    """
    _typos(env)
    values = {}
    for name, v in VARIABLES.items():
        given = (env.get(n, "").strip() for n in (name, *v.also))
        values[name] = next(filter(None, given), v.default)
    if values["HARDWARE"]:
        values["HARDWARE"] = os.path.abspath(values["HARDWARE"])
        cli.add_hardware(values["HARDWARE"])
    for name, v in VARIABLES.items():
        if values[name] not in ("", v.default):
            values[name] = _checked(name, values[name], v)
    path, notes = _workload(values)
    launch = Launch(**recipes.load(path).launch)
    per_node = _defaults(values, launch, env.get("SLURM_JOB_NUM_NODES", ""))
    out = pathlib.Path(values["RUN_CONF_RESULT_DIR"] or values["STAGE_PATH"] or ".").absolute()
    flags = [*_flags(values, path, out, extra), *extra]
    run = _run(flags)
    devices = run.layout.gpus
    if devices > per_node and devices % per_node:
        raise UserError(
            f"JOB_TOTAL_GPUS={devices} is not a whole number of nodes of GPUS_PER_NODE={per_node}; "
            f"nearest that works: {round(devices / per_node) * per_node}"
        )
    one = values["PROCESSES"] == "node" or int(values["CPU_DEVICES"])
    return Settings(
        values=values,
        launch=launch,
        run=run,
        flags=tuple(flags),
        nodes=max(1, devices // per_node),
        tasks_per_node=1 if one else min(per_node, devices),
        out=out,
        notes=(*(f"{n} is not used: {why}" for n, why in UNUSED.items() if env.get(n)), *notes),
    )


def _checked(name: str, text: str, v: Variable) -> str:
    """The text of a variable in the form that is used."""
    choices = {"bool": BOOLS, "gpu type": GPUS}.get(v.kind, v.choices)
    if choices:
        choose(name, text.lower(), choices)
        return BOOLS[text.lower()] if v.kind == "bool" else text.lower()
    if v.kind == "gres" and text.lower() in ("none", "null"):  # the original recipes say null
        return "none"
    pattern, must = KINDS[v.kind]
    if not re.fullmatch(pattern, text) or (v.kind == "count" and int(text) < v.least):
        raise UserError(f"{name}={text!r} must be {must.format(least=v.least)}")
    return text.replace(" ", "") if v.kind == "ranks" else text


def _typos(env: Mapping[str, str]) -> None:
    """Refuses a variable that is one slip of the finger away from one of ours."""
    known = {n for name, v in VARIABLES.items() for n in (name, *v.also)}
    shorter = lambda word: {word} | {word[:i] + word[i + 1 :] for i in range(len(word))}
    for name in sorted(env.keys() - known - {*SECRETS, *UNUSED}):
        close = (n for n in sorted(known) if len(n) >= 5 and abs(len(n) - len(name)) <= 1)
        if near := next((n for n in close if shorter(n) & shorter(name)), ""):
            raise UserError(f"{name} is set, which nothing reads; did you mean {near}?")


def _workload(values: dict[str, str]) -> tuple[pathlib.Path, list[str]]:
    """The file that MODEL and MODEL_SIZE name, and a note where more than one model has the size.

    Puts the model's name and size from the file in their place.
    """
    model, size, notes = values["MODEL"], values["MODEL_SIZE"].lower(), []
    if model.endswith(".py"):
        if not (path := pathlib.Path(os.path.abspath(model))).is_file():
            raise UserError(f"MODEL={model!r}: there is no such workload file")
        chosen = recipes.load(path).model
        if size != "*":
            choose(f"MODEL={model} MODEL_SIZE", size, [chosen.size])
        values |= {"MODEL": chosen.name, "MODEL_SIZE": chosen.size}
        return path, notes
    if size != "*":
        choose("MODEL_SIZE", size, recipes.sizes())
    model = recipes.model_names().get(model.lower(), model.lower())
    if model == "*":
        having = [m for m in recipes.models() if size in ("*", *recipes.sizes(m))]
        model = having[0]
        if size != "*" and len(having) > 1:
            notes.append(f"MODEL_SIZE={size} is taken as MODEL={model}; there is {having[1]} too")
    choose("MODEL", model, recipes.models())
    size = recipes.sizes(model)[0] if size == "*" else size
    choose(f"MODEL={model} MODEL_SIZE", size, recipes.sizes(model))
    values |= {"MODEL": model, "MODEL_SIZE": size}
    files = recipes.find(model, size)
    if len(files) > 1:
        both = " and ".join(f"configs/{path.name}" for path in files)
        raise UserError(f"MODEL={model} MODEL_SIZE={size} is {both}: give MODEL the path of one")
    return files[0], notes


def _defaults(values: dict[str, str], launch: Launch, nodes: str) -> int:
    """Fills in what depends on workload, GPU type and allocation; returns devices per node.

    nodes: of the allocation that `sbatch -N 8 launch.sh` has made, or ''.
    """
    strong = values["STRONG_SCALING"] == "true"
    own = {
        "DTYPE": launch.dtype,
        "TIME_LIMIT": (strong and launch.strong_time) or launch.time,
        "GPUS_PER_NODE": str(GPUS[values["GPU_TYPE"]].gpus_per_node),
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
    values: Mapping[str, str], path: pathlib.Path, out: pathlib.Path, extra: Sequence[str]
) -> list[str]:
    """What the variables say, as flags of the trainer."""
    presets = values["PRESET"].replace(" ", "")
    config = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    flags = ["--config", f"{config}:{presets}" if presets else str(config)]
    total = values["JOB_TOTAL_GPUS"]
    sizes_only = {"tiny", "proxy"} & set(presets.split(","))  # such a preset has no table row
    by_hand = any(re.match(r"--(pp|dp|fsdp|ep|cp|tp)\b", arg) for arg in extra)
    if total and not (sizes_only and by_hand):
        flags += ["--fsdp" if sizes_only else "--gpus", total]
    elif not total and not presets and not by_hand:
        raise UserError(_scales(path, values))
    flags += ["--hardware", values["HARDWARE"]] if values["HARDWARE"] else []
    flags += ["--gpu_type", values["GPU_TYPE"], "--dtype", values["DTYPE"]]
    flags += {"true": ["--tp_overlap"], "false": ["--notp_overlap"]}.get(
        values["TP_COMM_OVERLAP"], []
    )
    flags += ["--strong_scaling"] if values["STRONG_SCALING"] == "true" else []
    flags += ["--gbs", values["GBS"]] if values["GBS"] else []
    flags += ["--cpu_devices", n] if (n := values["CPU_DEVICES"]) != "0" else []
    flags += ["--steps", values["MAX_STEPS"], "--output_dir", str(out)]
    if loaded := values["LOAD_CHECKPOINT_PATH"]:
        flags += ["--resume", loaded, "--steps", str(_checkpoint_step(loaded) + 1)]
    every = values["CHECKPOINT_EVERY"]
    flags += ["--checkpoint"] if values["ENABLE_CHECKPOINT"] == "true" or every != "0" else []
    return flags + ([f"--config.output.checkpoint_every={every}"] if every != "0" else [])


def _run(flags: Sequence[str]) -> Run:
    """The Run of flags of the trainer, from any folder; an error in the words of launch.sh."""
    try:
        return cli.run_of([flags[0], str(ROOT / flags[1]), *flags[2:]])
    except UserError as e:
        message = re.sub(r"^gpus=", "JOB_TOTAL_GPUS=", str(e))
        message = re.sub(r"--gpus (\d+)", r"JOB_TOTAL_GPUS=\1", message)
        message = re.sub(r"--fsdp (\d+)", r"launch.sh -- --fsdp \1", message)
        message = re.sub("^(dtype|gpu_type|preset|gbs)=", lambda m: m[0].upper(), message)
        raise UserError(re.sub(r"^steps=", "MAX_STEPS=", message)) from None


def _scales(path: pathlib.Path, values: Mapping[str, str]) -> str:
    """What JOB_TOTAL_GPUS may be, for a message."""
    rows = recipes.table(recipes.load(path).layouts)
    fits = {"gpu_type": GPUS[values["GPU_TYPE"]].recipes, "dtype": values["DTYPE"]}
    fits["scaling"] = "strong" if values["STRONG_SCALING"] == "true" else "weak"
    scales = {r["gpus"] for r in rows if all(r[k] == v for k, v in fits.items())}
    name = f"{values['MODEL']} {values['MODEL_SIZE']} {values['DTYPE']} on {values['GPU_TYPE']}"
    allowed = ", ".join(map(str, sorted(scales))) or "none on this GPU type"
    return f"JOB_TOTAL_GPUS is not set; {name} has recipes for: {allowed}"


def _checkpoint_step(path: str) -> int:
    """The step of the newest complete checkpoint at or below path.

    Raises:
      UserError: there is none.
    """
    steps = []
    for place in ("run.json", "*/run.json", "checkpoints/*/run.json"):
        for file in pathlib.Path(path).glob(place):
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                steps.append(int(json.loads(file.read_text())["step"]))
    if not steps:
        raise UserError(
            f"LOAD_CHECKPOINT_PATH={path!r} holds no complete checkpoint; give a run's folder, "
            "its checkpoints/ or one step of it"
        )
    return max(steps)
