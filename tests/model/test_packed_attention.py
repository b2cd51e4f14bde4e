"""cuDNN's attention within packed documents: with a CPU's form of its sequence packing, output and
gradients are those of the XLA kernel; the calls that the GPU compiler gets; where it is chosen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config import loop_lengths
from maxbench.config import resolve as resolving
from maxbench.config.errors import UserError
from maxbench.config.run import Device
from maxbench.cost_model import absent_gpus, costs, hlo, memory, simulate
from maxbench.cost_model.meaning import Meaning
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.model import attention, packed_attention
from tests import packing
from tests.conftest import resolve

SEQ = 96


def draw_documents(sequences: int, probability: float) -> jax.Array:
    """documents_bt; the first sequence is one document, the second has documents of one token."""
    random = np.random.default_rng(0)
    ends = random.random((sequences, SEQ)) < probability
    ends[0] = False
    if sequences > 1 and probability:
        ends[1, [0, 1, 2, SEQ - 1]] = True
    return jnp.asarray(np.cumsum(ends, 1) - ends, jnp.int32)


CASES = {
    "one document": (0.0, (8, 8, 8), {}, 128),
    "several calls": (0.2, (8, 8, 8), {}, 128),
    "one call, and empty documents": (0.1, (8, 8, 8), {}, 2),
    "window": (0.1, (8, 8, 8), {"window": 5}, 128),
    "wide keys": (0.1, (24, 24, 16), {"scale": 0.3}, 16),
    "wide values": (0.1, (8, 8, 16), {}, 16),
}


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_the_xla_kernel(case, sequences, monkeypatch):
    probability, widths, options, tile = CASES[case]
    monkeypatch.setattr(packed_attention, "TILE", tile)
    calls = packing.use(monkeypatch)
    random = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    shapes = [(sequences, SEQ, h, width) for h, width in zip((4, 2, 2), widths, strict=True)]
    args = *(draw(*shape) for shape in shapes), draw(4)
    weigh, documents = draw(sequences, SEQ, 4, widths[2]), draw_documents(sequences, probability)

    def outputs(kind):
        def weighted(*args):
            o = attention.attend(*args, documents, kind=kind, **options)
            return jnp.sum(weigh * o), o

        return jax.jit(jax.grad(weighted, range(4), has_aux=True))(*args)

    found, expected = outputs("cudnn"), outputs("xla")
    # Forward and backward: the first call, and that of the loop.
    assert calls == [sequences * max(2, SEQ // tile)] * 4
    largest = lambda x: float(jnp.abs(x).max())
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * largest(b))
    jax.tree.map(close, found, expected)


def test_a_call_takes_as_many_documents_as_the_scratch_memory_allows():
    per_sequence = packed_attention.documents_per_sequence
    # Llama 3.1 8B: 256 MiB for a document of 32 heads of 128 and 8,192 tokens, in fp32 and twice in
    # 16 bits.
    assert per_sequence(8192, 1, 32, 128) == 8
    assert per_sequence(8192, 2, 32, 128) == 4
    assert per_sequence(8192, 1, 4, 128) == 64  # of 128 tokens and more
    assert per_sequence(131072, 4, 32, 128) == per_sequence(32, 1, 1, 8) == 2


# Widths of keys and values, and the kernel for documents on Hopper and on Blackwell.
KERNELS = {
    (64, 64): ("cudnn", "cudnn"),
    (128, 64): ("cudnn", "cudnn"),
    (192, 128): ("cudnn", "xla"),
    (192, 192): ("cudnn", "xla"),
    (264, 264): ("xla", "xla"),
}


@pytest.mark.parametrize("widths", KERNELS)
def test_kernel_is_cudnn_if_the_gpu_packs_heads_of_these_widths(widths):
    mixer = resolve("llama2_70b").model.per_layer[0].mixer
    m = dataclasses.replace(mixer, head_dim=widths[0], value_dim=widths[1])
    kernel = lambda *x: resolving.cudnn_kernel(m, "bf16", x, documents=True)
    assert (kernel(9, 0), kernel(10, 0)) == (kernel(9, 0), kernel(10, 3)) == KERNELS[widths]
    assert kernel(8, 0) == kernel(12, 0) == "xla"


def test_documents_that_cudnn_does_not_keep_apart_are_refused():
    ampere = Device("gpu", (8, 0))
    settings = {"train.document_end": 7}
    assert resolve("llama31_8b", "", settings, device=ampere).train.attention == "xla"
    with pytest.raises(UserError, match=r"documents apart.*8\.0; use train\.attention=xla"):
        resolve("llama31_8b", "", settings | {"train.attention": "cudnn"}, device=ampere)
    hopper = Device("gpu", (9, 0))
    assert resolve("llama31_8b", "", settings, device=hopper).train.attention == "cudnn"
    long = dict(seq=2**17, mbs=8, gbs=64)
    with pytest.raises(UserError, match="mbs=8 sequences of 131,072 tokens are 4,294,967,296"):
        resolve("llama31_8b", "", settings, device=hopper, **long)
    resolve("llama31_8b", "", settings | {"train.attention": "xla"}, device=hopper, **long)


def compiled(gpu_type: str, seq: int, widths: tuple[int, int, int], documents: bool = True):
    """Forward and backward pass of two sequences on a GPU that is absent."""
    run = resolve("llama31_8b", gpus=8, gpu_type=gpu_type)
    device = absent_gpus.devices(run.gpu, 8)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    args = [array(jnp.bfloat16, 2, seq, h, k) for h, k in zip((32, 8, 8), widths, strict=True)]
    args += [array(jnp.bfloat16, 32), array(jnp.int32, 2, seq) if documents else None]
    layer = jax.named_scope("layer")  # JAX writes jvp() around the outermost scope
    attend = layer(lambda *x: jnp.sum(attention.attend(*x, kind="cudnn")))
    return jax.jit(jax.grad(attend, (0, 1, 2, 3))).lower(*args).compile()


@pytest.mark.gpu_compile
@pytest.mark.parametrize("gpu_type", ["h100", "b200"])
def test_calls_of_the_compiled_program(gpu_type):
    """Documents of a call, their mask, price and scratch memory; and no [seq, seq] array:
    temporaries grow with seq."""
    short, long = (compiled(gpu_type, seq, (128, 128, 128)) for seq in (4096, 8192))
    temporaries = [x.memory_analysis().temp_size_in_bytes for x in (short, long)]
    assert temporaries[1] < 2.1 * temporaries[0]
    program = hlo.parse(long.as_text())
    calls = [op for c in program.computations.values() for op in c.ops if "fmha" in op.target]
    names = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
    assert sorted(op.target for op in calls) == sorted(names * 2)
    for call in calls:
        assert '"mask_type": "PADDING_CAUSAL"' in call.attrs
        assert '"max_seg_per_batch": 4' in call.attrs
    mib = 2**20
    assert memory.packed_attention_bytes(program) == 8 * (256 * mib + mib)

    def attention_s(program, **names):
        gpu = costs.Costs(GPU_TYPES[gpu_type], {"devices": 1})
        timeline = simulate.simulate(program, gpu, Meaning(**names))
        assert not timeline.unknown
        return timeline.compute["attention"]

    whole = hlo.parse(compiled(gpu_type, 8192, (128, 128, 128), documents=False).as_text())
    assert memory.packed_attention_bytes(whole) == 0
    further_calls = {loop_lengths.DOCUMENT_GROUPS: 0}
    packed_s = attention_s(program, trip_counts=further_calls)
    assert packed_s == pytest.approx(attention_s(whole))


@pytest.mark.gpu_compile
def test_narrower_values_are_padded():
    """Latent attention's, on Hopper: keys and values have one offset."""
    program = hlo.parse(compiled("h100", 1024, (192, 192, 128)).as_text())
    calls = [
        [x.shape.dims[-1] for x in c.operands(op)[:3]]
        for c in program.computations.values()
        for op in c.ops
        if "fmha" in op.target
    ]
    assert calls == [[192] * 3] * 4
