"""A number format is an entry in config/number_formats.py and a module in formats, and no more."""

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
    """Numbers near 1 in few bits, without a scale."""

    def weight(self, w, place, lead, scale):
        q = gather_master(place, w.astype(jnp.float8_e3m4))
        return Weight(q, q, self)

    def quantize_operand(self, x, scales, gradient, axes):
        q = x.astype(jnp.float8_e3m4)
        return q, q, None

    def product(self, a, b, over, dtype, exact=False):
        return super().product(a.astype(dtype), b.astype(dtype), over, dtype)


def test_a_new_format_trains(monkeypatch):
    toy = Toy()
    module = types.SimpleNamespace(arithmetic=lambda run: toy)
    monkeypatch.setitem(sys.modules, "maxbench.quantization.toy", module)
    monkeypatch.setitem(number_formats.FORMATS, "toy", TOY)
    monkeypatch.setattr(
        number_formats, "DTYPES", (*number_formats.DTYPES, "toy")
    )  # made of the table, as is:
    scaling = {"options": ("auto", *number_formats.SCALINGS, "toy")}
    monkeypatch.setattr(Precision.__dataclass_fields__["scaling"], "metadata", scaling)
    run = resolve("llama31_8b", "tiny", dtype="toy", layers=2, seq=32, fsdp=2, tp=2, mbs=1, gbs=4)
    assert run.format == TOY
    step = Step(run, mesh.make_mesh(run.layout))
    lowered = step.lower()
    text = lowered.as_text()
    assert text.count("f8E3M4>") > 12  # four products, forward and backward
    state, call = step.init(), lowered.compile()
    found = []
    for _ in range(2):
        state, out = call(state)
        found.append(float(out["loss"]))
    assert all(0 < loss < 20 for loss in found)
    with pytest.raises(UserError, match="multiples of 8"):
        resolve("llama31_8b", "tiny", dtype="toy", seq=36, mbs=1)


def test_what_a_gpu_lacks_is_refused_with_what_it_has():
    assert number_formats.resolve_format("fp8", "auto", "h100").name == "current"
    assert number_formats.resolve_format("fp8", "auto", "gb200").name == "mxfp8"
    assert (
        number_formats.resolve_format("bf16", "delayed", "h100").name == "bf16"
    )  # a scaling of FP8
    with pytest.raises(UserError, match=r"only b200, gb200, gb300 .*=current or delayed"):
        number_formats.resolve_format("fp8", "mxfp8", "h100")


def test_operands_are_priced_by_their_format():
    costs = Costs(GPU_TYPES["h100"], dict.fromkeys(AXES, 1))
    price = lambda dtype: costs.gemm(8192, 8192, 8192, dtype=dtype)
    assert price("f32") == pytest.approx(2 * price("bf16"), rel=0.05)  # as TF32
    for f in number_formats.FORMATS.values():
        tensor = "f8e5m2" if f.quantized else "bf16"
        assert {price(dtype) for dtype in f.reads if dtype != "f32"} <= {price(tensor)}
    assert price("f8e4m3fn") < price("bf16")
