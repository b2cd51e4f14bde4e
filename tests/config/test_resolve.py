"""From a workload and settings to a Run: rows, presets, the order of settings."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxbench.config import command_line, gpu_files, layout_table, options
from maxbench.config import resolve as resolving
from maxbench.config.errors import UserError
from maxbench.config.number_formats import FORMATS
from maxbench.config.precedence import build_config
from maxbench.config.run import DEGREES, RunConfig
from maxbench.hardware.gpus import GPU_TYPES
from tests.conftest import CPU, WORKLOADS, config, resolve

ROWS = [(w, row) for w in WORKLOADS for row in layout_table.table(config(w).layouts)]


def test_tables_have_every_row_of_the_recipes():
    assert len([w for w, row in ROWS if row["gpu_type"] == "h100" and w in WORKLOADS[:6]]) == 74
    keys = [(w, *(r[k] for k in ("gpu_type", "dtype", "scaling", "gpus"))) for w, r in ROWS]
    assert len(set(keys)) == len(ROWS)
    for _, row in ROWS:
        assert (
            row["pp"] * row["dp"] * row["fsdp"] * row["ep"] * row["cp"] * row["tp"] == row["gpus"]
        )
        assert row["gbs"] % (row["mbs"] * row["dp"] * row["fsdp"] * row["ep"]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("workload", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_rows_resolve_to_their_layout(workload, row):
    flags = {} if row["pp"] == 1 else {"pp": 1, "vp": 1, "fsdp": row["fsdp"] * row["pp"]}
    strong = row["scaling"] == "strong"
    if flags:  # without a pipeline, data parallelism is larger and gbs must grow with it
        flags["gbs"] = row["gbs"] * row["pp"]
    run = resolve(
        workload,
        gpus=row["gpus"],
        gpu_type=row["gpu_type"],
        dtype=row["dtype"],
        strong_scaling=strong,
        **flags,
    )
    assert run.layout.gpus == row["gpus"]
    assert run.layout.gbs == flags.get("gbs", row["gbs"])
    assert (run.model.layers, run.train.seq) == (row["layers"], row["seq"])
    for name in ("microbatch_group_size", "remat_layers"):
        asked = row.get(name, config(workload).train[name])
        assert getattr(run.config.train, name) == (None if asked == "auto" else asked)


def test_remat_of_the_user_applies_to_all_layers():
    assert resolve("llama31_8b", gpus=8, gpu_type="h100").train.remat == "save_gemms_only"
    assert resolve("llama31_8b", gpus=32, gpu_type="h100").train.remat == "none"
    row = dict(gpus=64, gpu_type="h100")
    assert resolve("llama2_70b", **row).train.remat_layers == 70
    run = resolve("llama2_70b", overrides={"train.remat": "full"}, **row)
    assert (run.train.remat, run.train.remat_layers) == ("full", run.model.layers)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("preset", ["tiny", "proxy", "rehearse"])
def test_presets_keep_the_structure_of_the_model(workload, preset):
    full, run = resolve(workload), resolve(workload, preset)
    same = ("act", "norm", "router", "tied", "top_k", "rope_fraction", "rope_base")
    assert all(getattr(full.model, f) == getattr(run.model, f) for f in same)
    assert run.model.layers == 4
    if preset == "proxy":
        assert (run.model.embed, run.model.mlp) == (full.model.embed, full.model.mlp)
    else:
        assert run.model.embed == 128


def test_rehearsal_has_the_mesh_axes_of_the_row():
    run = resolve("grok1_314b", "rehearse", gpus=64)
    assert (run.layout.ep, run.layout.cp, run.layout.tp, run.layout.dp) == (2, 2, 2, 1)
    assert run.layout.microbatches == 4
    assert run.runtime.cpu_devices == run.layout.gpus == 8
    assert resolve("grok1_314b", "rehearse", gpus=64, cpu_devices=4).runtime.cpu_devices == 4


@pytest.mark.parametrize(
    ("workload", "layout", "gpu_type", "nodes"),
    [
        ("qwen3_30b_a3b", dict(gpus=16), "h100", 2),
        ("qwen3_235b_a22b", dict(pp=8, ep=16, tp=2, mbs=1), "h100", 4),
        ("qwen3_235b_a22b", dict(gpus=256), "gb200", 1),  # all in one NVLink domain
        ("deepseek_v3", dict(pp=8, vp=4, ep=32, mbs=1), "b200", 4),
        ("deepseek_v3", dict(gpus=256), "b200", 1),
        ("grok1_314b", dict(gpus=64), "h100", 1),
    ],
)
def test_tokens_are_sent_once_to_each_node_where_that_is_less(workload, layout, gpu_type, nodes):
    given = {} if "gpus" in layout else {"gbs": 8192}
    a = resolve(workload, gpu_type=gpu_type, dtype="fp8", **layout, **given).layout
    assert a.ep_nodes == nodes
    assert a.mesh_shape["ep_nodes"] * a.mesh_shape["ep"] == a.ep


def test_fp8_settings_of_a_workload_apply_to_fp8_runs():
    assert resolve("llama2_70b", gpus=64).train.remat == "save_dot_except_mlpwi"
    assert resolve("llama2_70b", gpus=64, dtype="fp8").train.remat == "save_dot_except_mlp"
    for family, scaling in (("llama2_70b", "delayed"), ("nemotron4_340b", "current")):
        run = resolve(family, dtype="fp8", gpu_type="gb200")
        assert (run.precision.scaling, run.format.name) == (scaling, scaling)
    preset = resolve("llama2_70b", "fp8,tiny", gpus=64)
    assert (preset.precision.dtype, preset.train.remat) == ("fp8", "save_dot_except_mlp")
    assert preset.name.startswith("pretrain_llama2_70b-tiny_fp8_")
    assert resolve("llama31_70b", "fp8", gpus=64).layout.pp == 8  # the FP8 row
    with pytest.raises(UserError, match="dtype sets bf16 and preset fp8 sets fp8: they contradict"):
        resolve("llama2_70b", "fp8", dtype="bf16")
    overrides = {"precision.dtype": "fp8", "train.remat": "full"}
    assert resolve("llama2_70b", overrides=overrides).train.remat == "full"


def test_later_settings_win():
    base = config("llama31_8b", "tiny")
    flags, overrides = {"mbs": 2}, {"train.seq": 256}
    run = resolving.resolve(build_config(base, gpus=8, flags=flags, overrides=overrides), GPU_TYPES)
    assert (run.layout.dp, run.layout.cp, run.layout.mbs) == (4, 2, 2)  # row, then flag
    assert (run.model.embed, run.train.seq) == (128, 256)  # preset; preset, then --config.train.seq
    readable, _, digest = run.name.rpartition("_")
    assert readable == "pretrain_llama31_8b-tiny_bf16_gpus8_tp1_pp1_cp2_vp1_mbs2_gbs128"
    assert re.fullmatch("[0-9a-f]{6}", digest)
    named = lambda **more: resolving.changed(run, train=more).name
    assert named(data="x.bin") != run.name
    assert named(steps=7, eval_data="y.bin", target_loss=3.0) == run.name


@settings(deadline=None)
@given(
    axes=st.dictionaries(
        st.sampled_from([*DEGREES, "vp", "mbs", "gbs", "seq"]), st.integers(-3, 40)
    ),
    gpu=st.sampled_from([*GPU_TYPES, "h1000"]),
    workload=st.sampled_from(WORKLOADS),
)
@example(axes={"fsdp": 3, "tp": 2}, gpu="h100", workload="llama2_70b")
def test_layout_is_consistent_or_refused_with_a_value_that_was_given(axes, gpu, workload):
    try:
        run = resolve(workload, gpu_type=gpu, **axes)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        settings = [f"{k}={v}" for k, v in axes.items()] + [f"gpu_type={gpu!r}"]
        assert any(text in refusal for text in settings), refusal
        return
    layout = run.layout
    assert layout.microbatches * layout.mbs * layout.shards == layout.gbs
    assert run.train.seq % (layout.cp * layout.tp) == 0
    assert run.model.kv_heads % layout.tp == 0


def test_run_is_frozen_and_hashable():
    run = resolve("llama31_8b", "tiny")
    assert hash(run) == hash(resolve("llama31_8b", "tiny"))
    with pytest.raises(AttributeError):
        run.layout.tp = 2
    assert RunConfig.from_dict(json.loads(json.dumps(run.config.asdict()))) == run.config


def test_auto_backend_is_transformer_engine_where_it_is_installed(auto_backend_is_xla, monkeypatch):
    fmt = resolve("llama31_8b", dtype="fp8").format
    for version, platform, backend in (
        ("2.17.0", "gpu", "te"),
        ("2.16", "gpu", "xla"),
        ("", "gpu", "xla"),
        ("2.20", "cpu", "xla"),
    ):
        monkeypatch.setattr(resolving.environment, "version", lambda _, version=version: version)
        assert auto_backend_is_xla(None, fmt, platform) == backend
    monkeypatch.setattr(resolving.environment, "version", lambda _: "2.17.0")
    assert auto_backend_is_xla(None, FORMATS["bf16"], "gpu") == "xla"


def test_runs_of_other_work_have_other_names_and_repeats_have_one():
    name = lambda overrides=None, **axes: resolve("llama31_8b", "", overrides, **axes).name
    names = [name(fsdp=8), name(dp=8), name(dp=8, seq=4096), name({"train.remat": "full"}, dp=8)]
    assert len({*names}) == 4
    constants = {"train.seed": 7, "train.window": (3, 4), "optim.lr": 1e-5, "output.dir": "x"}
    assert name(constants, dp=8, steps=99) == name(dp=8)
    on_cpu = resolve("llama31_8b", dp=8, device=CPU)
    assert on_cpu.name == name(dp=8)
    assert on_cpu.train.unrolled != resolve("llama31_8b", dp=8).train.unrolled


def test_a_derived_value_follows_the_cluster():
    """Given, ep_nodes stays; derived, it is derived again for another NVLink domain."""
    row = dict(gpus=1024, gpu_type="h100", dtype="fp8")
    run = resolve("kimi_k2", **row)
    wide = gpu_files.override(GPU_TYPES, "h100", {"nvlink_gpus": 64})
    nodes = lambda run, hardware: resolving.resolve(run.config, hardware).layout.ep_nodes
    assert (nodes(run, GPU_TYPES), nodes(run, wide)) == (2, 1)
    given = resolve("kimi_k2", overrides={"layout.ep_nodes": 4}, **row)
    assert nodes(given, wide) == 4


def test_more_remat_layers_than_layers_are_refused():
    with pytest.raises(UserError, match="remat_layers=1000 has no effect: the model has layers=4"):
        command_line.run_of(["--config=deepseek_v3:tiny", "--config.train.remat_layers=1000"])


@pytest.mark.parametrize(
    ("flags", "window"),
    [
        ({}, (20, 25)),
        ({"steps": 12}, (7, 12)),
        ({"steps": 3}, (0, 3)),
        ({"settings": {"profile.start": 8}}, (8, 13)),
        ({"settings": {"profile.stop": 9}}, (4, 9)),
    ],
)
def test_a_short_run_is_profiled_in_its_last_steps(flags, window):
    profile = command_line.resolve_run(
        options.TrainOptions("llama31_8b", gpus=8, profile="xplane", **flags)
    ).profile
    assert (profile.start, profile.stop) == window


def test_a_profile_of_no_step_is_refused():
    asked = options.TrainOptions(
        "llama31_8b", gpus=8, profile="xplane", steps=8, settings={"profile.start": 8}
    )
    with pytest.raises(UserError, match="profiles no step: the run has steps=8"):
        command_line.resolve_run(asked)
