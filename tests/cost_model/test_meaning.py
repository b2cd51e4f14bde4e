"""The cost model prices any program: what names mean is passed in."""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from maxbench.config import loop_lengths
from maxbench.cost_model import buffer_liveness, costs, hlo, meaning, simulate
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import program_names
from maxbench.sharding import mesh
from maxbench.step.train_step import Step
from tests.conftest import resolve

PRICES = (hlo, costs, meaning, simulate, buffer_liveness)  # modules that price a program


@pytest.mark.parametrize("module", PRICES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_modules_that_price_a_program_know_no_run(module):
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    found = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    allowed = ("maxbench.cost_model", "maxbench.hardware", "maxbench.config.number_formats")
    assert [n for n in found if n.startswith("maxbench") and not n.startswith(allowed)] == []


def test_a_program_of_unknown_names_is_priced():
    """A loop of a length that is an argument, compiled by XLA:CPU."""

    def step(x, n):
        with jax.named_scope("halve"):
            return jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x) @ x, x)

    text = jax.jit(step).lower(jnp.ones((8, 8)), 3).compile().as_text()
    program, gpu = hlo.parse(text), costs.Costs(GPU_TYPES["h100"], {"devices": 1})
    once = simulate.simulate(program, gpu)
    assert [x.name for x in once.unknown.values()] == ["halve"]
    names = meaning.Meaning(trip_counts={"halve": 100})
    often = simulate.simulate(program, gpu, names)
    assert not often.unknown
    assert often.seconds > 50 * once.seconds
    assert buffer_liveness.liveness(program, gpu, names).peak()[1]


@pytest.mark.parametrize("ep_nodes", [1, 2])
def test_trip_counts_of_a_run_are_those_of_its_step(ep_nodes, monkeypatch):
    """Dropless experts over ep and tp, in a loop over microbatches that XLA may not unroll."""
    settings = {"model.force_balance": False, "layout.ep_nodes": ep_nodes}
    run = resolve("qwen3_30b_a3b", "tiny", settings, ep=4, tp=2, fsdp=2, gbs=32)
    sizes: list[tuple] = []
    mean_rows = loop_lengths.mean_rows
    record = lambda *args: sizes.append(args) or mean_rows(*args)
    monkeypatch.setattr(loop_lengths, "mean_rows", record)
    step = Step(run, mesh.make_mesh(run.layout))
    sizes.clear()  # of the initial weights
    text = step.lower().as_text(debug_info=True)
    of_step = set(sizes)
    sizes.clear()
    counts = program_names.meaning(run).trip_counts
    assert of_step == set(sizes)
    assert counts[loop_lengths.MICROBATCHES] == run.layout.microbatches > 1
    for scope in counts:
        assert re.search(rf'["/]{scope}/while"', text)
    arguments = set(re.findall(r'loc\("(\w+\[[^"]*)"', text))
    found = {name: at for at, name in program_names.ARGUMENTS.items()}
    for part, name in (("params", "weights"), ("opt", "optimizer")):
        assert (
            {x for x in arguments if found[name].search(x)}
            == {x for x in arguments if f"['{part}']" in x.partition("]")[0] + "]"}
            != set()
        )
