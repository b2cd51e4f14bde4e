"""Settings without effect in a run are refused, or named if a file sets them
(config/ineffective.py)."""

import pytest

from maxbench.cli import train
from maxbench.config import command_line, ineffective, layout_table, options
from maxbench.config.errors import UserError
from maxbench.config.number_formats import SCALINGS
from maxbench.run import terminal
from tests.conftest import WORKLOADS, config, resolve

TOY = "llama31_8b:tiny"
FP8 = "--dtype fp8 --config.precision.scaling"
PIPELINE = "--pp 2 --gbs 8 --mbs 1 --layers 4"
# workload, flags, setting -> a flag with which it has an effect
REFUSED = [
    (TOY, "--fsdp 2", "train.unroll_layers=32", "--dp 2"),
    (TOY, PIPELINE, "train.unroll_layers=32", ""),
    (TOY, "", "train.schedule=gpipe", PIPELINE),
    (TOY, "", "train.microbatch_group_size=4", f"{PIPELINE} --vp 2"),
    (TOY, PIPELINE, "train.microbatch_group_size=4", f"{PIPELINE} --vp 2"),
    (TOY, f"{PIPELINE} --vp 2", "train.microbatch_group_size=1", None),
    (TOY, f"{PIPELINE} --config.train.remat=full", "train.remat_layers=2", ""),
    (TOY, "--config.train.remat=full", "train.offload=all", "--config.train.remat=none"),
    (TOY, "", "precision.backend=te", "--dtype fp8"),
    (TOY, "", "precision.scaling=delayed", "--dtype fp8"),
    (TOY, f"{FP8}=current", "precision.history=4", f"{FP8}=delayed"),
    (TOY, "", "precision.history=4", None),
    (TOY, "", "profile.start=2", "--profile xplane"),
    (TOY, "", "profile.ranks=1", "--profile xplane"),
    (TOY, "", "output.max_to_keep=3", "--checkpoint"),
    (TOY, "--checkpoint", "output.keep_period=3", "--config.output.checkpoint_every=3"),
    (TOY, "--config.optim.warmup=0", "optim.warmup_offset=0", ""),
    (TOY, "--config.optim.weight_decay=0", "optim.decay_norms=true", ""),
    (TOY, "", "train.collective_combine_bytes=(1,1,1)", "--dp 2"),
    (TOY, "", "model.aux_loss=0.1", None),
    (TOY, "", "model.drop_policy=position", None),
    ("grok1_314b:tiny", "--config.model.capacity_factor=0", "model.drop_policy=position", ""),
    ("grok1_314b:tiny", "", "model.rope_low=2", None),
]


def run_of(workload: str, flags: str, setting: str):
    return command_line.run_of(["--config", workload, *flags.split(), f"--config.{setting}"])


@pytest.mark.parametrize(("workload", "flags", "setting", "effective"), REFUSED)
def test_setting_without_effect_is_refused(workload, flags, setting, effective):
    with pytest.raises(UserError) as refused:
        run_of(workload, flags, setting)
    assert str(refused.value).startswith(setting.partition("=")[0] + "=")
    assert " has no effect: " in str(refused.value)
    if effective is not None:
        run_of(workload, effective, setting)


def test_every_rule_has_a_setting():
    assert {*ineffective.RULES} <= {*options.SETTINGS}


def test_default_values_are_accepted():
    for setting in ("train.schedule=1f1b", "precision.history=1024", "train.unroll_layers=auto"):
        run_of(TOY, "", setting)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaling_of_a_workload_file_is_accepted_in_bf16_and_named(scaling):
    """A file may hold settings for runs in another number format."""
    run = resolve("llama31_8b", "tiny", {"precision.scaling": scaling})
    assert run.precision.dtype == "bf16"
    text = f"precision.scaling='{scaling}' has no effect: dtype=bf16 has unquantized GEMMs"
    assert [named.startswith(text) for named in ineffective.of_a_file(run)] == [True]
    shown = " ".join(terminal.text(train.overview(run)).split())
    assert text.replace(" has no effect", "") in shown


@pytest.mark.exhaustive
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_setting_of_our_workload_files_has_an_effect(workload):
    for row in layout_table.table(config(workload).layouts):
        names = ("gpus", "gpu_type", "dtype")
        strong = ["--strong_scaling"] * (row["scaling"] == "strong")
        flags = [f"--{name}={row[name]}" for name in names] + strong
        assert not ineffective.reasons(command_line.run_of(["--config", workload, *flags])), flags


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("preset", ["", "tiny", "proxy", "fp8", "rehearse", "tiny,fp8"])
def test_every_workload_and_preset_resolves(workload, preset):
    """And nothing is named without effect: nobody gave a setting."""
    assert not ineffective.of_a_file(command_line.run_of(["--config", f"{workload}:{preset}"]))
