"""The network against Hugging Face's Llama and Nemotron, and a plain reading of xAI's Grok-1."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.mesh import axes
from maxbench.model import network
from maxbench.spec.model import Model
from maxbench.spec.run import Layout, Optim, Run, Train
from maxbench.step.step import Step
from tests.conftest import resolve

GOLDEN = pathlib.Path(__file__).with_name("golden")
LLAMA = dict(embed=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=64, layers=2)
CASES = {
    "llama": LLAMA,
    "llama_tied": LLAMA | dict(tied=True),
    "llama31": LLAMA | dict(embed=64, head_dim=16, rope_base=5e5, rope_factor=8.0, rope_context=64),
    "nemotron": LLAMA
    | dict(embed=48, head_dim=12, mlp=96, act="relu2", norm="layernorm1p", rope_fraction=0.5),
}


def logits(run: Run, params, tokens_bt):
    step = Step(run, axes.make_mesh(run.layout))
    x_bud, _ = network.apply(step.run, params, tokens_bt)
    x_btd, w_dv = network.head(step.run, params, x_bud)
    return np.asarray(jnp.einsum("btd,dv->btv", x_btd, w_dv) * run.model.output_multiplier)


def from_hugging_face(m: Model, hf) -> dict:
    """Hugging Face's weights in our layout."""

    def layer(i):
        w = lambda name: hf[f"model.layers.{i}.{name}.weight"]
        heads = lambda name: w(f"self_attn.{name}_proj").reshape(-1, m.head_dim, m.embed)
        grouped = lambda x: x.reshape(m.kv_heads, -1, m.head_dim, m.embed)
        qkv = [grouped(heads(name)) for name in "qkv"]
        up = [w(f"mlp.{name}_proj").T for name in ("gate", "up")[-m.gates :]]
        return {
            "attn_norm": norm(f"model.layers.{i}.input_layernorm"),
            "attn": {
                "qkv": {"w": np.concatenate(qkv, 1).transpose(3, 0, 1, 2)},
                "out": {"w": w("self_attn.o_proj").T.reshape(m.heads, m.head_dim, m.embed)},
            },
            "mlp_norm": norm(f"model.layers.{i}.post_attention_layernorm"),
            "mlp": {"up": {"w": np.stack(up, 1)}, "down": {"w": w("mlp.down_proj").T}},
        }

    def norm(name):
        found = {"scale": hf[f"{name}.weight"]}
        return found | {"bias": hf[f"{name}.bias"]} if f"{name}.bias" in hf else found

    head = {"norm": norm("model.norm")}
    if not m.tied:
        head["w"] = hf["lm_head.weight"].T
    layers = jax.tree.map(lambda *x: np.stack(x), *[layer(i) for i in range(m.layers)])
    return {"embed": {"w": hf["model.embed_tokens.weight"]}, "layers": layers, "head": head}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_face(name):
    hf = dict(np.load(GOLDEN / f"{name}.npz"))
    m = Model(name="golden", size=name, **CASES[name])
    tokens_bt = hf["tokens"]
    run = Run(
        model=m,
        layout=Layout(mbs=2),
        train=Train(seq=tokens_bt.shape[1]),
        optim=Optim(lr=0, lr_min=0, warmup=0),
    )
    ours = logits(run, from_hugging_face(m, hf), tokens_bt)
    np.testing.assert_allclose(ours, hf["logits"], atol=1e-4)


def numpy_grok(m: Model, w, tokens_bt):
    """Grok-1 as released, read line by line: sandwich norms, capped logits, top-2 of a softmax."""
    rms = lambda x, s: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * s
    softmax = lambda x: (
        np.exp(x - x.max(-1, keepdims=True))
        / np.sum(np.exp(x - x.max(-1, keepdims=True)), -1, keepdims=True)
    )
    gelu = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def rotate(x_tk):
        half = m.head_dim // 2
        angle = np.arange(len(x_tk))[:, None] / 10_000.0 ** (np.arange(half) / half)
        a, b = x_tk[:, :half], x_tk[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(p, x_td):
        out = np.zeros_like(x_td)
        for g in range(m.kv_heads):
            *qs, k, v = np.moveaxis(np.einsum("td,dqk->tqk", x_td, p["qkv"]["w"][:, g]), 1, 0)
            for r, q in enumerate(qs):
                score = 30 * np.tanh(rotate(q) @ rotate(k).T * m.head_dim**-0.5 / 30)
                score[np.triu_indices(len(x_td), 1)] = -1e30
                head = g * len(qs) + r
                out += softmax(score) @ v @ p["out"]["w"][head]
        return out

    def experts(p, x_td):
        out = np.zeros_like(x_td)
        for t, x in enumerate(x_td):
            probability = softmax(x @ p["router"]["w"])
            for e in np.argsort(-probability)[:2]:
                gate, up = np.einsum("d,dnf->nf", x, p["up"][e])
                out[t] += probability[e] * ((gelu(gate) * up) @ p["down"][e])
        return out

    def sequence(tokens_t):
        x = w["embed"]["w"][tokens_t] * m.embed_multiplier
        for i in range(m.layers):
            p = jax.tree.map(lambda leaf, i=i: leaf[i], w["layers"])
            scale = {k: v["scale"] for k, v in p.items() if "scale" in v}
            y = attention(p["attn"], rms(x, scale["attn_norm"]))
            x = x + rms(y, scale["attn_post"])
            x = x + rms(experts(p["mlp"], rms(x, scale["mlp_norm"])), scale["mlp_post"])
        return rms(x, w["head"]["norm"]["scale"]) @ w["embed"]["w"].T * 3**-0.5

    return np.stack([sequence(t) for t in tokens_bt])


def test_xai_preset_is_the_released_grok():
    run = resolve("grok1_314b", "xai,tiny", dtype="fp32", layers=2, seq=16)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, init_std=0.2))
    step = Step(run, axes.make_mesh(run.layout))
    params = step.init()["params"]
    random = np.random.default_rng(0)
    noisy = lambda x: np.float64(x) * (1 + 0.2 * random.standard_normal(x.shape))
    params = jax.tree.map(noisy, params)
    tokens_bt = random.integers(0, run.model.vocab, (2, 16))
    ours = logits(run, jax.tree.map(jnp.float32, params), tokens_bt)
    np.testing.assert_allclose(ours, numpy_grok(run.model, params, tokens_bt), rtol=2e-4, atol=2e-4)
