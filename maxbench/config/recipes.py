"""Workload files: a model, its training settings, its table of layouts, and presets.

configs/ has a file per workload, which calls workload(). Installed, it is maxbench/configs. The
launcher, the report and the benchmarks know workloads from these files alone.
"""

import ast
import dataclasses
import difflib
import functools
import os
import pathlib
import runpy
import traceback
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from maxbench.config import hugging_face_config, layout_table
from maxbench.config.errors import UserError, check_choice
from maxbench.config.run import SECTIONS
from maxbench.config.validation import field, parse_fields, required
from maxbench.hardware.gpus import GPU_TYPES

if TYPE_CHECKING:
    from ml_collections import ConfigDict

# Settings of training, which a config.json of Hugging Face has not: those of llama31_8b.
TRAINING: dict[str, Any] = {
    "train": dict(seq=8192),
    "optim": dict(lr=3e-4, lr_min=3e-5, warmup=2000),
}
PACKAGE = pathlib.Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent  # of the checkout: configs/, launch/
CONFIGS = next(path / "configs" for path in (PACKAGE, ROOT) if (path / "configs").is_dir())
TOY_SIZES: dict[str, dict[str, Any]] = {
    "model": dict(layers=4, embed=128, heads=8, kv_heads=4, head_dim=16, mlp=256, vocab=512),
    "train": dict(seq=64, steps=20),
}
BIGRAM = {"data": "bigram"}  # with a short warm-up, the loss falls at once
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # same structure, toy sizes: runs on a laptop
    "tiny": {
        "model": TOY_SIZES["model"],
        "train": TOY_SIZES["train"] | BIGRAM,
        "optim": {"lr": 0.03, "warmup": 0.1},
        "layout": {"mbs": 2},
        "runtime": {"any_device": True},
    },
    # full dims, few layers: runs on one GPU
    "proxy": {
        "model": {"layers": 4},
        "train": BIGRAM,
        "optim": {"warmup": 0.1},
        "runtime": {"any_device": True},
    },
    "fp8": {"precision": {"dtype": "fp8"}},
    "nvfp4": {"precision": {"dtype": "nvfp4"}},
    "rehearse": TOY_SIZES,  # the row's layout with axes of at most 2, on virtual CPU devices
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The launcher's defaults for a workload."""

    rank: int = 99  # among the workloads that MODEL and MODEL_SIZE match, the lowest is launched
    aliases: tuple[str, ...] = ()  # other names of the model, lower case, in MODEL and in logs
    dtype: str = "bf16"
    gpus: int = field(0, at_least=0)  # 0 = JOB_TOTAL_GPUS is required
    time: str = "01:00:00"
    strong_time: str = ""  # of rows with a constant global batch; '' = time
    profile: tuple[int, int] = (20, 30)  # first step of a profile, first step after it
    stops: bool = True  # a profiled job ends with its profile


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
) -> "ConfigDict":
    """The config of a workload file.

    Args:
      presets: names joined by commas, as in the text after the workload's name: 'tiny,xai'.
        precedence.build_config() checks and applies them.
      model, train, optim, sections: fields of sections of Run (config/run.py).
      layouts: the table of layouts as text: a header of layout_table.COLUMNS, a row per
        layout. load() checks it.
      variants: presets of this workload, in addition to PRESETS: {name: {section: {field: value}}}.
      fp8: settings of runs with dtype=fp8: {section: {field: value}}.
      launch: fields of Launch.
      published: 'convention' (metrics.flops.per_sequence) of the published MFU, and fields of the
        model that it was computed with, if they differ.

    Raises:
      UserError: a section, a field or a value is invalid.
    """
    checked = _parse_sections(dict(model=model, train=train, optim=optim, **sections))
    config = {
        "layouts": layouts,
        "presets": tuple(name for name in (presets or "").split(",") if name),
        "known": PRESETS | {n: _parse_sections(fields) for n, fields in (variants or {}).items()},
        "fp8": _parse_sections(fp8 or {}),
        "launch": _with_defaults(Launch, "launch", launch or {}),
        "published": dict(published or {}),
    }
    for name, cls in SECTIONS.items():
        config[name] = _with_defaults(cls, name, checked.get(name, {}))
    from ml_collections import ConfigDict  # late: 20 ms, and help pages need none

    return ConfigDict(config).lock()


def _parse_sections(sections: Mapping[str, Mapping]) -> dict[str, dict]:
    """Checked sections, each with some of its fields."""
    for name in sections:
        check_choice("section", name, SECTIONS)
    return {n: parse_fields(SECTIONS[n], fields, f"{n}.") for n, fields in sections.items()}


def _with_defaults(cls: type, section: str, values: Mapping) -> dict:
    """Checked values of all fields of a section."""
    parsed = parse_fields(cls, values, f"{section}.")
    required(cls, parsed, section)
    return {f.name: f.default for f in dataclasses.fields(cls)} | parsed


def load(
    path: str | pathlib.Path, *presets: str, gpu_types: Collection[str] = GPU_TYPES
) -> "ConfigDict":
    """The config of a workload file, which is a Python program: it is executed.

    Args:
      gpu_types: that its table of layouts may name.

    Raises:
      UserError: the program fails, or its table is invalid; with its line and the error.
    """
    from ml_collections import ConfigDict

    path = str(path)
    try:
        config = runpy.run_path(path).get("get_config", lambda *presets: None)(*presets)
        if not isinstance(config, ConfigDict) or "layouts" not in config:
            raise UserError("its get_config(presets='') must return config.recipes.workload(...)")
    except (Exception, SystemExit) as e:
        error = traceback.TracebackException.from_exception(e)
        lines: list[Any] = [frame.lineno for frame in error.stack if frame.filename == path]
        lines += [error.lineno] if getattr(error, "filename", "") == path else []  # a syntax error
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        text = e.msg if isinstance(e, SyntaxError) else error  # the error repeats file and line
        raise UserError(f"{':'.join(map(str, (path, *lines[-1:])))}: {kind}{text}") from None
    try:
        layout_table.check(config.layouts, pathlib.Path(path).read_text(), gpu_types)
    except UserError as e:
        raise UserError(f"{path}{e}") from None
    return config


def of_hugging_face(path: str | pathlib.Path, presets: str | None = None) -> "ConfigDict":
    """The config of a Hugging Face config.json: its model, TRAINING, no table of layouts.

    Raises:
      UserError: as hugging_face_config.read_config(); an unknown preset.
    """
    model = hugging_face_config.read_config(path)
    sizes = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    return workload(presets, model=sizes, layouts="", **TRAINING)


def load_workload(text: str, gpu_types: Collection[str] = GPU_TYPES) -> "ConfigDict":
    """The config of WORKLOAD[:preset,preset]: a name in configs/, or the path of a file, a workload
    or a Hugging Face config.json.

    Args:
      gpu_types: that its table of layouts may name.

    Raises:
      UserError: there is no such workload and no such file, or the file fails.
    """
    name, has_presets, presets = text.partition(":")
    files = {path.stem: path for path in sorted(CONFIGS.glob("*.py"))}
    path = name if os.path.isfile(name) else files.get(name)
    if path is None:
        likeness = functools.partial(difflib.SequenceMatcher, None, pathlib.Path(name).stem)
        closest_first = ", ".join(sorted(files, key=lambda other: -likeness(other).ratio()))
        raise UserError(
            f"config={name!r} is no workload and no file; closest first, there are "
            f"{closest_first}; or give the path of a file of your own"
        )
    if str(path).endswith(".json"):
        return of_hugging_face(path, presets)
    return load(path, *([presets] if has_presets else []), gpu_types=gpu_types)


@functools.cache
def workloads() -> dict[pathlib.Path, "ConfigDict"]:
    """All files of configs/ and their configs, ordered by launch.rank."""
    configs = {path: load(path) for path in sorted(CONFIGS.glob("*.py"))}
    return dict(sorted(configs.items(), key=lambda item: item[1].launch.rank))


def find_workloads(model: str, size: str) -> list[pathlib.Path]:
    """The workload files of a model and size, by model.name and model.size: one, normally."""
    files = workloads().items()
    return [path for path, w in files if (w.model.name, w.model.size) == (model, size)]


@functools.cache
def display_name(model: str, size: str) -> str:
    """A model's name for people, 'Llama 3.1 8B tiny': the first words of its file's docstring, and
    the presets in `size`. Without a file, model and size."""
    size, *presets = size.split("-")
    if not (files := find_workloads(model, size)):
        return " ".join([model, size, *presets]).strip()
    docstring = ast.get_docstring(ast.parse(files[0].read_text())) or ""
    return " ".join([docstring.partition(",")[0], *presets])


def models() -> list[str]:
    """model.name of all workloads."""
    return list(dict.fromkeys(w.model.name for w in workloads().values()))


def sizes(model: str = "") -> list[str]:
    """model.size of the workloads of a model, or of all."""
    every = (w.model for w in workloads().values())
    return list(dict.fromkeys(m.size for m in every if model in ("", m.name)))


@functools.cache
def model_names() -> dict[str, str]:
    """Names and aliases of models in workload files -> model.name."""
    aliases = {a: w.model.name for w in workloads().values() for a in w.launch.aliases}
    return aliases | {name: name for name in models()}
