"""GEMM rates of devices, and which host is slow."""

import jax
import pytest

from maxbench.distributed import stragglers


def test_gemm_of_each_device_runs_on_a_matrix_of_its_own(monkeypatch):
    devices, device_put = jax.local_devices()[:2], jax.device_put
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    puts = []
    monkeypatch.setattr(
        jax, "device_put", lambda x, device: device_put(puts.append((x, device)) or x, device)
    )
    assert min(stragglers.gemm_tflops()) > 0
    assert [device for _, device in puts] == devices
    assert {type(x).__name__ for x, _ in puts} == {"ArrayImpl"}


EVEN = {f"n{i}": 750.0 + i for i in range(8)}


@pytest.mark.parametrize(
    ("tflops", "slow"),
    [
        (EVEN, []),
        (EVEN | {"n3": 600.0, "n5": 500.0}, ["n5", "n3"]),
        ({"n0": 750.0}, []),
        ({"n0": 750.0, "n1": 600.0}, ["n1"]),
        ({"n0": 750.0, "n1": 680.0}, []),
    ],
)
def test_hosts_far_below_the_median_are_slow(tflops, slow):
    assert stragglers.slow_hosts(tflops) == slow
