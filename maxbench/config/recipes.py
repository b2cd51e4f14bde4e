"""From a workload file and flags to a Run: tables of layouts, presets, and the order of settings.

workloads() are the files in configs/, which an installation has as maxbench/configs: what launcher,
report and benchmarks know of a family, they know from there.

What is set later wins: the workload's numbers, what it does otherwise in FP8, the row of its table
(--gpus), presets, the shorthand flags (--tp, --mbs, ...), and last --config.section.field=value.
"""

import ast
import dataclasses
import difflib
import functools
import os
import pathlib
import runpy
import traceback
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from maxbench.config import renamed
from maxbench.config import run as c
from maxbench.config.errors import UserError, check_choice
from maxbench.config.number_formats import DTYPES
from maxbench.config.run import SECTIONS
from maxbench.config.validation import field, parse
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.hardware.published import rows as published_rows

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent  # of the checkout: configs/, launch/
CONFIGS = next(path / "configs" for path in (PACKAGE, ROOT) if (path / "configs").is_dir())
TOY_SIZES = {
    "model": dict(layers=4, embed=128, heads=8, kv_heads=4, head_dim=16, mlp=256, vocab=512),
    "train": dict(seq=64, steps=20),
}
PRESETS = {
    # the same structure, toy sizes: any laptop
    "tiny": TOY_SIZES | {"layout": {"mbs": 2}, "runtime": {"any_device": True}},
    # full widths, few layers: one GPU
    "proxy": {"model": {"layers": 4}, "runtime": {"any_device": True}},
    "fp8": {"precision": {"dtype": "fp8"}},
    "rehearse": TOY_SIZES,  # the row's layout, every axis at most 2, toy sizes, virtual CPU devices
}
LAYOUT_COLUMNS = (
    "gpus",
    "dtype",
    "scaling",
    "gpu_type",
    "layers",
    "seq",
    *c.AXES,
    "vp",
    "mbs",
    "gbs",
)
# Flags that describe a run, in groups: flag -> (the setting that it sets, or '', help text).
FLAG_GROUPS = {
    "workload": {
        "config": ("", f"workload or path of its file, with presets: NAME[:{','.join(PRESETS)}]"),
        "gpus": ("", "take the recipe's row for this many GPUs"),
        "gpu_type": ("layout.gpu_type", " | ".join(GPU_TYPES)),
        "dtype": ("precision.dtype", " | ".join(DTYPES)),
        "strong_scaling": ("", "take the recipe's rows with a constant global batch"),
        "seq": ("train.seq", "tokens per sequence"),
        "layers": ("model.layers", "layers of the model"),
        "hardware": ("", "TOML file of further GPU types, as maxbench/hardware/gpus.toml"),
    },
    "layout": {
        "pp": ("layout.pp", "pipeline stages"),
        "vp": ("layout.vp", "virtual stages per pipeline stage"),
        "dp": ("layout.dp", "data parallel with replicated weights, sharded optimizer (ZeRO-1)"),
        "fsdp": ("layout.fsdp", "data parallel with sharded weights (ZeRO-3)"),
        "ep": ("layout.ep", "expert parallel"),
        "cp": ("layout.cp", "context parallel"),
        "tp": ("layout.tp", "tensor parallel, with sequence parallelism"),
        "mbs": ("layout.mbs", "sequences per microbatch of a data-parallel shard"),
        "gbs": ("layout.gbs", "sequences per step over all GPUs"),
        "tp_overlap": (
            "runtime.tp_overlap",
            "overlap TP collectives with kernels (default; --notp_overlap)",
        ),
    },
    "run": {
        "steps": ("train.steps", "steps to train"),
        "output_dir": ("output.dir", "folder in which experiments/ is created"),
        "checkpoint": ("output.checkpoint", "save a checkpoint at the end"),
        "resume": ("output.resume", "checkpoint to start from: a run's folder, or one step of it"),
        "wandb": ("output.wandb", "send metrics to Weights & Biases"),
        "profile": (
            "profile.tool",
            "nsys | xplane | nccltrace: profile steps --config.profile.start to stop",
        ),
    },
    "devices and processes": {
        "cpu_devices": ("runtime.cpu_devices", "virtual CPU devices instead of GPUs"),
        "mock_gpus": (
            "runtime.mock_gpus",
            "run one GPU's share of a step on this many GPUs, without the network",
        ),
        "coordinator": ("runtime.coordinator", "host:port of process 0 (default: by Slurm)"),
        "processes": ("runtime.processes", "number of processes"),
        "process": ("runtime.process", "index of this process, from 0"),
    },
}
FLAGS = {name: path for group in FLAG_GROUPS.values() for name, (path, _) in group.items() if path}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What launch.sh takes for a workload where its variables say nothing."""

    rank: int = 99  # of those that MODEL and MODEL_SIZE leave, the lowest is taken
    aliases: tuple[str, ...] = ()  # other names of the model in MODEL and in logs, small letters
    dtype: str = "bf16"
    gpus: int = field(0, at_least=0)  # 0 = must be given
    time: str = "01:00:00"
    strong_time: str = ""  # of rows with constant global batch; '' = time
    profile: tuple[int, int] = (20, 30)  # first step profiled, first one not profiled any more
    stops: bool = True  # a profiled job ends where its profile does


def workload(
    presets: str | None,
    *,
    model: Mapping,
    train: Mapping,
    optim: Mapping,
    layouts: str,
    variants: Mapping[str, Mapping] | None = None,
    fp8: Mapping[str, Mapping] | None = None,
    launch: Mapping | None = None,
    published: Mapping | None = None,
    **sections: Mapping,
) -> ConfigDict:
    """The config of a workload file.

    `layouts` is its table as text; `variants` are presets of its own beside PRESETS, `fp8` what
    runs with dtype=fp8 do otherwise ({section: {field: value}}), `launch` fields of Launch,
    `published` the numbers and the convention (flops.per_sequence) of published MFUs where they are
    not the model's, and other keywords further sections. `presets` is what stands after the
    file's name, 'tiny,xai'; it is checked by resolve().
    """
    names = tuple(p for p in (presets or "").split(",") if p)
    known = PRESETS | {name: _sections(given) for name, given in (variants or {}).items()}
    made = {"layouts": layouts, "presets": names, "known": known, "fp8": _sections(fp8 or {})}
    made |= {"launch": _whole(Launch, "launch", launch or {}), "published": dict(published or {})}
    given = _sections(dict(model=model, train=train, optim=optim, **sections))
    made |= {name: _whole(cls, name, given.get(name, {})) for name, cls in SECTIONS.items()}
    table(layouts)  # must be one
    return ConfigDict(made).lock()


def _sections(given: Mapping[str, Mapping]) -> dict[str, dict]:
    """Sections with some of their fields, checked."""
    for section in given:
        check_choice("section", section, SECTIONS)
    return {name: _fields(SECTIONS[name], name, values) for name, values in given.items()}


def _fields(cls: type, section: str, given: Mapping) -> dict:
    """Some fields of a section, each made what it is declared to be."""
    renamed.check_section(section, given)
    fields, made = cls.__dataclass_fields__, {}
    for name, value in given.items():
        check_choice(f"a field of {section}", name, fields)
        field, path = fields[name], f"{section}.{name}"
        made[name] = parse(path, field.type, value, field.metadata)
    return made


def _whole(cls: type, section: str, given: Mapping) -> dict:
    """All fields of a section: its defaults, then what the workload gives."""
    fields = {f.name: f.default for f in dataclasses.fields(cls)} | _fields(cls, section, given)
    if lacking := [name for name, value in fields.items() if value is dataclasses.MISSING]:
        raise UserError(f"{section} has no {', '.join(lacking)}")
    return fields


def table(layouts: str) -> list[dict[str, Any]]:
    """Rows of a table of layouts; a cell 'bf16,fp8' stands for one row each."""
    heads, *lines = [line.split() for line in layouts.splitlines() if line.strip()] or [[]]
    renamed.check_columns(heads)
    if lines and (lacking := {*LAYOUT_COLUMNS} - {*heads}):
        raise UserError(f"layouts has no column {', '.join(sorted(lacking))}; it has {heads}")
    for cells in lines:
        if len(cells) != len(heads):
            raise UserError(f"layouts: {' '.join(cells)} has not {len(heads)} cells, as its head")
    number = lambda text: int(text) if text.isdecimal() else text
    rows = [dict(zip(heads, map(number, cells), strict=True)) for cells in lines]
    return [row | {"dtype": dtype} for row in rows for dtype in row["dtype"].split(",")]


class NoRow(UserError):
    """The table has no row for so many GPUs; `nearest` is the nearest that it has of the whole
    model."""

    def __init__(self, message: str, nearest: int):
        super().__init__(message)
        self.nearest = nearest


def build_run(
    config: ConfigDict,
    *,
    gpus: int | None = None,
    strong_scaling: bool = False,
    flags: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    gpu_types: GpuTypes = GPU_TYPES,
) -> c.Run:
    """Builds the Run.

    Args:
      config: what workload() returned.
      gpus: take the row of the table for so many GPUs.
      strong_scaling: of the rows with constant global batch.
      flags: shorthand flags that were given, by their names in FLAGS.
      overrides: 'section.field' -> value, applied last.
      gpu_types: those that layout.gpu_type may name.

    Raises:
      NoRow: the table has none for so many GPUs, and no axes are given.
      UserError: anything else that cannot be, with what would work.
    """
    given = {FLAGS[flag]: value for flag, value in (flags or {}).items()} | dict(overrides or {})
    if "train.remat" in given:  # another policy than the row's is for all layers
        given = {"train.remat_layers": 0} | given
    if gpus is not None:
        gpus = parse("gpus", int, gpus, {"at_least": 1})
    for path, value in given.items():
        renamed.check_name(path)
        renamed.check_value(path, value)
    values = {name: dict(config[name]) for name in SECTIONS}
    wanted = _wanted(config, given)
    if wanted["dtype"] == "fp8":
        _update(values, config.fp8)
    names = sorted(config.presets, key=lambda name: name in PRESETS)  # toy sizes win
    if gpus is not None:
        check_choice("gpu_type", wanted["gpu_type"], gpu_types)
        wanted["recipes"] = gpu_types[wanted["gpu_type"]].recipes
        row = _row(config, gpus, strong_scaling, wanted, by_hand={*(flags or ())} & {*c.AXES})
        values["model"]["layers"] = row.pop("layers")
        train = {
            n: row.pop(n)
            for n in ("seq", "microbatch_group_size", "remat", "remat_layers")
            if n in row
        }
        values["train"], values["layout"] = values["train"] | train, values["layout"] | row
    elif strong_scaling:
        raise UserError("strong_scaling picks a row of the table, so it needs --gpus")
    for name in names:
        _update(values, config.known[name])
        if name in ("tiny", "rehearse"):
            _shrink(values, rehearse=name == "rehearse")
    for path, value in given.items():
        section, _, field = path.partition(".")
        values[section][field] = value
    shown = [name for name in names if name != "fp8"]
    values["model"]["size"] = "-".join([values["model"]["size"], *shown])
    if "rehearse" in names and "runtime.cpu_devices" not in given:
        values["runtime"]["cpu_devices"] = c.Layout(**values["layout"]).gpus
    sections = {name: cls(**values[name]) for name, cls in SECTIONS.items()}
    run = c.Run(**sections, gpu_types=gpu_types)
    if gpus is not None and "rehearse" not in names and run.layout.gpus != gpus:
        raise UserError(
            f"gpus={gpus}, but the layout ({run.layout.describe()}) needs {run.layout.gpus}; "
            "leave gpus out to take the axes as given, or the axes to take the table's row"
        )
    return run


def run_from_dict(config: Mapping, gpu_types: GpuTypes = GPU_TYPES) -> c.Run:
    """The Run of a result.json's config, without what differs between starts of one program."""
    for section, fields in config.items():
        renamed.check_section(section, fields)
    same = {"output": {}, "profile": {}, "runtime": {"tp_overlap": config["runtime"]["tp_overlap"]}}
    sections = {name: cls(**same.get(name, config[name])) for name, cls in SECTIONS.items()}
    return c.Run(**sections, gpu_types=gpu_types)


def _wanted(config: ConfigDict, given: Mapping) -> dict[str, Any]:
    """The GPU type and the dtype that all settings together say, among other fields."""
    wanted = {**config.precision, **config.layout}
    for name in config.presets:
        check_choice("preset", name, config.known)
        wanted |= dict(config.known[name].get("precision", {}))
    return wanted | {path.rpartition(".")[2]: v for path, v in given.items()}


def _update(values: dict, given: Mapping) -> None:
    for section, fields in given.items():
        values[section] |= dict(fields)


def _row(config: ConfigDict, gpus: int, strong: bool, wanted: Mapping, by_hand: set) -> dict:
    """The table's row for so many GPUs, as layout fields with 'layers' and 'seq'."""
    gpu_type, dtype = wanted["gpu_type"], wanted["dtype"]
    check_choice("dtype", dtype, DTYPES)
    scaling = "strong" if strong else "weak"
    dtype = "bf16" if dtype == "fp32" else dtype
    kind = [r for r in table(config.layouts) if (r["dtype"], r["scaling"]) == (dtype, scaling)]
    there = [r for r in kind if r["gpu_type"] == wanted["recipes"]]
    for row in there:
        if row["gpus"] == gpus:
            layout = {k: v for k, v in row.items() if k not in ("gpus", "dtype", "scaling")}
            return layout | {"gpu_type": gpu_type}
    if by_hand:  # a scale of the user's own: the axes say it all
        return {"layers": config.model.layers, "seq": config.train.seq}
    name = f"{config.model.name} {config.model.size} {dtype} ({scaling} scaling)"
    why = f"gpus={gpus}: {name} has no recipe for {gpus} {gpu_type}"
    if not there:
        types = ", ".join(sorted({r["gpu_type"] for r in kind}) or ["none"])
        raise UserError(f"{why}; types that have one: {types}; or name the axes, --fsdp and so on")
    near = sorted((r["gpus"] for r in there), key=lambda n: abs(n / gpus - 1))[:3]
    hint = f"nearest: --gpus {' or '.join(map(str, sorted(near)))}"
    hint += f"; or name the axes: maxbench plan --gpus {gpus} finds them"
    whole = [r["gpus"] for r in there if r["layers"] == config.model.layers] or near
    raise NoRow(f"{why}; {hint}", min(whole, key=lambda n: abs(n / gpus - 1)))


def _shrink(values: dict, rehearse: bool) -> None:
    """Toy sizes of what only some models have, and small degrees of every axis."""
    model, layout = values["model"], values["layout"]
    if model["experts"]:
        model["experts"] = 4
    model["rope_context"] = min(model["rope_context"], 16)  # so that a short sequence scales too
    if rehearse:
        shards = layout["mbs"] * layout["dp"] * layout["fsdp"] * layout["ep"]
        micro = max(1, layout["gbs"] // shards)
        layout.update({axis: min(2, layout[axis]) for axis in (*c.AXES, "vp", "mbs")})
        shards = layout["mbs"] * layout["dp"] * layout["fsdp"] * layout["ep"]
        layout["gbs"] = shards * min(4, micro)


def load(path: str | pathlib.Path, *presets: str) -> ConfigDict:
    """The config of a workload file, which is a program: it runs here.

    Raises:
      UserError: whatever went wrong in it, with its line.
    """
    path = str(path)
    try:
        made = runpy.run_path(path).get("get_config", lambda *presets: None)(*presets)
        if not isinstance(made, ConfigDict) or "layouts" not in made:
            raise UserError("its get_config(presets='') must return spec.recipes.workload(...)")
        return made
    except (Exception, SystemExit) as e:
        told = traceback.TracebackException.from_exception(e)
        lines = [frame.lineno for frame in told.stack if frame.filename == path]
        lines += [told.lineno] if getattr(told, "filename", "") == path else []  # of its syntax
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        raise UserError(f"{':'.join(map(str, (path, *lines[-1:])))}: {kind}{told}") from None


def load_workload(text: str) -> ConfigDict:
    """The config of WORKLOAD[:preset,preset], a name in configs/ or the path of a file.

    Raises:
      UserError: there is neither; whatever went wrong in the file.
    """
    given, is_set, presets = text.partition(":")
    files = {path.stem: path for path in sorted(CONFIGS.glob("*.py"))}
    path = given if os.path.isfile(given) else files.get(given)
    if path is None:
        likeness = functools.partial(difflib.SequenceMatcher, None, pathlib.Path(given).stem)
        listed = ", ".join(sorted(files, key=lambda name: -likeness(name).ratio()))
        raise UserError(
            f"config={given!r} is no workload and no file; closest first, there are {listed}; "
            "or give the path of a file of your own"
        )
    return load(path, *[presets] * bool(is_set))


@functools.cache
def workloads() -> dict[pathlib.Path, ConfigDict]:
    """All files of configs/ and their configs, in the order of their launch.rank."""
    found = {path: load(path) for path in sorted(CONFIGS.glob("*.py"))}
    return dict(sorted(found.items(), key=lambda item: item[1].launch.rank))


def find_workloads(model: str, size: str) -> list[pathlib.Path]:
    """The workload files of a model and a size, by their names in them: one, if all is well."""
    files = workloads().items()
    return [path for path, w in files if (w.model.name, w.model.size) == (model, size)]


@functools.cache
def display_name(model: str, size: str) -> str:
    """How people call a model, 'Llama 3.1 8B': what its file begins with; where none has it, as it
    calls itself. A size may name presets too: 'Llama 3.1 8B tiny'."""
    size, *presets = size.split("-")
    if not (files := find_workloads(model, size)):
        return " ".join([model, size, *presets]).strip()
    title = ast.get_docstring(ast.parse(files[0].read_text())).partition(",")[0]
    return " ".join([title, *presets])


def models() -> list[str]:
    """The models' names."""
    return list(dict.fromkeys(w.model.name for w in workloads().values()))


def sizes(model: str = "") -> list[str]:
    """The sizes of a model, by its name in its files, or of all."""
    every = (w.model for w in workloads().values())
    return list(dict.fromkeys(m.size for m in every if model in ("", m.name)))


@functools.cache
def model_names() -> dict[str, str]:
    """Names of models in workload files and published figures, aliases too -> the model's own."""
    aliases = {a: w.model.name for w in workloads().values() for a in w.launch.aliases}
    return aliases | {name: name for name in [*models(), *(r.model for r in published_rows())]}
