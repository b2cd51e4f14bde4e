"""The variables of launch.sh: every one of NVIDIA's recipes under its own names, checked.

settle() reads them from an environment and returns Settings; nothing else reads them.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

from maxbench.hardware.gpus import GPUS
from maxbench.spec import cli, recipes
from maxbench.spec.errors import UserError, choose
from maxbench.spec.run import Run

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Defaults that a workload's recipe has: they differ between workloads."""

    sizes: tuple[str, ...]
    dtype: str
    gpus: str = ""  # '' = must be given
    time: str = "01:00:00"
    profile: tuple[int, int] = (20, 30)  # first step profiled, first one not profiled any more
    stops: bool = True  # a profiled job ends where its profile does


FAMILIES = {
    "llama31": Family(
        sizes=("8b", "70b", "405b"), dtype="bf16", gpus="8", time="00:30:00", profile=(20, 25)
    ),
    "llama2": Family(sizes=("70b",), dtype="fp8", profile=(10, 15)),
    "nemotron4": Family(
        sizes=("340b",), dtype="fp8", time="00:25:00", profile=(45, 50), stops=False
    ),
    "grok1": Family(sizes=("314b",), dtype="fp8", stops=False),
}
ALIASES = {"llama3.1": "llama31", "llama3": "llama31", "nemotron": "nemotron4", "grok": "grok1"}
SIZES = tuple(dict.fromkeys(s for f in FAMILIES.values() for s in f.sizes))
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

# Name -> (default, meaning, other names). A default '*' depends on the workload.
VARIABLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "MODEL": ("*", "llama31 | llama2 | nemotron4 | grok1; default: by MODEL_SIZE", ()),
    "MODEL_SIZE": ("*", "8b | 70b | 405b | 340b | 314b", ()),
    "DTYPE": ("*", "fp8 | bf16 | fp32", ()),
    "PRESET": ("", "tiny | proxy | rehearse | xai: presets of the workload file", ()),
    "JOB_TOTAL_GPUS": ("*", "GPUs of the job; picks the recipe's row", ("SBATCH_GPUS",)),
    "GPU_TYPE": ("h100", "h100 | h200 | b200 | gb200 | gb300", ()),
    "GPUS_PER_NODE": ("*", "8; 4 for gb200, gb300", ("RUN_CONF_GPU_PER_NODE",)),
    "CPU_DEVICES": ("0", "virtual CPU devices per node instead of GPUs", ()),
    "PROCESSES": ("gpu", "gpu | node: one process per GPU, or per node", ()),
    "STRONG_SCALING": ("false", "rows whose global batch stays constant", ()),
    "GBS": ("", "sequences per step, instead of the recipe's", ()),
    "MAX_STEPS": ("50", "steps to train", ("RUN_CONF_MAX_STEPS",)),
    "TIME_LIMIT": ("*", "HH:MM:SS", ()),
    "CLUSTER_TYPE": ("slurm", "slurm | runai", ()),
    "STAGE_PATH": ("", "results and environment go here", ("LLMB_WORKLOAD", "LLMB_INSTALL")),
    "RUN_CONF_RESULT_DIR": ("", "results go here, instead of STAGE_PATH", ()),
    "SBATCH_ACCOUNT": ("", "Slurm account", ("SLURM_ACCOUNT",)),
    "SBATCH_PARTITION": ("", "Slurm partition", ("SLURM_PARTITION",)),
    "SBATCH_GPUS_PER_NODE": ("none", "GPUs per node by gres, or none", ("SLURM_GPUS_PER_NODE",)),
    "ADDITIONAL_SLURM_PARAMS": ("", "'key=value;key' for sbatch", ()),
    "EXCLUDE_NODES": ("", "nodes to leave out, as the straggler report prints them", ()),
    "DISABLE_PERFRUN": ("false", "only the profile and trace jobs", ()),
    "ENABLE_PROFILE": ("false", "a further job under Nsight Systems", ()),
    "PROFILER": ("nsys", "nsys | xplane (needs no nsys)", ()),
    "PROFILE_START_STEP": ("*", "first step profiled", ("RUN_CONF_PROFILE_START_STEP",)),
    "PROFILE_STOP_STEP": ("*", "where profiling ends", ("RUN_CONF_PROFILE_STOP_STEP",)),
    "RUN_CONF_PROFILE_RANKS": ("0,1,2,3,4,5,6,7", "processes to profile", ()),
    "ENABLE_GPU_METRICS": ("false", "profile GPU metrics", ("RUN_CONF_PROFILE_GPU_METRICS",)),
    "RUN_CONF_PROFILE_CPU": ("false", "CPU samples in the profile", ()),
    "ENABLE_NCCL_TRACE": ("false", "a further job that logs NCCL's calls", ("ENABLE_NCCLTRACE",)),
    "ENABLE_CHECKPOINT": ("false", "save a checkpoint at the end", ()),
    "CHECKPOINT_EVERY": ("0", "and every so many steps; the job is requeueable", ()),
    "LOAD_CHECKPOINT_PATH": ("", "checkpoint to load; then one step is trained", ()),
    "TP_COMM_OVERLAP": ("", "true | false: tensor-parallel communication beside kernels", ()),
    "ALLOW_TCP": ("false", "go on when NCCL falls back to TCP", ()),
    "DISABLE_PREFLIGHT": ("false", "no look at the nodes before step 0", ()),
    "ENABLE_VBOOST": ("false", "raise the GPUs' vboost slider before the run (needs sudo)", ()),
    "DISABLE_PINNING": ("false", "do not bind processes to NUMA nodes", ()),
    "RUN_CONF_IMAGE": ("", "container image (.sqsh for Slurm, a registry's name for Run:ai)", ()),
    "RUN_CONF_MOUNTS": (
        "",
        "src:dst,... ; Run:ai: name:path:claim,...",
        ("RUN_CONF_EXTRA_MOUNTS",),
    ),
    "SLURM_MPI_TYPE": ("none", "srun --mpi", ()),
    "BASE_URL": ("", "Run:ai API, https://.../api/v1", ()),
    "APP_ID": ("", "Run:ai application", ()),
    "APP_SECRET": ("", "its secret; never printed or stored", ()),
    "PROJECT_NAME": ("", "Run:ai project", ()),
    "PVC_DIR": ("", "folder for results in the mounted claim", ()),
    "OPTIMIZATION_NAME": ("", "a label kept with the result", ()),
}
SECRETS = ("HF_TOKEN", "APP_SECRET")
BOOLEAN = [n for n, (x, text, _) in VARIABLES.items() if x == "false" or "true | false" in text]
# Variables of the original recipes that change nothing here, and why; a note says so.
UNUSED = {
    "CUDA_GRAPH": "XLA's command buffers follow GPU_TYPE",
    "OPTIMIZATION_CODE": "no variable is run as code; flags of the trainer stand after --",
    "CPU_PER_TASK_PINNING": "processes are bound to NUMA nodes unless DISABLE_PINNING=true",
    "DISABLE_SMT": "processes are bound to NUMA nodes unless DISABLE_PINNING=true",
    "SRUN_OUTPUT": "logs lie in the run's folder",
    "SRUN_ERROR": "logs lie in the run's folder",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for, checked."""

    values: dict[str, str]  # of VARIABLES, defaults filled in
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

    @property
    def family(self) -> Family:
        return FAMILIES[self.values["MODEL"]]


def settle(env: Mapping[str, str], extra: Sequence[str] = ()) -> Settings:
    """Checks the variables in env, and further flags for the trainer.

    Raises:
      UserError: a variable that cannot be, by name, with what is allowed.
    """
    _typos(env)
    values = {name: _read(env, name) for name in VARIABLES}
    notes = [f"{n} is not used: {why}" for n, why in UNUSED.items() if env.get(n)]
    notes += _workload(values)
    _numbers(values)
    _choices(values)
    _slurm(values)
    stage = pathlib.Path(values["RUN_CONF_RESULT_DIR"] or values["STAGE_PATH"] or ".").absolute()
    flags_, run = _resolve(values, stage, list(extra))
    per_node = int(values["CPU_DEVICES"]) or int(values["GPUS_PER_NODE"])
    devices = run.layout.gpus
    if devices > per_node and devices % per_node:
        raise UserError(
            f"JOB_TOTAL_GPUS={devices} is not a whole number of nodes of GPUS_PER_NODE={per_node}; "
            f"nearest that works: {round(devices / per_node) * per_node}"
        )
    nodes = max(1, devices // per_node)
    one = values["PROCESSES"] == "node" or int(values["CPU_DEVICES"])
    return Settings(
        values=values,
        run=run,
        flags=tuple(flags_),
        nodes=nodes,
        tasks_per_node=1 if one else min(per_node, devices),
        out=stage,
        notes=tuple(notes),
    )


def _read(env: Mapping[str, str], name: str) -> str:
    default, _, others = VARIABLES[name]
    given = [env[n].strip() for n in (name, *others) if env.get(n, "").strip()]
    if name == "JOB_TOTAL_GPUS" and not given and (nodes := env.get("SLURM_JOB_NUM_NODES")):
        return f"nodes:{nodes}"  # sbatch -N 8 launch.sh: the allocation says it
    value = given[0] if given else default
    if name in BOOLEAN and value:
        choose(name, value.lower(), BOOLS)
        return "true" if BOOLS[value.lower()] else "false"
    return value


def _typos(env: Mapping[str, str]) -> None:
    """Refuses a variable that is one slip of the finger away from one of ours."""
    known = {n for name, (_, _, others) in VARIABLES.items() for n in (name, *others)}
    for name in sorted(env.keys() - known - {*SECRETS, *UNUSED}):
        close = (n for n in sorted(known) if len(n) >= 5 and abs(len(n) - len(name)) <= 1)
        if near := next((n for n in close if _without_one(n) & _without_one(name)), ""):
            raise UserError(f"{name} is set, which nothing reads; did you mean {near}?")


def _without_one(word: str) -> set[str]:
    """The word, and the word less one letter: what two share that differ by one slip."""
    return {word} | {word[:i] + word[i + 1 :] for i in range(len(word))}


def _workload(values: dict[str, str]) -> list[str]:
    """MODEL, MODEL_SIZE and what hangs on them."""
    notes: list[str] = []
    for name in ("MODEL", "MODEL_SIZE", "DTYPE", "GPU_TYPE", "CLUSTER_TYPE", "PROCESSES"):
        values[name] = values[name].lower()
    model, size = ALIASES.get(values["MODEL"], values["MODEL"]), values["MODEL_SIZE"]
    if size != "*":
        choose("MODEL_SIZE", size, SIZES)
    if model == "*":
        having = [m for m, f in FAMILIES.items() if size in ("*", *f.sizes)]
        model = having[0]
        if size != "*" and len(having) > 1:
            notes.append(f"MODEL_SIZE={size} is taken as MODEL={model}; there is {having[1]} too")
    choose("MODEL", model, FAMILIES)
    family = FAMILIES[model]
    size = family.sizes[0] if size == "*" else size
    choose(f"MODEL={model} MODEL_SIZE", size, family.sizes)
    values |= {"MODEL": model, "MODEL_SIZE": size}
    strong = values["STRONG_SCALING"] == "true" and model == "nemotron4"
    own = {"DTYPE": family.dtype, "TIME_LIMIT": "00:35:00" if strong else family.time}
    own["PROFILE_START_STEP"], own["PROFILE_STOP_STEP"] = map(str, family.profile)
    values |= {name: default for name, default in own.items() if values[name] == "*"}
    return notes


def _choices(values: dict[str, str]) -> None:
    choose("DTYPE", values["DTYPE"], ("fp8", "bf16", "fp32"))
    choose("CLUSTER_TYPE", values["CLUSTER_TYPE"], ("slurm", "runai"))
    choose("PROCESSES", values["PROCESSES"], ("gpu", "node"))
    choose("PROFILER", values["PROFILER"], ("nsys", "xplane"))
    if values["CLUSTER_TYPE"] == "runai":
        needed = ("RUN_CONF_IMAGE", "RUN_CONF_MOUNTS", "PROJECT_NAME", "PVC_DIR")
        lacking = [n for n in needed if not values[n]]
        if lacking:
            raise UserError(
                f"{lacking[0]} is not set, and CLUSTER_TYPE=runai needs {', '.join(needed)}: "
                f"{lacking[0]} is {VARIABLES[lacking[0]][1]}"
            )


def _numbers(values: dict[str, str]) -> None:
    choose("GPU_TYPE", values["GPU_TYPE"], GPUS)
    if values["GPUS_PER_NODE"] == "*":
        values["GPUS_PER_NODE"] = str(GPUS[values["GPU_TYPE"]].gpus_per_node)
    least = {"CPU_DEVICES": 0, "CHECKPOINT_EVERY": 0, "PROFILE_START_STEP": 0}
    counts = ("CPU_DEVICES", "GPUS_PER_NODE", "MAX_STEPS", "CHECKPOINT_EVERY")
    for name in (*counts, "PROFILE_START_STEP", "PROFILE_STOP_STEP"):
        _integer(name, values[name], least.get(name, 1))
    total = values["JOB_TOTAL_GPUS"]
    if total.startswith("nodes:"):
        per_node = int(values["CPU_DEVICES"]) or int(values["GPUS_PER_NODE"])
        values["JOB_TOTAL_GPUS"] = str(int(total.removeprefix("nodes:")) * per_node)
    elif total == "*":
        values["JOB_TOTAL_GPUS"] = "" if values["PRESET"] else FAMILIES[values["MODEL"]].gpus
    if values["JOB_TOTAL_GPUS"]:
        _integer("JOB_TOTAL_GPUS", values["JOB_TOTAL_GPUS"], 1)
    if values["GBS"]:
        _integer("GBS", values["GBS"], 1)
    start, stop = int(values["PROFILE_START_STEP"]), int(values["PROFILE_STOP_STEP"])
    if start >= stop:
        raise UserError(f"PROFILE_START_STEP={start} must be below PROFILE_STOP_STEP={stop}")
    ranks = [rank.strip() for rank in values["RUN_CONF_PROFILE_RANKS"].split(",")]
    for rank in ranks:
        _integer("RUN_CONF_PROFILE_RANKS", rank, 0, "; for example 0,1,2,3")
    values["RUN_CONF_PROFILE_RANKS"] = ",".join(ranks)


def _integer(name: str, text: str, least: int, hint: str = "") -> None:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
        raise UserError(f"{name}={text!r} must be a whole number, at least {least}{hint}")


def _slurm(values: dict[str, str]) -> None:
    gres = values["SBATCH_GPUS_PER_NODE"].lower()
    values["SBATCH_GPUS_PER_NODE"] = gres = "none" if gres == "null" else gres
    if gres != "none":
        _integer("SBATCH_GPUS_PER_NODE", gres, 1, "; none where the cluster has no gres")
    if not re.fullmatch(r"(\d+-)?\d{1,3}(:\d{2}){0,2}", values["TIME_LIMIT"]):
        raise UserError(f"TIME_LIMIT={values['TIME_LIMIT']!r} must be HH:MM:SS, as 00:30:00")
    additional(values["ADDITIONAL_SLURM_PARAMS"])
    for name in ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "EXCLUDE_NODES", "OPTIMIZATION_NAME"):
        if re.search(r"[\s;&|<>$`\"']", values[name]):
            raise UserError(f"{name}={values[name]!r} must be one word")


def additional(text: str) -> list[str]:
    """'nodelist=a,b;exclusive' -> ['--nodelist=a,b', '--exclusive'].

    Raises:
      UserError: a part that is no sbatch option.
    """
    options = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        key, is_set, value = part.partition("=")
        key = key.strip().lstrip("-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or re.search(r"[\s]", value.strip()):
            raise UserError(
                f"ADDITIONAL_SLURM_PARAMS: {part!r} is not key=value or key; "
                "for example 'nodelist=node001,node002;constraint=gpu'"
            )
        options.append(f"--{key}={value.strip()}" if is_set else f"--{key}")
    return options


def _resolve(
    values: Mapping[str, str], out: pathlib.Path, extra: list[str]
) -> tuple[list[str], Run]:
    """Flags of the trainer, and the Run that they make."""
    config = f"configs/{values['MODEL']}_{values['MODEL_SIZE']}.py"
    presets = values["PRESET"].replace(" ", "")
    given = ["--config", config + (f":{presets}" if presets else "")]
    total = values["JOB_TOTAL_GPUS"]
    sizes_only = {"tiny", "proxy"} & set(presets.split(","))  # such a preset has no table row
    by_hand = any(re.match(r"--(pp|dp|fsdp|ep|cp|tp)\b", arg) for arg in extra)
    if total and sizes_only and not by_hand:
        given += ["--fsdp", total]
    elif total and not sizes_only:
        given += ["--gpus", total]
    elif not total and not presets and not by_hand:
        raise UserError(_scales(config, values))
    given += ["--gpu_type", values["GPU_TYPE"], "--dtype", values["DTYPE"]]
    switches = {"true": ["--tp_overlap"], "false": ["--notp_overlap"], "": []}
    given += switches[values["TP_COMM_OVERLAP"]]
    given += ["--strong_scaling"] if values["STRONG_SCALING"] == "true" else []
    given += ["--gbs", values["GBS"]] if values["GBS"] else []
    given += ["--cpu_devices", n] if (n := values["CPU_DEVICES"]) != "0" else []
    given += ["--steps", values["MAX_STEPS"], "--output_dir", str(out)]
    if values["LOAD_CHECKPOINT_PATH"]:
        step = _checkpoint_step(values["LOAD_CHECKPOINT_PATH"])
        given += ["--resume", values["LOAD_CHECKPOINT_PATH"], "--steps", str(step + 1)]
    every = values["CHECKPOINT_EVERY"]
    saves = values["ENABLE_CHECKPOINT"] == "true" or every != "0"
    given += ["--checkpoint"] if saves else []
    given += [f"--config.output.checkpoint_every={every}"] if every != "0" else []
    given += extra
    try:
        return given, cli.run_of([given[0], str(ROOT / given[1]), *given[2:]])  # from any folder
    except ValueError as e:
        raise UserError(_in_variables(str(e))) from None


def _in_variables(message: str) -> str:
    """A message about the trainer's flags, in the words of launch.sh."""
    message = re.sub(r"^gpus=", "JOB_TOTAL_GPUS=", message)
    message = re.sub(r"--gpus (\d+)", r"JOB_TOTAL_GPUS=\1", message)
    message = re.sub(r"--fsdp (\d+)", r"launch.sh -- --fsdp \1", message)
    message = re.sub("^(dtype|gpu_type|preset|gbs)=", lambda m: m[0].upper(), message)
    return re.sub(r"^steps=", "MAX_STEPS=", message)


def _scales(config: str, values: Mapping[str, str]) -> str:
    """What JOB_TOTAL_GPUS may be, for a message."""
    scaling = "strong" if values["STRONG_SCALING"] == "true" else "weak"
    rows = recipes.table(recipes.load(ROOT / config).layouts)
    fits = {"gpu_type": values["GPU_TYPE"], "dtype": values["DTYPE"], "scaling": scaling}
    scales = [r["gpus"] for r in rows if all(r[k] == v for k, v in fits.items())]
    name = f"{values['MODEL']} {values['MODEL_SIZE']} {values['DTYPE']} on {values['GPU_TYPE']}"
    allowed = ", ".join(map(str, sorted(set(scales)))) or "none on this GPU type"
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
