"""Invalid settings are refused in one line, with the value and what would work."""

import pytest

from maxbench.config import command_line, flag_words, options
from maxbench.config.errors import UserError
from maxbench.config.mixers import Mamba2
from maxbench.config.sublayers import Layer
from tests.conftest import resolve, train_command
from tests.kinds import dense, routed

LLAMA, GROK = "configs/llama2_70b.py", "configs/grok1_314b.py"
MXFP8 = ["--config", LLAMA, "--dtype", "fp8", "--gpu_type", "gb200"]
MXFP8 += ["--config.precision.scaling=mxfp8"]
TOY = f"{LLAMA}:tiny"
YARN = ["--config.model.rope_scaling=yarn", "--config.model.rope_factor=8"]
WINDOW = ["--config.model.window=16"]
LATENT = [f"--config.model.{name}" for name in ("q_rank=32", "kv_rank=32", "rope_head_dim=8")]
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
    "dtype and preset": (
        ["--config", f"{LLAMA}:fp8", "--dtype", "bf16"],
        ["dtype sets bf16 and preset fp8 sets fp8: they contradict each other"],
    ),
    "two presets": (["--config", f"{LLAMA}:fp8,nvfp4"], ["preset fp8 sets fp8 and preset nvfp4"]),
    "flag and setting": (
        ["--config", LLAMA, "--tp", "2", "--config.layout.tp=4"],
        ["--tp sets 2 and --config.layout.tp sets 4: they contradict each other"],
    ),
    "profile": (
        ["--config", LLAMA, "--profile", "nsight"],
        ["profile.tool='nsight' is not one of nsys, xplane, nccltrace"],
    ),
    "flag twice": (
        ["--config", LLAMA, "--gpus", "8", "--gpus=16"],
        ["--gpus=8 and --gpus=16 contradict each other; leave one of them out"],
    ),
    "setting twice": (
        ["--config", LLAMA, "--config.train.steps=1", "--config.train.steps", "2"],
        ["--config.train.steps=1 and --config.train.steps=2 contradict each other"],
    ),
    "on and off": (
        ["--config", LLAMA, "--wandb", "--no-wandb"],
        ["--wandb and --nowandb contradict each other; leave one of them out"],
    ),
    "too many gpus": (
        ["--config", LLAMA, "--gpus", "1000000000"],
        ["gpus=1000000000", "at most 131072"],
    ),
    "axes": (["--config", LLAMA, "--dp", "1000000000"], ["dp=1000000000", "at most 131072"]),
    "too many microbatches": (
        ["--config", LLAMA, "--pp", "2", "--mbs", "1", "--gbs", "100000"],
        ["gbs=100000 is 100000 microbatches", "at most 10000"],
    ),
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
    "heads": (["--config", LLAMA, "--tp", "3"], ["tp=3", "model.kv_heads=8", "works: 1, 2, 4, 8"]),
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
        ["model.head_dim=36", "kv_heads / tp=8 x qkv x head_dim = 360", "32"],
    ),
    "shared expert": (
        ["--config", "deepseek_v3:tiny", "--tp", "2", "--config.model.shared_mlp=63"],
        ["tp=2 does not divide model.shared_mlp=63", "works: 1, 3, 7"],
    ),
    "fp8 shared expert": (
        ["--config", "deepseek_v3:tiny", "--dtype", "fp8", "--config.model.shared_mlp=72"],
        ["multiples of 16: model.shared_mlp=72", "mlp = 72", "nearest that works: 64"],
    ),
    "fp8 sequence": (
        ["--config", LLAMA, "--dtype", "fp8", "--cp", "2", "--seq", "1000", "--mbs", "1"],
        ["train.seq=1000", "= 500", "992"],
    ),
    "multi-token prediction": (
        [
            *["--config", "grok1_314b", "--pp", "4", "--gbs", "80", "--mbs", "1", "--ep", "8"],
            "--config.model.mtp_layers=1",
        ],
        ["mtp_layers=1", "each of the pp=4 stages", "10 microbatches", "gbs=32"],
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
        ["gpu_type='h100'", "b200, b300, gb200, gb300", "current or delayed"],
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
        ["--config", LLAMA, "--pp", "7", "--vp", "8", "--gbs", "14"],
        ["layers=80 leave 32 of 112 slots", "pp=7", "work: 56 or 105"],
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
    "rope": (["--config", LLAMA, "--config.model.rope_fraction=0.01"], ["rope_fraction=0.01 of"]),
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
    "beta": (
        ["--config", TOY, *YARN, "--config.model.rope_beta_slow=40"],
        ["rope_beta_slow=40.0 must be below model.rope_beta_fast=32.0"],
    ),
    "yarn shortens": (
        ["--config", TOY, *flag_words.replaced(YARN, "--config.model.rope_factor=0.5")],
        ["model.rope_factor=0.5 shortens the context", "above 1"],
    ),
    "window over cp": (
        ["--config", TOY, *WINDOW, "--cp", "4", "--seq", "64"],
        ["model.window=16 reaches over more than", "cp of at most 2, or a window of at most 9"],
    ),
    "one latent": (
        ["--config", TOY, "--config.model.q_rank=32"],
        ["model.kv_rank=0: latent attention needs all of q_rank, kv_rank, rope_head_dim"],
    ),
    "latent kv heads": (
        ["--config", TOY, *LATENT],
        ["model.kv_heads=4: latent attention", "use kv_heads=8"],
    ),
    "latent rope dims": (
        ["--config", TOY, *flag_words.replaced(LATENT, "--config.model.rope_head_dim=16")],
        ["model.rope_head_dim=16 must be an even number of dims below model.head_dim=16"],
    ),
    "latent qk norm": (
        ["--config", TOY, *LATENT, "--config.model.kv_heads=8", "--config.model.qk_norm=true"],
        ["model.qk_norm=True: latent attention", "leave qk_norm out"],
    ),
    "latent rope fraction": (
        [
            *("--config", TOY, *LATENT, "--config.model.kv_heads=8"),
            "--config.model.rope_fraction=0.5",
        ],
        ["model.rope_fraction=0.5: latent attention rotates model.rope_head_dim=8"],
    ),
    "nodes of ep": (
        ["--config", "grok1_314b:tiny", "--ep", "4", "--config.layout.ep_nodes=3"],
        ["ep_nodes=3 does not divide ep=4", "ep_nodes that works: 1, 2, 4"],
    ),
    "nodes of tokens for all": (
        [
            *("--config", "grok1_314b:tiny", "--ep", "4", "--config.layout.ep_nodes=2"),
            "--config.model.capacity_factor=0",
        ],
        ["layout.ep_nodes=2 has no effect", "each token is sent to all GPUs of ep"],
    ),
    "latent tp": (
        ["--config", TOY, *LATENT, "--config.model.kv_heads=8", "--tp", "16"],
        ["tp=16 does not divide model.heads=8", "tp that works: 1, 2, 4, 8"],
    ),
    "latent fsdp": (
        ["--config", TOY, *LATENT, "--config.model.kv_heads=8", "--fsdp", "64"],
        ["fsdp=64 does not divide model.q_rank=32"],
    ),
    "output": (["--config", LLAMA, "--output_dir", "/proc/none"], ["output_dir='/proc/none'"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name):
    args, expected = BAD[name]
    code, out, err = train_command(*args)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert len(err) < 400
    for text in expected:
        assert text in err


NUMBERS = [path for path, field in options.SETTINGS.items() if field.type in (int, float)]


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_has_bounds(path):
    for text in ("nan", "inf", "-inf", "-99", "9" * 44, "ten", "", "1+1j", "True"):
        with pytest.raises(UserError, match=r"must be a (whole|finite) number, a") as error:
            command_line.run_of(["--config", LLAMA, f"--config.{path}={text}"])
        assert f"{path.rpartition('.')[2]}={text or repr(text)} " in str(error.value)


GROUPS = (1, (dense(256),)), (3, (routed(256, 4),))


@pytest.mark.parametrize(
    ("setting", "flags", "text"),
    [
        ({"model.layer_groups": GROUPS}, dict(pp=7, mbs=1, gbs=7), "give the layers of each part"),
        ({"precision.bf16_layers": (3, 1)}, dict(dtype="fp8"), "leaves none of the 4 layers"),
        (
            {"model.layer_groups": (*GROUPS[:1], (3, (routed(64, 4),)))},
            dict(tp=128),
            "tp=128 does not divide",
        ),
        ({"model.layer_groups": GROUPS}, dict(layers=5), "layers=5 is more than the layers=4 of"),
        (
            {"model.layer_groups": ((4, ({"mixer": {"kind": "atention"}},)),)},
            {},
            "kind of a sublayer='atention' .* did you mean 'attention'",
        ),
        (
            {"model.layer_groups": ((4, ({"mixer": {"kind": "attention", "windw": 8}},)),)},
            {},
            "attention: a field='windw' .* did you mean 'window'",
        ),
        (
            {"model.layer_groups": ((4, (dense(256, window=-1),)),)},
            {},
            "model.window=-1 must be a whole number, at least 0",
        ),
        (
            {"model.layer_groups": ((4, (dense(256, embed=64),)),)},
            {},
            "embed=64 is of the whole network; set model.embed",
        ),
        (
            {"model.layer_groups": ((4, (dense(256, head_dim=32),)),)},
            {},
            "RoPE rotates 32 dims of a head in a layer with attention, and 16 in the model",
        ),
        ({"model.layer_groups": ((4, ({},)),)}, {}, "neither a mixer nor a channel"),
        (
            {"model.layer_groups": ((4, ({"mixer": {"kind": "mlp"}},)),)},
            {},
            r"mixer=Mlp\(\) of a layer must be one of .*attention.*latent_attention",
        ),
        (
            {"model.layer_groups": ((4, (5,)),)},
            {},
            "must be groups .count, .layer, ...",
        ),
        (
            {"model.layer_groups": ((0, (dense(256),)), *GROUPS)},
            {},
            "must be groups .count, .layer, ...",
        ),
        ({"model.mtp_block": 5}, {}, r"model.mtp_block=5 must be a layer, as Layer\(mixer="),
        (
            {"model.mtp_layers": 2, "model.mtp_block": Layer(mixer=Mamba2(ssm_heads=8))},
            dict(cp=2),
            "cp=2 cuts the sequence, along which Mamba-2's states run",
        ),
    ],
    ids=str,
)
def test_layer_groups_that_are_not_supported_are_refused(setting, flags, text):
    with pytest.raises(UserError, match=text):
        resolve("grok1_314b", "tiny", setting, **flags)


def test_flag_that_is_given_twice_with_one_value_has_it():
    words = ["--gpus", "8", "--gpus=8", "--dry-run", "--dry_run", "--config.train.steps=7"]
    asked = command_line.read(options.Train, ["x", "--config", LLAMA, *words, words[-1]])
    assert (asked.gpus, asked.dry_run, asked.settings) == (8, True, {"train.steps": "7"})


def test_words_of_a_launcher_replace_earlier_ones():
    words = ["python", "-m", "x", "--steps", "50", "--checkpoint", "--resume=a", "--tp", "2"]
    assert flag_words.replaced(words, "--no-checkpoint", "--steps=5", "--resume", "b") == [
        "python", "-m", "x", "--tp", "2", "--no-checkpoint", "--steps=5", "--resume", "b"
    ]  # fmt: skip
