"""From a workload and flags to a RunConfig: the order in which settings apply.

Later settings win: the workload's values, its settings for dtype=fp8, the row of its table of
layouts (--gpus), presets, shorthand flags (--tp, --mbs, ...), and last --config.section.field.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from maxbench.config.channels import Experts, Mlp
from maxbench.config.errors import UserError, check_choice
from maxbench.config.layout_table import COLUMNS, field_of, table
from maxbench.config.mixers import TOY_WINDOW
from maxbench.config.model import LayerGroup
from maxbench.config.number_formats import DTYPES
from maxbench.config.options import FLAGS
from maxbench.config.recipes import PRESETS
from maxbench.config.run import DEGREES, SECTIONS, LayoutConfig, RunConfig
from maxbench.config.sublayers import Layer
from maxbench.config.validation import build, parse
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes

TOY_LATENTS = {"kv_heads": 8, "head_dim": 48, "value_dim": 16}  # whole blocks of number formats
TOY_LATENTS |= {"q_rank": 64, "kv_rank": 32, "rope_head_dim": 32}
# As narrow as whole blocks of number formats allow, with tp=2.
TOY_STATES = {"ssm_heads": 64, "ssm_head_dim": 4, "ssm_groups": 2, "ssm_state": 32, "ssm_chunk": 32}

Sections = dict[str, dict[str, Any]]


class RowKey(NamedTuple):
    """The values that select a row of a table of layouts."""

    gpus: int
    gpu_type: str  # of the run
    recipes: str  # GPU type of the row (Gpu.recipes)
    dtype: str
    scaling: str  # weak | strong


class NoRow(UserError):
    """The table has no row for that number of GPUs.

    Attributes:
      nearest: the row that is nearest to it: of the same GPU type, number format and layers, as far
        as the table has one, and then in its number of GPUs.
    """

    def __init__(self, message: str, nearest: RowKey):
        super().__init__(message)
        self.nearest = nearest


def build_config(
    config: ConfigDict,
    *,
    gpus: int | None = None,
    strong_scaling: bool = False,
    row: RowKey | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    gpu_types: GpuTypes = GPU_TYPES,
) -> RunConfig:
    """The config of a workload and settings.

    Args:
      config: of recipes.workload().
      gpus: selects the row of the table of layouts for this number of GPUs.
      strong_scaling: selects among the rows with a constant global batch.
      row: replaces the row that `gpus`, `strong_scaling`, GPU type and dtype select.
      flags: shorthand flags by their names in FLAGS.
      overrides: 'section.field' -> value, applied last.
      gpu_types: that layout.gpu_type may name.

    Raises:
      NoRow: the table has no row for `gpus`, and no mesh axis is given.
      UserError: another invalid setting.
    """
    settings = _settings(flags or {}, overrides or {})
    values: Sections = {name: dict(config[name]) for name in SECTIONS}
    gpu_type, dtype = _gpu_type_and_dtype(config, settings)
    if dtype == "fp8":
        _merge(values, config.fp8)
    if gpus is not None:
        gpus = parse("gpus", int, gpus, {"at_least": 1})
        check_choice("gpu_type", gpu_type, gpu_types)
        scaling = "strong" if strong_scaling else "weak"
        key = row or RowKey(gpus, gpu_type, gpu_types[gpu_type].recipes, dtype, scaling)
        gpus = key.gpus
        _merge(values, _row(config, key, axes_given=bool({*(flags or ())} & {*DEGREES})))
    elif strong_scaling:
        raise UserError("strong_scaling picks a row of the table, so it needs --gpus")
    presets = sorted(config.presets, key=lambda name: name in PRESETS)  # toy sizes win
    for name in presets:
        _merge(values, config.known[name])
        if name in ("tiny", "rehearse"):
            _shrink(values, axes=name == "rehearse", dtype=dtype)
    if {"layout.pp", "layout.vp", "model.layers"} & {*settings}:
        values["layout"]["stages"] = None  # the row's parts are those of its own pipeline
    for path, value in settings.items():
        section, _, field = path.partition(".")
        values[section][field] = value
    in_size = [name for name in presets if name not in DTYPES]
    values["model"]["size"] = "-".join([values["model"]["size"], *in_size])
    if "rehearse" in presets and "runtime.cpu_devices" not in settings:
        values["runtime"]["cpu_devices"] = build(LayoutConfig, "layout", values["layout"]).gpus
    built = RunConfig.from_dict(values)
    a = built.layout
    if gpus is not None and "rehearse" not in presets and a.gpus != gpus:
        axes = " x ".join(f"{x}={n}" for x in DEGREES if (n := getattr(a, x)) > 1)
        raise UserError(
            f"gpus={gpus}, but the layout ({axes or 'one device'}) needs {a.gpus}; leave gpus out "
            "to take the axes as given, or the axes to take the table's row"
        )
    return built


def without_processes(config: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The config of a result.json, with the defaults of settings that do not change the program:
    output, profile, processes and devices.

    Raises:
      UserError: a setting is invalid or unknown.
    """
    runtime = {"tp_overlap": config["runtime"]["tp_overlap"]}
    kept = {"output": {}, "profile": {}, "runtime": runtime}
    return RunConfig.from_dict({name: kept.get(name, config[name]) for name in SECTIONS})


def _settings(flags: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """'section.field' -> value of flags and overrides.

    Raises:
      UserError: a flag and an override set one setting to different values.
    """
    for flag, value in flags.items():
        other = overrides.get(FLAGS[flag], value)
        _check_agree({f"--{flag}": value, f"--config.{FLAGS[flag]}": other})
    settings = {FLAGS[flag]: value for flag, value in flags.items()} | dict(overrides)
    if "train.remat" in settings:  # applies to all layers, unlike the row's remat_layers
        settings = {"train.remat_layers": None} | settings
    return settings


def _check_agree(values: Mapping[str, Any]) -> None:
    """Raises UserError unless all the values of one setting, by their sources, are the same."""
    if len({*map(str, values.values())}) > 1:
        both = " and ".join(f"{source} sets {value}" for source, value in values.items())
        raise UserError(f"{both}: they contradict each other; leave all but one out")


def _gpu_type_and_dtype(config: ConfigDict, settings: Mapping[str, Any]) -> tuple[str, str]:
    """layout.gpu_type and precision.dtype after presets and settings, which select the row.

    Raises:
      UserError: an unknown preset; presets and settings that set different dtypes.
    """
    for name in config.presets:
        check_choice("preset", name, config.known)
    given = {"dtype": settings["precision.dtype"]} if "precision.dtype" in settings else {}
    of_presets = {f"preset {x}": config.known[x].get("precision", {}) for x in config.presets}
    given |= {x: fields["dtype"] for x, fields in of_presets.items() if "dtype" in fields}
    _check_agree(given)
    dtype = next(iter(given.values()), config.precision.dtype)
    return settings.get("layout.gpu_type", config.layout.gpu_type), dtype


def _merge(values: Sections, sections: Mapping[str, Mapping]) -> None:
    for section, fields in sections.items():
        values[section] |= dict(fields)


def _row(config: ConfigDict, key: RowKey, axes_given: bool) -> Sections:
    """Settings of the table's row; those of the model alone if there is none and axes are given.

    Raises:
      NoRow, UserError: there is no row, and no axes are given.
    """
    check_choice("dtype", key.dtype, DTYPES)
    dtype = "bf16" if key.dtype == "fp32" else key.dtype
    rows = [r for r in table(config.layouts) if r["scaling"] == key.scaling]
    wanted = {"gpus": key.gpus, "gpu_type": key.recipes, "dtype": dtype}
    if row := next((r for r in rows if wanted.items() <= r.items()), None):
        sections: Sections = {"layout": {"gpu_type": key.gpu_type}}
        if dtype == "bf16":
            row.pop("format", None)  # of the other dtypes of its line
        for column, value in row.items():
            if section := COLUMNS[column]:
                sections.setdefault(section, {})[field_of(column)] = value
        return sections
    if axes_given:
        return {"model": {"layers": config.model.layers}, "train": {"seq": config.train.seq}}
    name = f"{config.model.name} {config.model.size} {dtype} ({key.scaling} scaling)"
    why = f"gpus={key.gpus}: {name} has no recipe for {key.gpus} {key.gpu_type}"
    by_hand = f"or name the axes: maxbench plan --gpus {key.gpus} finds them"
    if not rows:
        raise UserError(f"{why}, nor any row; name the axes, --fsdp and so on")
    distance = lambda r: abs(r["gpus"] / key.gpus - 1)
    same = [r for r in rows if (r["gpu_type"], r["dtype"]) == (key.recipes, dtype)]
    near = sorted(r["gpus"] for r in sorted(same, key=distance)[:3])
    hint = f"nearest: --gpus {' or '.join(map(str, near))}"
    if not same:
        of_dtype = {r["gpu_type"] for r in rows if r["dtype"] == dtype}
        hint = f"types that have one: {', '.join(sorted(of_dtype) or ['none'])}"
    unlike = lambda r: (
        r["gpu_type"] != key.recipes,
        r["dtype"] != dtype,
        r["dtype"] != "bf16",
        r["layers"] != config.model.layers,
        distance(r),
    )
    best = min(rows, key=unlike)
    like = key._replace(gpus=best["gpus"], recipes=best["gpu_type"], dtype=best["dtype"])
    raise NoRow(f"{why}; {hint}; {by_hand}", like)


def _toy_groups(model: Mapping[str, Any]) -> tuple[LayerGroup, ...]:
    """The layer groups of a toy: of each the layers that none before has, once, and of the last as
    many cycles as there are layers."""
    cycles, seen = [], set[Layer]()
    for _, cycle in model["layer_groups"]:
        cycles += [new] if (new := tuple(dict.fromkeys(x for x in cycle if x not in seen))) else []
        seen |= {*cycle}
    groups, left = [], model["layers"]
    for cycle in cycles:
        count = -(-max(1, left) // len(cycle)) if cycle is cycles[-1] else 1
        groups.append(LayerGroup(count, tuple(_toy_layer(model, layer) for layer in cycle)))
        left -= count * len(cycle)
    return tuple(groups)


def _toy_layer(model: Mapping[str, Any], layer: Layer) -> Layer:
    """A layer of a toy of the model."""
    kinds = {type(x.channel) for _, cycle in model["layer_groups"] for x in cycle}
    return layer.map(lambda sublayer: sublayer.toy(model, has_dense={Mlp, Experts} <= kinds))


def _shrink(values: Sections, axes: bool, dtype: str) -> None:
    """Toy sizes that depend on the model; with `axes`, mesh axes of at most 2, few microbatches."""
    model, layout = values["model"], values["layout"]
    if experts := model["experts"]:  # so many that a router of groups has a choice in each
        model["experts"] = 4 if model["top_k"] < 3 else min(experts, 4 * model["top_k"])
    if model["kv_rank"]:
        model |= TOY_LATENTS
    if model["ssm_heads"]:
        model |= TOY_STATES
    model["shared_mlp"] = min(model["shared_mlp"], model["mlp"] // 4)
    model["expert_latent"] = min(model["expert_latent"], model["embed"] // 2)
    model["window"] = min(model["window"], TOY_WINDOW)
    model["mtp_block"] = model["mtp_block"] and _toy_layer(model, model["mtp_block"])
    model["layer_groups"] = _toy_groups(model)
    if model["rope_factor"] != 1:  # so that it has an effect
        model["rope_context"] = min(model["rope_context"], 16)
    if axes:
        sequences = lambda: layout["mbs"] * layout["dp"] * layout["fsdp"] * layout["ep"]
        microbatches = max(1, (layout["gbs"] or 0) // sequences())
        layout.update({axis: min(2, layout[axis]) for axis in (*DEGREES, "vp", "mbs")})
        layout["stages"] = None
        layout["gbs"] = sequences() * min(4, microbatches)
        if dtype not in ("bf16", "fp32"):  # whole blocks of MXFP8 on each GPU
            train = values["train"]
            train["seq"] = max(train["seq"], 32 * layout["cp"] * layout["tp"])
