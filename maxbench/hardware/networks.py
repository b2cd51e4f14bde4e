"""Networks between NVLink domains as data: networks.toml, with the source of every figure."""

import dataclasses
import functools
import pathlib
import tomllib
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A network, as figures of one GPU.

    A pod is a set of GPUs that reach each other through one level of switches, at full rate. The
    sum of the adapters of a pod is `oversubscription` times as fast as the links that leave it. In
    a rail-optimized network each GPU of a node has a switch of its own, and a pod is all nodes at
    those switches.
    """

    gbytes_per_s: float  # GB/s, one direction
    efficiency: float  # fraction of gbytes_per_s that large messages reach
    latency_us: float  # per step of a collective
    pod_gpus: int = 0  # 0 = all
    oversubscription: float = 1.0

    @property
    def figures(self) -> dict[str, Any]:
        """The same as keys of a GPU type's table."""
        of_efficiency = {"network": self.efficiency, "network_us": self.latency_us}
        return {
            "network_gbytes_per_s": self.gbytes_per_s,
            "pod_gpus": self.pod_gpus,
            "oversubscription": self.oversubscription,
            "efficiency": of_efficiency,
        }


@functools.cache
def networks() -> dict[str, Network]:
    """All networks by name."""
    text = pathlib.Path(__file__).with_suffix(".toml").read_text()
    return {name: Network(**values) for name, values in tomllib.loads(text).items()}
