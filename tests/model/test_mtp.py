"""Multi-token prediction against a plain form of DeepSeek-V3's equations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config.sublayers import Context
from maxbench.model import layer_stack, transformer
from maxbench.model.layers import rope_angles
from maxbench.sharding import mesh
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve
from tests.kinds import dense, routed


def plain_loss(m, w, tokens_bt):
    """L_main + 0.1 mean L_MTP (arXiv:2412.19437, equations 21 to 25) of tokens [b, t + 1 + uses],
    each use with the same weights."""
    rms = lambda x, s: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + m.norm_eps) * s["scale"]
    t = tokens_bt.shape[1] - 1 - m.mtp_layers
    rope = rope_angles(m, jnp.arange(t))
    layer = lambda kind, w, x: transformer.Block(m, kind).apply({"params": w}, x, Context(rope))[0]
    embedded = lambda tokens: w["embed"]["w"][tokens]

    def cross_entropy(x, norm, targets_bt):
        log_p = jax.nn.log_softmax(rms(x, norm) @ w["head"]["w"])
        return -jnp.mean(jnp.take_along_axis(log_p, targets_bt[..., None], -1))

    x = embedded(tokens_bt[:, :t])
    for kind, weights in zip(m.per_layer, layer_stack.unstack(m, w["layers"]), strict=True):
        x = layer(kind, weights, x)
    main = cross_entropy(x, w["head"]["norm"], tokens_bt[:, 1 : t + 1])
    p, extra = w["mtp"]["input"], []
    for k in range(1, m.mtp_layers + 1):
        after = rms(embedded(tokens_bt[:, k : t + k]), p["embed_norm"])
        merged = jnp.concatenate([after, rms(x, p["hidden_norm"])], -1)
        x = merged @ p["projection"]["w"].reshape(2 * m.embed, m.embed)
        x = layer(m.mtp_layer, w["mtp"]["layer"], x)
        extra.append(cross_entropy(x, w["mtp"]["head_norm"], tokens_bt[:, k + 1 : t + k + 1]))
    return main + 0.1 * sum(extra) / len(extra)


@pytest.mark.parametrize(
    "mtp",
    [
        pytest.param({"mtp_layers": 1}, marks=pytest.mark.exhaustive),
        {"mtp_layers": 2, "mtp_block": dense(48)},
    ],
)
def test_loss_and_gradients_equal_the_published_form(mtp):
    overrides = {f"model.{name}": value for name, value in mtp.items()} | {
        "model.layer_groups": ((1, (dense(96),)), (1, (routed(64, 4),))),
        "model.capacity_factor": 0.0,
        "model.aux_loss": 0.0,
        "model.init_std": 0.1,
        "precision.grads": "fp32",
    }
    run = resolve("grok1_314b", "tiny", overrides, dtype="fp32", layers=2, seq=16, mbs=1, gbs=2)
    step = Step(run, mesh.make_mesh(run.layout))
    params = step.init()["params"]
    batch = data.draw(run, 3)
    batches = [data.microbatch(run, batch, micro) for micro in range(2)]
    tokens, *after = (jnp.concatenate(x) for x in zip(*batches, strict=True))
    for before, shifted in itertools.pairwise([tokens, *after]):
        np.testing.assert_array_equal(before[:, 1:], shifted[:, :-1])
    tokens_bt = jnp.concatenate([tokens, *(x[:, -1:] for x in after)], 1)
    plain = jax.jit(jax.value_and_grad(lambda w: plain_loss(run.model, w, tokens_bt)))
    loss, expected = plain(params)
    grads, out, _ = jax.jit(step.gradients)(params, batch)
    assert float(out["loss"] + 0.1 * out["mtp_loss"]) == pytest.approx(float(loss), rel=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, grads, expected)
