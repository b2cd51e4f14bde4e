"""The network against Hugging Face's Llama and Nemotron, and xAI's Grok-1 in numpy."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.model import hugging_face, transformer
from maxbench.run import checkpoint, restore
from maxbench.sharding import mesh
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve
from tests.kinds import dense, routed

GOLDEN = pathlib.Path(__file__).with_name("golden")
LLAMA = dict(embed=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=64, layers=2)
CASES = {
    "llama": LLAMA,
    "llama_tied": LLAMA | dict(tied=True),
    "llama31": LLAMA | dict(embed=64, head_dim=16, rope_base=5e5, rope_factor=8.0, rope_context=64),
    "nemotron": LLAMA
    | dict(embed=48, head_dim=12, mlp=96, act="relu2", norm="layernorm1p", rope_fraction=0.5),
}


def logits(m: Model, params, tokens_bt):
    return np.asarray(jax.jit(transformer.Transformer(m).apply)({"params": params}, tokens_bt))


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_face(name):
    hf = dict(np.load(GOLDEN / f"{name}.npz"))
    m = Model(name="golden", size=name, **CASES[name])
    tokens_bt, expected, _ = (hf.pop(x) for x in ("tokens", "logits", "versions"))
    params = hugging_face.from_hugging_face(m, hf)
    np.testing.assert_allclose(logits(m, params, tokens_bt), expected, atol=1e-4)
    short = logits(m, params, tokens_bt[:1, :7])  # any length; causal
    np.testing.assert_allclose(short, expected[:1, :7], atol=1e-4)
    converted = hugging_face.to_hugging_face(m, params)
    assert converted.keys() == hf.keys()
    jax.tree.map(np.testing.assert_array_equal, converted, hf)


def numpy_grok(m: Model, w, tokens_bt):
    """Grok-1 as released: norms before and after sublayers, softcap 30, top-2 after a softmax."""
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


GROK = "model.layers.1.moe_block.experts.3"


@pytest.mark.exhaustive
def test_xai_preset_equals_the_released_grok():
    """And Hugging Face's names refer to the tensors that numpy_grok() uses by that name."""
    m = resolve("grok1_314b", "xai,tiny", layers=2).model
    m = dataclasses.replace(m, init_std=0.2)
    random = np.random.default_rng(0)
    tokens_bt = random.integers(0, m.vocab, (2, 16))
    params = transformer.Transformer(m).init(jax.random.key(0), tokens_bt)["params"]
    noisy = lambda x: np.float64(x) * (1 + 0.2 * random.standard_normal(x.shape))
    params = jax.tree.map(noisy, params)
    actual = logits(m, jax.tree.map(jnp.float32, params), tokens_bt)
    np.testing.assert_allclose(actual, numpy_grok(m, params, tokens_bt), rtol=2e-4, atol=2e-4)
    tensors = hugging_face.to_hugging_face(m, params)
    up = params["layers"]["mlp"]["up"][1, 3]
    np.testing.assert_array_equal(tensors[f"{GROK}.linear.weight"], up[:, 0].T)  # input of gelu
    np.testing.assert_array_equal(tensors[f"{GROK}.linear_v.weight"], up[:, 1].T)
    converted = hugging_face.from_hugging_face(m, tensors, np.float64)
    jax.tree.map(np.testing.assert_array_equal, converted, params)


@pytest.mark.exhaustive
def test_module_has_the_weights_and_the_loss_of_training():
    """With layer groups."""
    groups = (1, (dense(192),)), (1, (routed(64, 4),))
    overrides = {"model.layer_groups": groups, "model.value_dim": 8}
    run = resolve("grok1_314b", "tiny", overrides, dtype="fp32", layers=2, seq=16, mbs=2)
    step = Step(run, mesh.make_mesh(run.layout))
    params, batch = step.init()["params"], data.draw(run, 3)
    tokens_bt, targets_bt = data.microbatch(run, batch, 0)
    _, out, _ = jax.jit(step.gradients)(params, batch)
    logits_btv = logits(run.model, params, tokens_bt)
    loss_bt = optax.softmax_cross_entropy_with_integer_labels(logits_btv, targets_bt)
    assert float(loss_bt.mean()) == pytest.approx(float(out["loss"]), rel=1e-5)
    module = transformer.Transformer(run.model)
    initialized = module.init(jax.random.key(0), tokens_bt[:1, :3])["params"]
    assert jax.tree.map(jnp.shape, initialized) == jax.tree.map(jnp.shape, params)


@pytest.mark.exhaustive
def test_weights_are_loaded_from_a_checkpoint_of_a_pipeline(tmp_path):
    """Whose stacked layers are in another order, with two empty slots."""
    runs = (
        resolve("llama31_8b", "tiny", dtype="fp32", layers=6, gbs=8, **axes)
        for axes in (dict(mbs=8), dict(pp=2, vp=2, mbs=1))
    )
    single, pipeline = (Step(run, mesh.make_mesh(run.layout)) for run in runs)
    with checkpoint.Saver(tmp_path, pipeline.run, dict) as saver:
        saver.save(pipeline.init())
    about = json.loads((tmp_path / "0/about/run.json").read_text())
    assert about["stacks"] == [["", ["mixer", "channel"], [-1, 0, 3, 4, 1, 2, 5, -1]]]
    m, params = restore.weights(str(tmp_path))
    assert m == single.run.model
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(single.init()["params"]))


def test_unsuitable_tensors_are_refused_by_name():
    m = Model(name="golden", size="llama", **LLAMA)
    hf = dict(np.load(GOLDEN / "llama.npz"))
    hf = {name: x for name, x in hf.items() if name not in ("tokens", "logits", "versions")}
    key = "model.layers.1.self_attn.k_proj.weight"
    tied = dataclasses.replace(m, tied=True)
    for model, tensors, text in (
        (m, {k: v for k, v in hf.items() if k != key}, f"{key} is missing"),
        (m, hf | {key: hf[key].T}, rf"{key} has shape \(32, 16\).*needs \(16, 32\)"),
        (m, hf | {"rotary.inv_freq": hf[key]}, "rotary.inv_freq: golden llama has no such"),
        (tied, hf, "lm_head.weight is not model.embed_tokens.weight"),
        (dataclasses.replace(m, value_dim=4), hf, "no supported Hugging Face format"),
    ):
        with pytest.raises(UserError, match=text):
            hugging_face.from_hugging_face(model, tensors)


@pytest.mark.core
def test_code_blocks_of_the_how_to_run(tmp_path, monkeypatch):
    """The code blocks of docs/how-to/use_the_network.md run one after another."""
    page = pathlib.Path("docs/how-to/use_the_network.md").read_text()
    monkeypatch.syspath_prepend(pathlib.Path.cwd())
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert names["logits"].shape == (1, 7, names["model"].vocab)
