"""Operations of a program, measured beside predicted."""

import gzip
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

import maxbench as mb
from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.traces import beside

H200 = pathlib.Path("benchmarks/results/h200")


def compared(name):
    return mb.trace(H200 / f"{name}.xplane.pb.gz", hlo=H200 / f"{name}.hlo.txt.gz")


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "unmatched"),
    [
        ("llama31_8b-bf16", {"MemcpyD2D"}),
        # In CUDA graphs, whose kernels name no operation: copies within graphs, and parts of
        # cuDNN's backward pass.
        ("plain", {"MemcpyD2D", "Memset 0", "memcpy128", "memcpy32_post", "cudnn"}),
    ],
)
def test_kernels_are_matched_and_both_columns_sum_to_their_steps(name, unmatched):
    found = compared(name)
    plan = found.plan
    assert plan.measured_s == pytest.approx(found.step_s, rel=1e-9)
    assert plan.predicted_s == pytest.approx(plan.plan.step_s, rel=1e-9)
    left = {row.key.name for row in plan.rows if row.key.kind == "unmatched"}
    assert {
        x.removeprefix("not matched: ").removeprefix("void ").partition("::")[0] for x in left
    } <= unmatched
    gemms = [row for row in plan.rows if row.key.kind == "gemm"]
    assert all(row.measured.seconds > 0 for row in gemms)
    assert len(gemms) >= 15
    assert "TFLOP/s measured" in gemms[0].rates
    mores = [abs(row.more_s) for row in plan.rows]
    assert mores == sorted(mores, reverse=True)
    assert max(map(len, str(found).splitlines())) <= 100
    assert json.loads(json.dumps(found.data()))["plan"]["gpu_type"] == "h200"


def test_work_of_operations_by_the_program(tmp_path):
    @jax.jit
    def step(x, y):
        return jnp.tanh(x @ y)

    x, y = jnp.ones((256, 512)), jnp.ones((512, 128))
    step(x, y).block_until_ready()
    file = tmp_path / "step.hlo.txt.gz"
    file.write_bytes(gzip.compress(step.lower(x, y).compile().as_text().encode()))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            step(x, y).block_until_ready()
    found = mb.trace(tmp_path)
    (gemm,) = (k for k in found.kernels if k.kind == "gemm")
    assert gemm.shape == "f32 256x128x512"
    assert gemm.tflops == pytest.approx(2 * 256 * 128 * 512 / gemm.busy_s / 1e12)
    assert found.plan is None
    assert "its GPU is of no known type: give --gpu_type" in found.notes[0]
    plan = mb.trace(tmp_path, gpu_type="h100").plan
    assert plan.predicted_s == pytest.approx(plan.plan.step_s)


def test_the_folder_of_a_run_gives_its_mesh_and_schedule(tmp_path):
    run = command_line.resolve_run(
        options.TrainOptions("llama31_8b:proxy", gpu_type="h200", profile="xplane")
    )
    folder = tmp_path / "xplane/plugins/profile/2026_01_01"
    folder.mkdir(parents=True)
    shutil.copy(H200 / "llama31_8b-bf16.xplane.pb.gz", folder / "host.xplane.pb.gz")
    shutil.copy(H200 / "llama31_8b-bf16.hlo.txt.gz", tmp_path / "xplane/step.hlo.txt.gz")
    result = {"config": run.config.asdict(), "run": run.asdict(), "device": {"gpu_type": "h200"}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    for path in (tmp_path, folder / "host.xplane.pb.gz"):
        plan = mb.trace(path).plan
        assert dict(plan.plan.cluster.axes) == dict(run.layout.mesh_shape)
        assert plan.predicted_s == pytest.approx(plan.plan.step_s)


def test_a_program_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("no program")
    with pytest.raises(UserError, match="hlo="):
        mb.trace(H200 / "plain.xplane.pb.gz", hlo=file)
    assert beside.program_of([str(tmp_path)]) is None
