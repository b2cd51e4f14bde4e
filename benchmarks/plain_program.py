"""A train step of 40 lines without a framework, measured on the device that is present.

    python benchmarks/plain_program.py FOLDER

writes FOLDER/plain.json (step time, sizes), the text of the compiled step and an XPlane trace of
three steps.
"""

import functools
import gzip
import json
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

EMBED, HEADS, MLP, LAYERS, SEQ, VOCAB, BATCH = 4096, 32, 14336, 4, 4096, 32000, 2
BF16, FP32 = jnp.bfloat16, jnp.float32


def init(key):
    keys = jax.random.split(key, 6)
    normal = lambda key, *dims: jax.random.normal(key, dims, FP32) * 0.02
    return {
        "e": normal(keys[0], VOCAB, EMBED),
        "h": normal(keys[1], EMBED, VOCAB),
        "l": {
            "qkv": normal(keys[2], LAYERS, EMBED, 3, HEADS, EMBED // HEADS),
            "o": normal(keys[3], LAYERS, HEADS, EMBED // HEADS, EMBED),
            "u": normal(keys[4], LAYERS, EMBED, 2, MLP),
            "d": normal(keys[5], LAYERS, MLP, EMBED),
            "n": jnp.ones((LAYERS, 2, EMBED)),
        },
    }


def norm(x, scale):
    x = x.astype(FP32)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale).astype(BF16)


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
def block(x, w):
    q, k, v = jnp.einsum("bte,exhd->xbthd", norm(x, w["n"][0]), w["qkv"].astype(BF16))
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + jnp.einsum("bthd,hde->bte", o, w["o"].astype(BF16))
    gate, up = jnp.einsum("bte,exm->xbtm", norm(x, w["n"][1]), w["u"].astype(BF16))
    return x + jnp.einsum("btm,me->bte", jax.nn.silu(gate) * up, w["d"].astype(BF16))


def loss(p, tokens):
    x = p["e"].astype(BF16)[tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, p["l"])
    logits = jnp.einsum("bte,ev->btv", x, p["h"].astype(BF16)).astype(FP32)
    target = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - target)


def step(state, tokens):
    p, m, v = state
    value, g = jax.value_and_grad(loss)(p, tokens)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, v, g)
    p = jax.tree.map(lambda p, m, v: p - 1e-4 * m / (jnp.sqrt(v) + 1e-8), p, m, v)
    return (p, m, v), value


def main(folder: pathlib.Path) -> None:
    weights = jax.jit(init)(jax.random.key(0))
    state = weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, SEQ + 1), 0, VOCAB)
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
    compile_s, seconds = time.perf_counter() - start, []
    for _ in range(12):
        start = time.perf_counter()
        state, value = jax.block_until_ready(compiled(state, tokens))
        seconds.append(time.perf_counter() - start)
    sizes, device = compiled.memory_analysis(), jax.devices()[0]
    record = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "step_s": statistics.median(seconds[2:]),
        "seconds": seconds,
        "compile_s": compile_s,
        "arguments": sizes.argument_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "peak": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "loss": float(value),
    }
    (folder / "plain.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "plain.hlo.txt.gz").write_bytes(gzip.compress(compiled.as_text().encode()))
    with tempfile.TemporaryDirectory() as traces:
        with jax.profiler.trace(traces):
            for _ in range(3):
                state, value = jax.block_until_ready(compiled(state, tokens))
        trace = next(pathlib.Path(traces).rglob("*.xplane.pb")).read_bytes()
    (folder / "plain.xplane.pb.gz").write_bytes(gzip.compress(trace))
    print(f"{record['step_s']:.4f} s")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
