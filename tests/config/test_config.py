"""Settings: what the command line resolves to, and what wrong input is answered with."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maxbench.cli import entry
from maxbench.config import command_line, recipes
from maxbench.config.errors import UserError
from maxbench.config.model import LayerGroup
from maxbench.config.resolve import build_run
from maxbench.config.run import AXES, SECTIONS, Run
from maxbench.hardware.gpus import GPU_TYPES
from tests.conftest import WORKLOADS, config, resolve


def command(*args: str) -> tuple[int, str, str]:
    """`maxbench train` in this process, for runs that stop before jax is needed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = entry.run("train", args)
    return code, out.getvalue(), err.getvalue()


ROWS = [(w, row) for w in WORKLOADS for row in recipes.table(config(w).layouts)]


def test_every_row_of_the_recipes_is_there():
    assert len(ROWS) == 114
    keys = [(w, *(r[k] for k in ("gpu_type", "dtype", "scaling", "gpus"))) for w, r in ROWS]
    assert len(set(keys)) == 114
    for _, row in ROWS:
        assert (
            row["pp"] * row["dp"] * row["fsdp"] * row["ep"] * row["cp"] * row["tp"] == row["gpus"]
        )
        assert row["gbs"] % (row["mbs"] * row["dp"] * row["fsdp"] * row["ep"]) == 0


@pytest.mark.parametrize(("workload", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_rows_resolve_to_their_layout(workload, row):
    flags = {} if row["pp"] == 1 else {"pp": 1, "vp": 1, "fsdp": row["fsdp"] * row["pp"]}
    strong = row["scaling"] == "strong"
    if flags:  # the same GPUs without the pipeline; more sequences at once may not divide the batch
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
        assert getattr(run.train, name) == row.get(name, config(workload).train[name])


def test_a_policy_by_hand_is_for_all_layers():
    assert resolve("llama31_8b", gpus=8, gpu_type="h100").train.remat == "save_gemms_only"
    assert resolve("llama31_8b", gpus=32, gpu_type="h100").train.remat == "none"
    row = dict(gpus=64, gpu_type="h100")
    assert resolve("llama2_70b", **row).train.remat_layers == 70
    run = resolve("llama2_70b", overrides={"train.remat": "full"}, **row)
    assert (run.train.remat, run.train.remat_layers) == ("full", 0)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("preset", ["tiny", "proxy", "rehearse"])
def test_presets(workload, preset):
    full, run = resolve(workload), resolve(workload, preset)
    same = ("act", "norm", "router", "tied", "top_k", "rope_fraction", "rope_base")
    assert all(getattr(full.model, f) == getattr(run.model, f) for f in same)
    assert run.model.layers == 4
    if preset == "proxy":
        assert (run.model.embed, run.model.mlp) == (full.model.embed, full.model.mlp)
    else:
        assert run.model.embed == 128


def test_rehearse_keeps_the_shape_of_the_row():
    run = resolve("grok1_314b", "rehearse", gpus=64)
    assert (run.layout.ep, run.layout.cp, run.layout.tp, run.layout.dp) == (2, 2, 2, 1)
    assert run.layout.microbatches == 4
    assert run.runtime.cpu_devices == run.layout.gpus == 8
    assert resolve("grok1_314b", "rehearse", gpus=64, cpu_devices=4).runtime.cpu_devices == 4


def test_fp8_runs_of_a_workload_may_have_settings_of_their_own():
    assert resolve("llama2_70b", gpus=64).train.remat == "save_dot_except_mlpwi"
    assert resolve("llama2_70b", gpus=64, dtype="fp8").train.remat == "save_dot_except_mlp"
    for family, scaling in (("llama2_70b", "delayed"), ("nemotron4_340b", "current")):
        run = resolve(family, dtype="fp8", gpu_type="gb200")
        assert (run.precision.scaling, run.format.name) == (scaling, scaling)
    preset = resolve("llama2_70b", "fp8,tiny", gpus=64)
    assert (preset.precision.dtype, preset.train.remat) == ("fp8", "save_dot_except_mlp")
    assert preset.name.startswith("pretrain_llama2_70b-tiny_fp8_")
    assert resolve("llama31_70b", "fp8", gpus=64).layout.pp == 8  # the row of that dtype
    assert resolve("llama2_70b", "fp8", dtype="bf16").precision.dtype == "bf16"
    by_hand = {"precision.dtype": "fp8", "train.remat": "full"}
    assert resolve("llama2_70b", overrides=by_hand).train.remat == "full"


def test_order_of_settings():
    base = config("llama31_8b", "tiny")
    run = build_run(base, gpus=8, flags={"mbs": 2, "seq": 128}, overrides={"train.seq": 256})
    assert (run.layout.dp, run.layout.cp, run.layout.mbs) == (4, 2, 2)  # row, then flag
    assert (run.model.embed, run.train.seq) == (128, 256)  # preset; flag, then --config.train.seq
    assert run.name == "pretrain_llama31_8b-tiny_bf16_gpus8_tp1_pp1_cp2_vp1_mbs2_gbs128"


def test_the_data_of_a_run_is_quick_and_imports_no_jax():
    flags = ["--config", "configs/llama2_70b.py", "--gpus", "1024", "--json"]
    program = (
        "import sys; from maxbench.cli import entry\n"
        f"entry.run('train', {flags})\n"
        "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5  # 0.1 s alone; this machine may be busy
    found = json.loads(done.stdout)
    assert found["parameters"] == 68_976_648_192
    assert found["flops_per_sequence"]["full"] == pytest.approx(1.82064e15, rel=1e-5)
    assert found["config"]["layout"]["fsdp"] == 128
    assert found["config"]["layout"]["dp"] == 8


def test_a_dry_run_is_a_page_for_people():
    code, out, err = command("--config", "llama2_70b", "--gpus", "128", "--dry_run")
    assert (code, err) == (0, "")
    told = dict(re.split("  +", line, maxsplit=1) for line in out.splitlines() if "  " in line)
    assert out.startswith("Llama 2 70B bf16 on 128 x H100\n")
    assert told["model"].startswith("68,976,648,192 parameters, 80 layers")
    assert told["layout"] == "fsdp 128"
    assert "256 sequences, 1,048,576 tokens per step: 1 microbatch of 2 on each" in told["batch"]
    # plan compiles it to 71.4 GiB: docs/plan.csv
    assert 64 < float(re.match(r"about (\d+) of 74 GiB per GPU, estimated", told["memory"])[1]) < 79
    assert told["published"].startswith("7.072 s per step on 128 GPUs, NVIDIA recipe: MaxText")
    assert told["results"].startswith("experiments/pretrain_llama2_70b_bf16_gpus128_")
    assert command("--config", "llama2_70b", "--layers", "8", "--dry_run")[1].count(
        "layers 8, publ"
    )
    assert "{" not in out


def test_a_dry_run_of_a_toy_says_nothing_of_gpus():
    for words in (["llama31_8b:tiny"], ["llama2_70b:rehearse", "--gpus", "64"]):
        code, out, _ = command("--config", *words, "--dry_run")
        assert code == 0
        assert "GiB" not in out
        assert "H100" not in out


def test_a_workload_is_found_by_name_from_anywhere(tmp_path):
    """As pip installs it: configs/ within the package, and no checkout."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree("maxbench", site / "maxbench", ignore=ignore)
    shutil.copytree("configs", site / "maxbench" / "configs", ignore=ignore)
    (site / "configs").mkdir()  # of another package
    elsewhere.mkdir()
    code = "from maxbench.config import command_line, recipes\n"
    code += "print(command_line.run_of(['--config', 'llama31_8b:tiny']).name, *recipes.models())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("pretrain_llama31_8b-tiny_bf16_gpus1_"), done.stderr
    assert len(done.stdout.split()) == 1 + len(recipes.models())


LLAMA, GROK = "configs/llama2_70b.py", "configs/grok1_314b.py"
MXFP8 = ["--config", LLAMA, "--dtype", "fp8", "--gpu_type", "gb200"]
MXFP8 += ["--config.precision.scaling=mxfp8"]
BAD = {
    "unknown flag": (["--config", LLAMA, "--fsdq", "8"], ["'fsdq'", "did you mean --fsdp"]),
    "no config": ([], ["--config is missing", "--config llama31_8b:tiny"]),
    "config": (
        ["--config", "configs/llama2_7b.py"],
        ["'configs/llama2_7b.py' is no workload and no file", "there are llama2_70b, llama31_70b"],
    ),
    "argument": (["--config", LLAMA, "fast"], ["'fast'", "--name value"]),
    "preset": (["--config", LLAMA + ":tny"], ["preset='tny'", "did you mean 'tiny'"]),
    "setting": (
        ["--config", LLAMA, "--config.model.hads=1"],
        ["hads'", "mean --config.model.heads"],
    ),
    "type": (["--config", LLAMA, "--gpus", "many"], ["gpus=many must be a whole number"]),
    "gpu type": (["--config", LLAMA, "--gpu_type", "h10"], ["gpu_type='h10'", "mean 'h100'"]),
    "dtype": (["--config", LLAMA, "--dtype", "bf61"], ["dtype='bf61'", "did you mean 'bf16'"]),
    "scale": (
        ["--config", LLAMA, "--gpus", "96"],
        ["gpus=96", "64 or 128", "maxbench plan --gpus 96"],
    ),
    "no recipe": (
        ["--config", LLAMA, "--gpus", "64", "--gpu_type", "b200"],
        ["h100", "name the axes"],
    ),
    "strong": (["--config", LLAMA, "--strong_scaling"], ["strong_scaling", "--gpus"]),
    "strong row": (["--config", LLAMA, "--gpus", "64", "--strong_scaling"], ["strong scaling"]),
    "product": (["--config", LLAMA, "--gpus", "64", "--fsdp", "32"], ["gpus=64", "needs 32"]),
    "axis": (["--config", LLAMA, "--tp", "0"], ["tp=0", "at least 1"]),
    "columns": (
        ["--config", LLAMA, "--tp", "8", "--fsdp", "16", "--config.model.embed=8256"],
        ["tp=8 x fsdp=16 does not divide model.embed=8256", "tp x fsdp that works", "64, 86"],
    ),
    "heads": (["--config", LLAMA, "--tp", "3"], ["tp=3", "model.heads=64", "1, 2, 4, 8"]),
    "kv heads": (["--config", LLAMA, "--tp", "16"], ["tp=16", "model.kv_heads=8"]),
    "experts": (["--config", GROK, "--ep", "3"], ["ep=3", "model.experts=8", "1, 2, 4, 8"]),
    "no experts": (["--config", LLAMA, "--ep", "2"], ["ep=2", "llama2 70b has none"]),
    "vocabulary": (
        ["--config", LLAMA, "--tp", "8", "--config.model.vocab=100"],
        ["model.vocab=100"],
    ),
    "sequence": (["--config", LLAMA, "--cp", "4", "--seq", "100"], ["train.seq=100", "96"]),
    "embed": (["--config", LLAMA, "--fsdp", "3"], ["fsdp=3", "model.embed=8192"]),
    "batch": (["--config", LLAMA, "--fsdp", "4", "--gbs", "10"], ["gbs=10", "2 x 1 x 4 x 1 = 8"]),
    "fp8 embed": (
        ["--config", LLAMA, "--dtype", "fp8", "--config.model.embed=8200"],
        ["model.embed=8200", "multiples of 16", "8192"],
    ),
    "fp8 mlp": (
        ["--config", LLAMA, "--dtype", "fp8", "--tp", "8", "--config.model.mlp=28736"],
        ["model.mlp=28736", "tp=8 = 3592", "28672"],
    ),
    "fp8 heads": (
        ["--config", LLAMA, "--dtype", "fp8", "--tp", "8", "--config.model.head_dim=36"],
        ["model.head_dim=36", "2 x 1 kv_heads) x it = 360", "32"],
    ),
    "fp8 sequence": (
        ["--config", LLAMA, "--dtype", "fp8", "--cp", "2", "--seq", "1000", "--mbs", "1"],
        ["train.seq=1000", "= 500", "992"],
    ),
    "fp8 dropless": (
        ["--config", GROK, "--dtype", "fp8", "--config.model.capacity_factor=0"],
        ["capacity_factor=0", "experts / top_k=4", "dtype=bf16"],
    ),
    "fp8 slots": (
        ["--config", GROK, "--dtype", "fp8", "--seq", "1040", "--config.model.capacity_factor=0.3"],
        ["capacity_factor=0.3", "1 x 78 slots", "nearest that works: 0.305769"],
    ),
    "mxfp8": (
        ["--config", LLAMA, "--dtype", "fp8", "--config.precision.scaling=mxfp8"],
        ["gpu_type='h100'", "b200, gb200, gb300", "current or delayed"],
    ),
    "mxfp8 embed": (
        [*MXFP8, "--fsdp", "64", "--config.model.embed=7168"],
        ["multiples of 32", "model.embed=7168", "embed / fsdp=64 = 112", "8192"],
    ),
    "mxfp8 sequence": ([*MXFP8, "--tp", "8", "--seq", "4224"], ["= 528", "4096"]),
    "scaling": (
        ["--config", LLAMA, "--config.precision.scaling=delay"],
        ["did you mean 'delayed'"],
    ),
    "backend": (["--config", LLAMA, "--config.precision.backend=tee"], ["did you mean 'te'"]),
    "history": (["--config", LLAMA, "--config.precision.history=0"], ["history=0", "at least 1"]),
    "pp": (
        ["--config", LLAMA, "--pp", "7", "--gbs", "14"],
        ["layers=80", "pp=7", "77 or 82 or 84"],
    ),
    "microbatches": (["--config", LLAMA, "--pp", "4"], ["gbs=2", "pp=4", "gbs=8"]),
    "schedule": (["--config", LLAMA, "--config.train.schedule=1f1"], ["did you mean '1f1b'"]),
    "vp": (["--config", LLAMA, "--vp", "2"], ["vp=2", "pp > 1"]),
    "remat": (["--config", LLAMA, "--config.train.remat=ful"], ["'ful'", "did you mean 'full'"]),
    "offload": (
        ["--config", LLAMA, "--config.train.remat=full", "--config.train.offload=key"],
        ["train.offload='key'", "all"],
    ),
    "offload, pp": (
        ["--config", LLAMA, "--pp=2", "--gbs=4", "--config.train.offload=all"],
        ["pp=2", "train.offload='all'", "leave one of them out"],
    ),
    "GQA": (["--config", LLAMA, "--config.model.kv_heads=5"], ["kv_heads=5", "1, 2, 4, 8"]),
    "act": (["--config", LLAMA, "--config.model.act=swigl"], ["did you mean 'swiglu'"]),
    "rope": (["--config", LLAMA, "--config.model.rope_fraction=0.0"], ["rope_fraction=0.0"]),
    "steps": (["--config", LLAMA, "--steps", "0"], ["train.steps=0", "at least 1"]),
    "clip": (["--config", LLAMA, "--config.optim.clip=0.0"], ["optim.clip=0.0", "above 0"]),
    "stamp": (["--config", LLAMA, "--config.output.stamp=-1"], ["output.stamp=-1", "at least 0"]),
    "process": (["--config", LLAMA, "--process", "1"], ["belong together"]),
    "mock": (["--config", LLAMA, "--mock_gpus", "8", "--cpu_devices", "8"], ["exclude each other"]),
    "mocked state": (
        ["--config", LLAMA, "--mock_gpus", "8", "--checkpoint"],
        ["leave checkpoints"],
    ),
    "text": (["--config", LLAMA, "--steps", "ten"], ["train.steps=ten", "number, at least 1"]),
    "gpus": (["--config", LLAMA, "--gpus", "0"], ["gpus=0 must be", "at least 1"]),
    "flagfile": (["--config", LLAMA, "--flagfile=/none"], ["flagfile", "/none"]),
    "section": (["--config", LLAMA, "--config.train.lr=0.1"], ["did you mean --config.optim.lr?"]),
    "a step": (["--config", LLAMA, "--config.train.window[0]=3"], ["mean --config.train.window?"]),
    "steps three": (["--config", LLAMA, "--config.train.window=(1,2,3)"], ["as 35,44"]),
    "window": (["--config", LLAMA, "--config.train.window=9,3"], ["window=9,3", "as 35,44"]),
    "nearly Python": (["--config", LLAMA, "--config.train.window=1is,2"], ["as 35,44"]),
    "name": (["--config", LLAMA, "--config.model.name=../.."], ["model.name='../..'", "letters"]),
    "control": (
        ["--config", LLAMA, "--output_dir", "a\x1b[2J\nb"],
        ["a\\x1b[2J\\nb", "plain"],
    ),
    "flag control": (["--config", LLAMA, "--\x1b]0;x\x07=1"], [r"\x1b]0;x\x07"]),
    "address": (["--config", LLAMA, "--coordinator", "garbage"], ["'garbage' must be host:port"]),
    "port": (["--config", LLAMA, "--coordinator", "n1:65536"], ["host:port, as node1:1234"]),
    "truth": (["--config", LLAMA, "--checkpoint=maybe"], ["checkpoint=maybe must be true or"]),
    "rope low": (
        ["--config", LLAMA, "--config.model.rope_factor=8", "--config.model.rope_low=4"],
        ["rope_low=4.0 must be below model.rope_high=4.0"],
    ),
    "output": (["--config", LLAMA, "--output_dir", "/proc/none"], ["output_dir='/proc/none'"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_in_one_line(name):
    args, expected = BAD[name]
    code, out, err = command(*args)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert len(err) < 400
    for text in expected:
        assert text in err


NUMBERS = [path for path, field in command_line.SETTINGS.items() if field.type in (int, float)]


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_has_bounds_and_is_judged_in_one_place(path):
    for text in ("nan", "inf", "-inf", "-99", "9" * 44, "ten", "", "1+1j", "True"):
        with pytest.raises(UserError, match=r"must be a (whole|finite) number, a") as error:
            command_line.run_of(["--config", LLAMA, f"--{path}={text}"])
        assert f"{path.rpartition('.')[2]}={text or repr(text)} " in str(error.value)


try:
    compile("\0", "", "exec")
except (SyntaxError, ValueError) as e:  # which of them, Python 3.11 has changed its mind about
    NULL = type(e).__name__
FILES = {
    "x = 1\ndef get_config(p):\n  return (\n": ":3: SyntaxError: '(' was never closed",
    "\nimport nothing_like_it\n": ":2: ModuleNotFoundError: No module named 'nothing_like_it'",
    "a = 1\nraise RuntimeError('two\\nlines')\n": ":2: RuntimeError: two lines",
    "import sys\nsys.exit(0)\n": ":2: SystemExit: 0",
    "def get_config(p=''):\n  return {}['x']\n": ":2: KeyError: 'x'",
    "def get_config():\n  pass\n": ": its get_config(presets='') must return",
    "x = 1": ": its get_config(presets='') must return",
    "\0": f": {NULL}: source code string cannot contain null bytes",
    "train=dict(sep=1)": ":6: a field of train='sep' is not one of seq",
    "train=dict(seq='long')": ":6: train.seq=long must be a whole number, at least 1",
    "fp8=dict(optim=dict(lr=float('nan')))": ":6: optim.lr=nan must be a finite number",
    "launch=dict(gpus=-1)": ":6: launch.gpus=-1 must be a whole number, at least 0",
    "layouts='a b\\n1 2'": ":6: layouts has no column cp, dp, dtype",
    "model={}": ":6: model has no name, size, layers",
}
WHOLE = """from maxbench.config.recipes import workload
def get_config(presets=""):
    model = dict.fromkeys(("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab"), 8)
    given = dict(model=model | dict(name="x", size="y"), train=dict(seq=8), layouts="gpus")
    given |= dict(optim=dict(lr=1, lr_min=0, warmup=0), {})
    return workload(presets, **given)
"""


@pytest.mark.parametrize("text", FILES)
def test_a_workload_file_that_fails_is_told_with_its_line(text, tmp_path):
    path = tmp_path / "w.py"
    path.write_text(WHOLE.replace("{}", text) if FILES[text].startswith(":6") else text)
    code, out, err = command("--config", str(path), "--json")
    assert (code, out) == (2, "")
    assert err.startswith(f"maxbench train: error: {path}{FILES[text]}")
    assert err.count("\n") == 1


KINDS = (LayerGroup(1, 256), LayerGroup(3, 256, 4))


@pytest.mark.parametrize(
    ("setting", "flags", "text"),
    [
        ({"model.layer_groups": KINDS}, dict(pp=2, mbs=1, gbs=4), "pp=2 needs layers of one kind"),
        ({"model.layer_groups": KINDS}, dict(dtype="fp8"), "layers of one kind .* use dtype=bf16"),
        (
            {"model.layer_groups": (*KINDS[:1], LayerGroup(3, 64, 4))},
            dict(tp=128),
            "tp=128 does not divide",
        ),
        ({"model.layer_groups": KINDS}, dict(layers=5), "layers=5 differs from the layers=4 of"),
        ({"model.layer_groups": (LayerGroup(0, 256), *KINDS)}, {}, "must be .layers, mlp, experts"),
    ],
    ids=str,
)
def test_layers_that_differ_are_refused_where_they_cannot_be(setting, flags, text):
    with pytest.raises(UserError, match=text):
        resolve("grok1_314b", "tiny", setting, **flags)


@given(
    axes=st.dictionaries(st.sampled_from([*AXES, "vp", "mbs", "gbs", "seq"]), st.integers(-3, 40)),
    gpu=st.sampled_from([*GPU_TYPES, "h1000"]),
    workload=st.sampled_from(WORKLOADS),
)
@example(axes={"fsdp": 3, "tp": 2}, gpu="h100", workload="llama2_70b")
def test_any_layout_is_either_whole_or_refused_with_its_value(axes, gpu, workload):
    try:
        run = resolve(workload, gpu_type=gpu, **axes)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        named = [f"{k}={v}" for k, v in axes.items()] + [f"gpu_type={gpu!r}"]
        assert any(text in refusal for text in named), refusal
        return
    layout = run.layout
    assert layout.microbatches * layout.mbs * layout.shards == layout.gbs
    assert run.train.seq % (layout.cp * layout.tp) == 0
    assert run.model.kv_heads % layout.tp == 0


def test_a_run_is_frozen_and_hashable():
    run = resolve("llama31_8b", "tiny")
    assert hash(run) == hash(resolve("llama31_8b", "tiny"))
    with pytest.raises(AttributeError):
        run.layout.tp = 2
    assert Run(**{f: getattr(run, f) for f in SECTIONS}) == run
