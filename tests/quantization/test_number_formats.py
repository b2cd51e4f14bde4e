"""A number format needs an entry in config/number_formats.py and an Arithmetic, and no more."""

import sys
import types

import jax.numpy as jnp
import pytest

from maxbench.config import number_formats
from maxbench.config.errors import UserError
from maxbench.config.run import AXES, Precision
from maxbench.cost_model.costs import Costs
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.quantization import Weight, unquantized
from maxbench.sharding import mesh
from maxbench.sharding.rules import gather_master
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve

TOY = number_formats.Format(
    name="toy",
    dtype="toy",
    compute="bf16",
    peak="fp8",
    reads=("f8e3m4",),
    bytes=1,
    arithmetic="toy",
    multiple=8,
)


class Toy(unquantized.Plain):
    """e3m4 without scales."""

    def weight(self, w, sharding, lead, scale):
        q = gather_master(sharding, w.astype(jnp.float8_e3m4))
        return Weight(q, q, self)

    def quantize_operand(self, x, scales, gradient, axes):
        q = x.astype(jnp.float8_e3m4)
        return q, q, None

    def product(self, a, b, over, dtype, exact=False):
        return super().product(a.astype(dtype), b.astype(dtype), over, dtype)


@pytest.mark.exhaustive
def test_a_new_format_trains(monkeypatch):
    toy = Toy()
    module = types.SimpleNamespace(arithmetic=lambda run: toy)
    monkeypatch.setitem(sys.modules, "maxbench.quantization.toy", module)
    monkeypatch.setitem(number_formats.FORMATS, "toy", TOY)
    # Both are derived from FORMATS when the modules are imported.
    monkeypatch.setattr(number_formats, "DTYPES", (*number_formats.DTYPES, "toy"))
    scaling = {"options": ("auto", *number_formats.SCALINGS, "toy")}
    monkeypatch.setattr(Precision.__dataclass_fields__["scaling"], "metadata", scaling)
    run = resolve("llama31_8b", "tiny", dtype="toy", layers=2, seq=32, fsdp=2, tp=2, mbs=1, gbs=4)
    assert run.format == TOY
    step = Step(run, mesh.make_mesh(run.layout))
    lowered = step.lower()
    text = lowered.as_text()
    assert text.count("f8E3M4>") > 12  # four GEMMs, forward and backward
    state, compiled = step.init(), lowered.compile()
    batches = data.Synthetic(step.run, step.mesh)
    losses = []
    for _ in range(2):
        state, out = compiled(state, next(batches))
        losses.append(float(out["loss"]))
    assert all(0 < loss < 20 for loss in losses)
    with pytest.raises(UserError, match="multiples of 8"):
        resolve("llama31_8b", "tiny", dtype="toy", seq=36, mbs=1)


def test_unsupported_scaling_is_refused_and_supported_ones_are_named():
    assert number_formats.resolve_format("fp8", "auto", "h100").name == "current"
    assert number_formats.resolve_format("fp8", "auto", "gb200").name == "mxfp8"
    assert (
        number_formats.resolve_format("bf16", "delayed", "h100").name == "bf16"
    )  # a scaling of FP8
    with pytest.raises(
        UserError, match=r"only b200, b300, gb200, gb300, vr200 .*=current or delayed"
    ):
        number_formats.resolve_format("fp8", "mxfp8", "h100")


def test_gemm_costs_depend_on_the_format():
    costs = Costs(GPU_TYPES["h100"], dict.fromkeys(AXES, 1))
    seconds = lambda dtype: costs.gemm(8192, 8192, 8192, dtype=dtype)
    assert seconds("f32") == pytest.approx(2 * seconds("bf16"), rel=0.05)  # TF32
    costs = Costs(GPU_TYPES["b200"], dict.fromkeys(AXES, 1))
    dtypes = {"bf16": "bf16", "fp8": "f8e5m2", "fp4": "f4e2m1fn"}  # by the peak
    for f in number_formats.FORMATS.values():
        assert {seconds(d) for d in f.reads if d != "f32"} <= {seconds(dtypes[f.peak])}
    assert seconds("f4e2m1fn") < seconds("f8e4m3fn") < seconds("bf16")
