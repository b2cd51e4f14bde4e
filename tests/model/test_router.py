"""Routing against an independent form in numpy, and forced balance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config.errors import UserError
from maxbench.model import experts, router
from tests.conftest import resolve

GROK = resolve("grok1_314b", "tiny").model.per_layer[0].channel
DEEPSEEK = dataclasses.replace(
    GROK, experts=16, top_k=4, router="sigmoid", router_groups=4, router_groups_top=2,
    router_scale=2.5,
)  # fmt: skip
KIMI = dataclasses.replace(DEEPSEEK, router_groups=1, router_groups_top=1, router_scale=2.827)


def deepseek_routing(m, logits, bias):
    """One token at a time, as in arXiv:2412.19437 and the published inference code: weights by
    expert, dense."""
    weights = np.zeros_like(logits)
    for j, token in enumerate(np.float64(logits)):
        scores = 1 / (1 + np.exp(-token))
        choice = (scores + bias).reshape(m.router_groups, -1)
        groups = np.argsort(-np.sort(choice, 1)[:, -2:].sum(1))[: m.router_groups_top]
        allowed = [e for e in range(m.experts) if e // choice.shape[1] in groups]
        best = sorted(allowed, key=lambda e: -choice.flat[e])[: m.top_k]
        for e in best:
            weights[j, e] = m.router_scale * scores[e] / scores[best].sum()
    return weights


@pytest.mark.parametrize("m", [DEEPSEEK, KIMI], ids=["groups", "one group"])
def test_sigmoid_router_equals_the_published_form(m):
    rng = np.random.default_rng(0)
    logits = np.float32(rng.normal(size=(64, m.experts)))
    bias = np.float32(rng.normal(size=m.experts) / 4)
    gate, expert, probs = jax.device_get(router.route(m, logits, bias))
    weights = np.zeros_like(logits)
    np.put_along_axis(weights, expert, gate, 1)
    np.testing.assert_allclose(weights, deepseek_routing(m, logits, bias), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-5)
    unbiased = jax.device_get(router.route(m, logits))[1]
    assert (np.sort(unbiased) != np.sort(expert)).any()


def test_bias_rises_for_experts_with_few_tokens_and_sinks_for_the_others():
    m, tokens = KIMI, np.arange(16)
    expected = np.where(tokens < tokens.mean(), 0.001, -0.001)
    np.testing.assert_allclose(router.update_bias(jnp.zeros(16), tokens, 0.001), expected)
    counted = router.tokens_per_expert(m, jnp.array([[0, 1, 2, 3], [3, 4, 5, 15]]))
    assert counted.tolist() == [1, 1, 1, 2, 1, 1, *[0] * 9, 1]
    assert not router.update_bias(jnp.zeros(16), jnp.full(16, 3), 0.001).any()


def test_bias_balances_skewed_scores():
    m = dataclasses.replace(KIMI, experts=8, top_k=2)
    logits = jax.random.normal(jax.random.key(0), (512, 8)) + jnp.arange(8) / 4

    def step(bias, _):
        tokens = router.tokens_per_expert(m, router.route(m, logits, bias)[1])
        return router.update_bias(bias, tokens, 0.01), jnp.max(tokens) / jnp.mean(tokens)

    imbalance = jax.lax.scan(step, jnp.zeros(8), None, length=60)[1]
    assert imbalance[0] > 1.4
    assert imbalance[-1] < 1.15


UNEVEN = dataclasses.replace(KIMI, top_k=6)  # of 16 experts, as Nemotron 3's 6 of 128


@pytest.mark.parametrize(
    "m", [DEEPSEEK, KIMI, GROK, UNEVEN], ids=["groups", "one group", "grok", "uneven"]
)
def test_balanced_choice_gives_each_expert_as_many_tokens_of_each_window(m):
    chosen = np.asarray(router.balanced_choice(m, 10 * m.balanced_window))
    windows = np.sort(chosen.reshape(10, -1), 1)
    each_expert = np.repeat(np.arange(m.experts), m.balanced_uses)
    np.testing.assert_array_equal(windows, np.tile(each_expert, (10, 1)))
    assert all(len(set(token)) == m.top_k for token in chosen.tolist())
    groups = np.sort(chosen // (m.experts // m.router_groups), 1).reshape(len(chosen), -1)
    each = m.top_k // m.router_groups_top
    assert (groups.reshape(len(chosen), -1, each) == groups[:, ::each, None]).all()
    assert len(np.unique(chosen, axis=0)) > len(chosen) / 3  # random, not one pattern
    np.testing.assert_array_equal(router.balanced_choice(m, 7), chosen[:7])


@pytest.mark.parametrize("m", [DEEPSEEK, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("multiple", [pytest.param(8, marks=pytest.mark.exhaustive), 32])
def test_balanced_slots_hold_every_choice(m, multiple):
    """Sequences that are no whole windows, too."""
    for tokens in (24, 26):
        m = dataclasses.replace(m, force_balance=True)
        expert, place = experts.balanced_tokens(m, 3, tokens)
        slots = m.balanced_slots(3, tokens, 1, 1, multiple)
        slot, token = experts.assign_balanced_slots(m, slots, expert, place)
        used = 3 * -(-tokens // m.balanced_window) * m.balanced_uses
        assert slots % multiple == 0
        assert 0 <= slots - used < multiple
        assert place.max() < used
        np.testing.assert_array_equal(
            token.reshape(-1)[slot], np.tile(np.arange(3 * tokens)[:, None], m.top_k)
        )
        assert (token >= 0).sum() == slot.size


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"router_groups": 3}, "router_groups=3; router_groups that work: 1, 2, 4, 8, 16"),
        ({"router_groups": 8, "router_groups_top": 1}, "top_k=4 of experts=16"),
        ({"router": "softmax_topk"}, "need model.router=sigmoid"),
        ({"force_balance": True, "top_k": 3}, "top_k=3 must divide the experts"),
    ],
)
def test_bad_routing_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(DEEPSEEK, **fields).check()
