"""Copies of weights that differ in a bit on some GPUs, and what names these."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.cli import entry
from maxbench.config import exit_codes
from maxbench.config.run import AXES
from maxbench.run import replicas
from maxbench.run.replicas import Replicas
from maxbench.sharding import mesh, rules
from maxbench.sharding.collectives import axis_index
from maxbench.step.train_step import Step
from tests.conftest import resolve
from tests.run.conftest import folder_of


def step_of(name: str = "llama31_8b", **axes: int) -> Step:
    run = resolve(name, "tiny", mbs=1, **axes)
    return Step(run, mesh.make_mesh(run.layout, jax.devices()[: run.layout.gpus]))


@pytest.mark.parametrize(
    ("axes", "wrong"),
    [({"dp": 4}, [1]), ({"dp": 2, "tp": 2, "gbs": 4}, [0, 2])],
    ids=["one of four copies", "one of two copies"],
)
def test_a_flipped_bit_is_named(monkeypatch, axes, wrong):
    step = step_of(**axes)
    params = step.init()["params"]
    assert Replicas(step).differing(params) == []
    gather = rules.gather_master

    def flip(sharding, w):
        """The lowest bit of an element of the embedding, on one GPU."""
        w = gather(sharding, w)
        bits = jax.lax.bitcast_convert_type(
            w, jnp.uint16 if w.dtype == jnp.bfloat16 else jnp.uint32
        )
        here = (axis_index("dp") == 1) & (axis_index("fsdp") == 0) & (axis_index("tp") == 0)
        first = (0,) * w.ndim
        bits = bits.at[first].set(bits[first] ^ here.astype(bits.dtype))
        return jax.lax.bitcast_convert_type(bits, w.dtype)

    monkeypatch.setattr(replicas, "gather_master", flip)
    assert Replicas(step).differing(params) == wrong


@pytest.mark.exhaustive
def test_a_run_with_a_flipped_bit_ends_before_it_is_saved(monkeypatch, tmp_path, capsys):
    gather = rules.gather_master

    def flip(sharding, w):
        w = gather(sharding, w)
        here = (axis_index("dp") == 1).astype(w.dtype)
        return w.at[(0,) * w.ndim].add(here)

    monkeypatch.setattr(replicas, "gather_master", flip)
    code, folder = run_of(tmp_path, capsys, "--dp=4")
    assert code == exit_codes.FAILED
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    reason = "weights on GPU 1 on .* differ from their copies after 3 steps, at the first check: "
    assert re.match(reason, result["reason"])
    assert not (folder / "checkpoints").exists() or not [*(folder / "checkpoints").iterdir()]
    monkeypatch.setattr(replicas, "gather_master", gather)
    code, folder = run_of(tmp_path / "right", capsys, "--dp=4")
    assert code == 0


def run_of(out, capsys, *flags):
    every = ["--config.runtime.compare_replicas_every=3", "--config.output.checkpoint_every=3"]
    words = ["--config", "llama31_8b:tiny", "--layers=1", "--steps=4", *flags, *every]
    code = entry.run("train", [*words, "--mbs=1", "--gbs=4", "--output_dir", str(out)])
    capsys.readouterr()
    return code, folder_of(out)


def test_weights_without_copies_are_not_compared():
    compared = Replicas(step_of(tp=2))
    assert compared.axes == [("tp",)]  # norms
    assert compared.differing(compared.step.init()["params"]) == []
    assert Replicas(step_of()).axes == []


def test_the_minority_differs():
    sizes = dict.fromkeys(AXES, 1) | {"dp": 3, "tp": 2}
    sums = np.zeros((6, 2), np.uint32)
    of = lambda: replicas.differing(sums, [("dp",), ("dp", "tp")], sizes)
    assert of() == []
    sums[3, 0] = 7  # dp 1, tp 1
    assert of() == [3]
    sums[0, 1] = 5
    assert of() == [0, 3]
    sums[1, 0], sums[5, 0] = 1, 2  # no two are equal
    assert of() == [0, 1, 3, 5]
