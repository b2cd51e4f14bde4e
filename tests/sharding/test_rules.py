"""Sharding rules: weights, and the counts of a layout."""

import dataclasses
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from maxbench.config.run import AXES
from maxbench.sharding import mesh, rules
from tests.conftest import layout


@given(
    names=st.lists(st.sampled_from(sorted(rules.RULES)), min_size=1, max_size=4, unique=True),
    sizes=st.lists(st.sampled_from([1, 3, 8, 64, 96]), min_size=4, max_size=4),
    mesh_shape=st.fixed_dictionaries({a: st.sampled_from([1, 2, 4]) for a in AXES}),
)
def test_shards_are_equal_and_each_axis_is_used_once(names, sizes, mesh_shape):
    shards = lambda axes: math.prod(mesh_shape[a] for a in axes)
    shape = [size * shards(rules.RULES[n]) for n, size in zip(names, sizes, strict=False)]
    axes = [a for n in names for a in rules.RULES[n]]
    if len(set(axes)) < len(axes):
        return  # no weight has two dims on one mesh axis
    sharding = rules.shard_weight(tuple(names), tuple(shape), mesh_shape)
    used = [*itertools.chain(*sharding.compute_axes, *sharding.zero1_axes), *sharding.psum_axes]
    assert sorted(used) == sorted(a for a in AXES if mesh_shape[a] > 1)
    for size, compute, zero in zip(shape, sharding.compute_axes, sharding.zero1_axes, strict=True):
        assert size % shards(compute + zero) == 0


def test_with_fsdp_ep_shards_weights_that_experts_share():
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 4, "ep_nodes": 2, "ep": 2, "dp": 2}
    dense, experts = ("embed", "mlp"), ("experts", "expert_embed", "mlp_inputs", "mlp")
    axes = lambda names, sizes: rules.shard_weight(names, (256,) * len(names), sizes)
    sharded = axes(dense, sizes)
    assert sharded.compute_axes == (("fsdp", "ep_nodes", "ep"), ())
    assert (*itertools.chain(*sharded.zero1_axes),) == ("dp",)
    assert axes(experts, sizes).compute_axes == (("ep_nodes", "ep"), ("fsdp",), (), ())
    # Without fsdp, ranks of ep have whole compute weights, and shard the master weights (ZeRO-1).
    zero1 = axes(dense, sizes | {"fsdp": 1})
    assert zero1.compute_axes == ((), ())
    assert {*itertools.chain(*zero1.zero1_axes)} == {"dp", "ep_nodes", "ep"}


def test_counts_of_a_layout():
    a = layout(dp=2, fsdp=4, ep=1, cp=2, tp=2, mbs=2, gbs=64)
    assert (a.gpus, a.shards, a.microbatches) == (32, 8, 4)


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes of a GPU of a cluster that a mesh reads; each node is a slice of its own."""

    id: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    client: None = None
    process_index = property(lambda self: self.id // 8)
    slice_index = property(lambda self: self.id // 8)


def test_a_mesh_over_several_nodes_keeps_their_order():
    made = mesh.make_mesh(layout(dp=2, tp=8), [Device(i) for i in range(16)])
    assert dict(made.shape)["tp"] == 8
    assert [d.id for d in made.devices.flat] == list(range(16))
    assert all(len({d.slice_index for d in row}) == 1 for row in made.devices.reshape(2, 8))
