"""The activation stash: arrays that loops write under named scopes, in small HLO texts."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from maxbench.config.run import LAYERS
from maxbench.cost_model import hlo, memory
from maxbench.cost_model.meaning import Meaning
from maxbench.model import layers, transformer
from maxbench.pipeline.schedule import STASH
from maxbench.planning import program_names
from maxbench.sharding import mesh
from maxbench.step.train_step import Step
from tests.conftest import resolve

SCAN = f"jit(_step)/shard_map/jvp({LAYERS})/while/body"
SCAN_WRITE = f"{SCAN}/jit(dynamic_update_index_in_dim)/dynamic_update_slice"
STASHED = "bf16[4,2,64]{2,1,0}"  # 4 layers, 2 x 64 elements: 1 KiB
WEIGHTS = "bf16[4,32,4]{2,1,0}"  # as large, also one row per layer


def loop(name: str, writes: dict[str, str], carry: str, count: int) -> tuple[str, str]:
    """A while loop and its body, which has one dynamic-update-slice for each of `writes`.

    Args:
      writes: shape -> op_name.
      carry: shapes of the carried arrays, without the counter.
      count: number of carried arrays.
    """
    parameters = "\n".join(
        f"  %a{i} = s32[] get-tuple-element(%s), index={i}" for i in range(count + 1)
    )
    updates = "\n".join(
        f"  %u{i} = {shape} dynamic-update-slice(%a1, %a2, %a0), "
        f'metadata={{op_name="{op_name}" stack_frame_id=1}}'
        for i, (shape, op_name) in enumerate(writes.items())
    )
    body = (
        f"%{name} (s: (s32[])) -> (s32[]) {{\n  %s = (s32[], {carry}) parameter(0)\n"
        f"{parameters}\n{updates}\n  ROOT %t = (s32[], {carry}) tuple(%a0)\n}}\n"
    )
    operands = ", ".join(f"%{name}_{i}" for i in range(count + 1))
    zeros = "".join(f"  %{name}_{i} = s32[] constant(0)\n" for i in range(count + 1))
    call = (
        f"{zeros}  %{name}_in = (s32[], {carry}) tuple({operands})\n"
        f"  %{name}_out = (s32[], {carry}) while(%{name}_in), condition=%c, body=%{name}\n"
    )
    return body, call


def program(*loops: tuple[str, str]) -> hlo.Program:
    bodies, calls = zip(*loops, strict=True) if loops else ((), ())
    return hlo.parse(
        "HloModule m, is_scheduled=true\n\n" + "\n".join(bodies) + "\nENTRY %main (p: f32[]) -> "
        "f32[] {\n" + "".join(calls) + "  ROOT %p = f32[] parameter(0)\n}\n"
    )


def stashed_bytes(text: hlo.Program) -> int:
    names = Meaning(stash=program_names.SCAN_STASH, shared_stash=program_names.PIPELINE_STASH)
    return memory.stashed_bytes(text, names)


def test_without_a_loop_there_is_no_stash():
    assert stashed_bytes(program()) == 0


def test_the_scan_over_layers_stashes_what_its_forward_pass_writes():
    """Weights have one row per layer too, but are only read; the backward scan writes gradients."""
    forward = loop("fwd", {STASHED: SCAN_WRITE}, f"{STASHED}, {STASHED}, {WEIGHTS}", 3)
    write = SCAN_WRITE.replace("jvp(layers)", "transpose(jvp(layers))")
    backward = loop("bwd", {WEIGHTS: write}, f"{STASHED}, {STASHED}, {WEIGHTS}", 3)
    assert stashed_bytes(program(forward, backward)) == 2 * 1024


def test_stashes_of_several_scans_add_up():
    """Groups of layers, or layers with and without recomputation, are scans of their own."""
    other = "f32[3,2,64]{2,1,0}"
    first = loop("first", {STASHED: SCAN_WRITE}, f"{STASHED}, {WEIGHTS}", 2)
    second = loop("second", {other: SCAN_WRITE}, other, 1)
    assert stashed_bytes(program(first, second)) == 1024 + 3 * 2 * 64 * 4


def test_a_write_to_a_transposed_bitcast_is_found():
    """The weights have the dims of the activations, in another order than any write."""
    activations, weights = "bf16[4,2,64]{2,1,0}", "bf16[4,64,2]{2,1,0}"
    carry = f"{activations}, {weights}, {STASHED.replace('64', '32')}"
    writes = {activations: SCAN_WRITE, "bf16[32,4,2]{2,1,0}": SCAN_WRITE}
    assert stashed_bytes(program(loop("fwd", writes, carry, 3))) == 1024 + 512


def test_updates_inside_a_layer_are_no_stash():
    inner = f"{SCAN}/closed_call/while/body/dynamic_update_slice"
    assert stashed_bytes(program(loop("fwd", {STASHED: inner}, STASHED, 1))) == 0


def test_offloaded_activations_are_not_counted():
    host = STASHED.replace("}", ":S(5)}")
    scan = loop("fwd", {STASHED: SCAN_WRITE}, f"{STASHED}, {host}", 2)
    assert stashed_bytes(program(scan)) == 1024


def test_the_phases_of_a_pipeline_share_one_stash():
    def phase(name: str, writes: dict[str, str]) -> tuple[str, str]:
        return loop(name, writes, f"{STASHED}, {WEIGHTS}", 2)

    scope = "jit(_step)/shard_map/pipeline_{}/while/body/closed_call/{}dynamic_update_slice"
    input_slots = scope.format("warmup", "")
    stash = [scope.format(name, f"{STASH}/") for name in ("warmup", "steady")]
    warmup = phase("warmup", {STASHED: stash[0], WEIGHTS: input_slots})
    assert stashed_bytes(program(warmup, phase("steady", {STASHED: stash[1]}))) == 1024


@pytest.mark.parametrize(
    ("flags", "scope"),
    [
        ({"layers": 3}, f"jvp({LAYERS})/while/body"),
        ({"pp": 2, "gbs": 4}, f"{STASH}/dynamic_update_slice"),
    ],
)
def test_the_step_names_the_scopes(flags, scope):
    run = resolve("llama31_8b", "tiny", **flags)
    step = Step(run, mesh.make_mesh(run.layout))
    assert scope in step.lower().as_text(debug_info=True)


LATENT = {"kv_heads": 8, "value_dim": 12, "q_rank": 48, "kv_rank": 32, "rope_head_dim": 8}
GROUPED = {"qk_norm": True, "attention_bias": True, "sinks": True, "window": 5}


@pytest.mark.parametrize(
    ("sizes", "policies"),
    [
        (
            LATENT,
            (
                "none",
                "save_gemms_recompute_mla_up",
                "save_gemms_recompute_mla_up_and_mlp",
                "selective",
                "save_context",
                "latent",
            ),
        ),
        (GROUPED, ("none", "selective", "save_qkv_proj")),
    ],
    ids=["latent", "grouped"],
)
def test_estimated_stash_equals_the_residuals_of_a_layer(sizes, policies):
    """A sequence of a prime number of tokens tells activations from weights."""
    settings = {f"model.{name}": value for name, value in sizes.items()}
    settings |= {"train.attention": "xla"}
    seq = 23

    def residuals(run, key, x_btd):
        w = jax.tree.map(lambda x: x[0], nn.unbox(transformer.init(run.model, key))["layers"])
        rope = layers.rope_angles(run.model, jnp.arange(seq))
        kind = run.model.per_layer[0]
        layer = functools.partial(transformer.layer, run, kind, sums=None, rope=rope)
        call = lambda w, x_btd: layer(w=w, x_bud=x_btd)[::2]
        return jax.vjp(call, jax.tree.map(lambda w: w.astype(x_btd.dtype), w), x_btd)[1]

    for policy in policies:
        run = resolve("llama31_8b", "tiny", settings | {"train.remat": policy}, seq=seq, layers=1)
        x = jax.ShapeDtypeStruct((run.layout.mbs, seq, run.model.embed), jnp.bfloat16)
        shapes = jax.eval_shape(functools.partial(residuals, run), jax.random.key(0), x)
        is_stashed = lambda x: x.size % seq == 0 and x.shape[0] != seq  # but the RoPE table
        stash = sum(x.size * x.dtype.itemsize for x in filter(is_stashed, jax.tree.leaves(shapes)))
        assert stash == memory.activation_bytes(run), policy


def test_the_first_layers_of_a_model_with_experts_may_have_none():
    dense = resolve("deepseek_v3", "proxy", layers=2)
    assert not dense.model.experts
    assert memory.activation_bytes(dense) > 0
