"""Plans of programs that anyone wrote: of a factory, and of the text of a compiled program."""

import contextlib
import dataclasses
import io
import json
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import custom_partitioning, mesh_utils
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import maxbench as mb
from maxbench.cli import entry
from maxbench.config.errors import UserError
from maxbench.cost_model import absent_gpus, hlo, hlo_files
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import explain, op_names

pytestmark = [
    # Of the kernel below, from jax 0.12: a program's own kernels may be of any backend.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
    pytest.mark.core,  # its errors are recognized by their words, which jax changes
    pytest.mark.gpu_compile,
    pytest.mark.xdist_group("programs"),  # which one worker compiles
]
PAGE = pathlib.Path("docs/how-to/plan_any_program.md")
GPUS, SIZE, EXPERTS = 8, 2048, 4
SPLIT = P("x")


def array(devices, shape, spec=SPLIT, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    mesh = Mesh(np.array(devices), ("x",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def double(x_ref, y_ref):
    y_ref[...] = x_ref[...] * 2


def kernel(x):
    params, whole = triton.CompilerParams(), jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, whole, compiler_params=params, name="double_kernel")(x)


def unknown(devices):
    """A loop of unknown length, a conditional, a Pallas kernel and ragged_dot."""

    def step(x, w, sizes, n):
        with jax.named_scope("decode"):
            x = jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x) @ w[0], x)
        with jax.named_scope("choose"):
            x = jax.lax.cond(n > 3, lambda x: x @ w[1] @ w[2], lambda x: x, x)
        with jax.named_scope("moe"):
            x = jax.lax.ragged_dot(x, w, sizes)
        mesh = Mesh(np.array(devices), ("x",))
        run = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        return run(x)

    return jax.jit(step), (
        array(devices, (GPUS * 64, SIZE)),
        array(devices, (EXPERTS, SIZE, SIZE), P()),
        array(devices, (EXPERTS,), P(), jnp.int32),
        array(devices, (), P(), jnp.int32),
    )


@pytest.fixture(scope="module")
def plan():
    return mb.plan_program(unknown, gpus=GPUS, explain=True)


def planned(*words: str) -> tuple[int, dict]:
    """`maxbench plan WORDS --json`."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = entry.run("plan", [*words, "--json"])
    return code, json.loads(output.getvalue())


def test_the_example_of_the_page_is_planned_by_its_command_in_30_s(tmp_path):
    text = PAGE.read_text()
    file = tmp_path / "my_step.py"
    file.write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    words = re.search(r"^maxbench plan (--program .*)$", text, re.MULTILINE)[1].split()
    words[words.index("my_step.py:factory")] = f"{file}:factory"
    start = time.process_time()
    code, found = planned(*words)
    assert time.process_time() - start < 30
    assert code == 0
    assert found["axes"] == {"fsdp": 64}
    assert found["memory"]["results"] < 2**20  # parameters are donated, and results in their place
    weights = 32000 * 4096 + 32 * (4 * 4096**2 + 2 * 4096 * 14336)
    assert found["memory"]["arguments"] == pytest.approx(4 * weights / 64, rel=0.01)
    kinds = {x["kind"]: x for x in found["communication"]}
    assert kinds["all-gather"]["bytes"] == pytest.approx(4 * weights, rel=0.05)  # twice, in bf16
    operations = found["explain"]["operations"]
    assert {"backward mlp", "forward attn"} < {x["name"] for x in operations}
    assert all("my_step.py:" in x["source"] for x in operations[:5])
    assert not found["unknown"]


def test_what_has_no_price_is_named_with_its_share(plan):
    counted = {x.name: x.counted for x in plan.best.timeline.unknown.values()}
    assert counted == {
        "decode": "one trip",
        "choose": "the longest branch",
        "double_kernel": "its bytes",
    }
    text = str(plan)
    assert re.search(r"loop decode of unknown length, counted as one trip, .* of the step", text)
    assert "conditional choose, counted with the longest of 2 branches" in text
    assert re.search(
        r"kernel double_kernel without a price, 1 runs, at least .* by its bytes", text
    )
    assert re.search(r"^at least .* s a step", text, re.MULTILINE)
    assert plan.best.timeline.compute["unpriced"] > 0


def test_what_has_no_price_can_be_given(plan):
    given = mb.plan_program(
        unknown, gpus=GPUS, trip_count={"decode": 100}, branch=["choose=1,0"],
        price={"double_kernel": 0.5},
    )  # fmt: skip
    assert not given.best.timeline.unknown
    assert given.best.timeline.compute["priced"] == 0.5
    in_loop = (x for x in plan.explanation.operations if x.name == "decode" and x.kind == "gemm")
    gemms = [p.best.timeline.compute["gemm"] for p in (plan, given)]
    assert gemms[1] - gemms[0] == pytest.approx(99 * sum(x.seconds for x in in_loop), rel=0.5)
    never = mb.plan_program(unknown, gpus=GPUS, branch={"choose": (0, 1)})
    assert never.best.step_s < plan.best.step_s


def test_ragged_dot_is_named_and_costs_what_it_is_compiled_to(plan):
    """On jax 0.10 all rows by all experts, on each GPU."""
    moe = [x for x in plan.explanation.operations if x.name == "moe" and x.kind == "gemm"]
    assert sum(x.seconds for x in moe) > 0
    flops = sum(x.tflops * x.seconds for x in moe) * 1e12
    least = 2 * 64 * SIZE * SIZE
    assert flops > 0.99 * least
    if jax.__version__.startswith("0.10."):
        assert flops == pytest.approx(GPUS * EXPERTS * least, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trip_count": {"loop": 3}}, "trip_count='loop': the program has decode"),
        ({"branch": {"choose": (0.2, 0.3, 0.5)}}, "has 3 shares, and the conditional has 2"),
        ({"branch": {"choose": (0.2, 0.3)}}, "the shares of choose must sum to 1"),
        ({"price": {"decode": 1.0}}, "price='decode': the program has double_kernel"),
        ({"price": ["double_kernel"]}, "price='double_kernel' must be NAME=VALUE"),
        ({"gpu_type": "h10"}, "did you mean 'h100'"),
    ],
)
def test_a_wrong_name_or_value_says_what_there_is(options, message, plan):
    with pytest.raises(UserError, match=re.escape(message)):
        mb.plan_program(lambda devices: unknown(devices), gpus=GPUS, **options)


def multiply(x):
    return x @ x.T


def real(devices):
    return jax.jit(multiply, in_shardings=array(devices, (8, 8)).sharding), (jnp.ones((8, 8)),)


def put(devices):
    return jax.jit(multiply), (jax.device_put(jnp.ones((8, 8)), array(devices, (8, 8)).sharding),)


def present(devices):
    return jax.jit(multiply), (jax.device_put(jnp.ones((8, 8)), jax.devices("gpu")[0]),)


def half(devices):
    return jax.jit(multiply), (array(devices[:4], (8, 8)),)


def unsharded(devices):
    return jax.jit(multiply), (jax.ShapeDtypeStruct((8, 8), jnp.float32),)


def too_many(devices):
    np.array(devices).reshape(4, 4)


def uneven(devices):
    return jax.jit(multiply), (array(devices, (7, 8)),)


def wrong_shapes(devices):
    return jax.jit(lambda x: x @ x), (array(devices, (8, 16)),)


def nothing(devices):
    return devices


def unknown_option(devices):
    return jax.jit(multiply, compiler_options={"xla_gpu_no": 1}), (array(devices, (8, 8)),)


def on_cpus(devices):
    with jax.set_mesh(Mesh(np.array(devices), ("x",))):
        jax.random.key(0)


def in_a_partitioner(devices):
    """XLA's error repeats Python's traceback."""

    @custom_partitioning.custom_partitioning
    def function(x):
        return x

    def partition(mesh, shapes, result):
        raise ValueError("no rule for this mesh")

    function.def_partition(partition, sharding_rule="i -> i")
    return jax.jit(function), (array(devices, (8,)),)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (real, "an argument is a real array: use jax.ShapeDtypeStruct"),
        (put, r"test_programs.py:\d+.*allocates arrays on absent GPUs: use jax.ShapeDtypeStruct"),
        (present, "asks for GPUs that are present: use the devices that it is given"),
        (half, "on 4 of them; give each jax.ShapeDtypeStruct a NamedSharding"),
        (unsharded, "on 0 of them; give each jax.ShapeDtypeStruct a NamedSharding"),
        (too_many, "its mesh must have all devices that it is given"),
        (uneven, "dimension size is 7.*change the shape or the mesh"),
        (wrong_shapes, r"wrong_shapes with 8 devices \(test_programs.py:\d+\): TypeError"),
        (nothing, "must return a jitted function and a tuple"),
        (unknown_option, "remove the compiler option"),
        (on_cpus, r"allocates arrays on absent GPUs: use jax.ShapeDtypeStruct"),
        (in_a_partitioner, r"custom_partitioner: ValueError: no rule for this mesh$"),
    ],
)
def test_an_error_is_one_line_with_its_place_and_remedy(factory, message):
    with pytest.raises(UserError, match=message) as error:
        mb.plan_program(factory, gpus=GPUS)
    assert "\n" not in str(error.value)


def test_a_factory_that_yields_is_compiled_inside_of_its_contexts():
    inside = []

    def factory(devices, spec=SPLIT):
        @custom_partitioning.custom_partitioning
        def function(x):
            return x * 2

        def partition(mesh, shapes, result):
            inside.append(jax.config.jax_default_matmul_precision)
            return mesh, lambda x: x * 2, result.sharding, (shapes[0].sharding,)

        function.def_partition(partition, sharding_rule="i -> i")
        with jax.default_matmul_precision("highest"):
            yield jax.jit(function), (array(devices, (1 << 20,), spec),)
            inside.append("end")

    outside = jax.config.jax_default_matmul_precision
    assert mb.plan_program(factory, gpus=GPUS).best.step_s > 0
    assert {*inside} == {"highest"}  # the contexts end, and the rest of the factory does not run
    assert jax.config.jax_default_matmul_precision == outside


def test_checks_of_a_present_gpu_answer_for_the_absent_one_and_are_restored():
    before = jax.default_backend(), mesh_utils.create_hybrid_device_mesh
    with absent_gpus.absent_gpus(GPU_TYPES["b200"], 16) as devices:
        assert jax.default_backend() == "gpu"
        assert jax.local_devices(backend="gpu")[0].compute_capability == "10.0"
        mesh = mesh_utils.create_hybrid_device_mesh((2, 4), (2, 1), devices)
        assert [[d.id for d in row] for row in mesh] == [*np.arange(16).reshape(4, 4).tolist()]
        shapes = [jax.ShapeDtypeStruct((1, 256, 8, 64), jnp.bfloat16)] * 3
        attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        jax.jit(attend).trace(*shapes)  # needs cuDNN
    assert (jax.default_backend(), mesh_utils.create_hybrid_device_mesh) == before


def test_a_search_ranks_layouts_and_keeps_the_reasons_of_others():
    def factory(devices, rows):
        return jax.jit(multiply), (array(devices, (rows, 512)),)

    found = mb.search_program(factory, [{"rows": 4096}, {"rows": 512}, {"rows": 7}], gpus=GPUS)
    assert found.best.layout == {"rows": 512}
    assert [p.layout["rows"] for p in found.ranked] == [512, 4096]
    assert "dimension size is 7" in found.failures["rows=7"]
    assert "rows=7: factory" in str(found)
    assert len(found.data()) == 2


def test_scaling_compiles_for_other_numbers_of_gpus(tmp_path):
    def factory(devices):
        return jax.jit(multiply), (array(devices, (16, 512)),)

    found = mb.plan_program(factory, gpus=GPUS, scaling=str(tmp_path / "x.svg"))
    assert [*found.points] == [2, 4, 8, 16]
    assert "dimension size is 16" in found.failures["32"]
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def dumped(plan, folder: pathlib.Path) -> pathlib.Path:
    """The files of --xla_dump_to for a plan's program, and a smaller one."""
    text = folder / "module_0007.jit_step.sm_9.0_gpu_after_optimizations.txt"
    text.write_text(plan.best.compiled.text)
    (folder / "module_0001.jit_small.sm_9.0_gpu_after_optimizations.txt").write_text("HloModule")
    return text


def test_the_text_of_a_program_has_the_same_step(plan, tmp_path):
    text = dumped(plan, tmp_path)
    code, found = planned("--hlo", str(tmp_path), "--gpus", str(GPUS))
    assert (code, found["name"]) == (0, text.name)
    assert found["step_s"] == pytest.approx(plan.best.step_s)
    assert found["memory_is_estimated"]
    assert found["memory"]["arguments"] == plan.best.memory.arguments
    c = plan.best.compiled
    assignment = f"""BufferAssignment:
allocation 0: size {c.arguments}, parameter 0, shape |f32[2]| at ShapeIndex {{}}:
 value: <1 x @0> (size=3,offset=0): f32[]
allocation 1: size 7, maybe-live-out:
allocation 2: size {c.temporaries}, preallocated-temp:
allocation 3: size 9, thread-local:
allocation 4: size 64, constant:
allocation 5: size 11, color 5, preallocated-temp:
"""
    pathlib.Path(str(text).replace(".txt", hlo_files.ASSIGNMENT)).write_text(assignment)
    _, found = planned("--hlo", str(text), "--gpus", str(GPUS))
    memory = {name: found["memory"][name] for name in ("arguments", "temporaries", "results")}
    assert memory == {"arguments": c.arguments, "temporaries": c.temporaries, "results": 7}
    assert found["memory"]["host"] == 11
    assert not found["memory_is_estimated"]


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        ("HloModule m\n", 8, "is_scheduled=true is missing"),
        ("hello", 8, "not a scheduled HLO module"),
        (None, 16, "is a program of 8 GPUs, not of 16: use --gpus 8"),
        (None, 0, "gpus is missing"),
    ],
)
def test_a_text_that_is_no_program_of_these_gpus(text, gpus, message, plan, tmp_path, capsys):
    file = tmp_path / "x.txt"
    file.write_text(plan.best.compiled.text if text is None else text)
    assert entry.run("plan", ["--hlo", str(file), *(["--gpus", str(gpus)] if gpus else [])]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plain", "llama31_8b-bf16", "llama31_8b-fp8"])
def test_programs_of_a_real_gpu_run_are_planned(name):
    """jax 0.11 on an H200: its texts have autotuned GEMMs."""
    file = f"benchmarks/results/h200/{name}.hlo.txt.gz"
    code, found = planned("--hlo", file, "--gpu_type", "h200", "--gpus", "1")
    assert code == 0
    assert not found["unknown"]
    assert found["format"] == ("fp8" if "fp8" in name else "bf16")
    if name == "plain":
        measured = json.loads(pathlib.Path("benchmarks/results/h200/plain.json").read_text())
        assert found["step_s"] == pytest.approx(measured["step_s"], rel=0.08)
        assert found["memory"]["total"] == pytest.approx(measured["peak"], rel=0.05)


STATE = "(s32[], (f32[8,4]{1,0}, f32[2]{0}))"
OLDER = f"""HloModule jit_step, is_scheduled=true, num_partitions=8

%body (state: (s32[], (f32[8,4], f32[2]))) -> (s32[], (f32[8,4], f32[2])) {{
  %state = {STATE} parameter(0)
  %i = s32[] get-tuple-element({STATE} %state), index=0
  %pair = (f32[8,4]{{1,0}}, f32[2]{{0}}) get-tuple-element({STATE} %state), index=1
  ROOT %next = {STATE} tuple(s32[] %i, (f32[8,4]{{1,0}}, f32[2]{{0}}) %pair)
}}

%more (state: (s32[], (f32[8,4], f32[2]))) -> pred[] {{
  %state = {STATE} parameter(0)
  %i = s32[] get-tuple-element({STATE} %state), index=0
  %end = s32[] constant(3)
  ROOT %less = pred[] compare(s32[] %i, s32[] %end), direction=LT
}}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {{
  %x = f32[8,4]{{1,0}} parameter(0), metadata={{op_name="x"}}
  %far = f32[8,4]{{1,0}} custom-call(f32[8,4]{{1,0}} %x), custom_call_target="far_fft", \
metadata={{op_name="jit(step)/jit(main)/spectrum/fft_call[tree=((*,)) by=<function f at 0x1>]" \
source_file="/me/fft.py" source_line=7}}
  %zero = s32[] constant(0)
  %two = f32[2]{{0}} constant({{1, 2}})
  %both = (f32[8,4]{{1,0}}, f32[2]{{0}}) tuple(f32[8,4]{{1,0}} %far, f32[2]{{0}} %two)
  %start = {STATE} tuple(s32[] %zero, (f32[8,4]{{1,0}}, f32[2]{{0}}) %both)
  %loop = {STATE} while({STATE} %start), condition=%more, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
  %pair = (f32[8,4]{{1,0}}, f32[2]{{0}}) get-tuple-element({STATE} %loop), index=1
  ROOT %end = f32[8,4]{{1,0}} get-tuple-element((f32[8,4]{{1,0}}, f32[2]{{0}}) %pair), index=0
}}
"""


def test_a_text_of_2024_is_read(tmp_path):
    """Operands with their shapes, and the file and line of the innermost frame in each op."""
    file = tmp_path / "x.txt"
    file.write_text(OLDER)
    program = hlo.parse(OLDER)
    (loop,) = (op for op in program.entry.ops if op.opcode == "while")
    assert loop.operands == ("start",)
    assert program.trips(program.entry, loop) == 3
    _, found = planned("--hlo", str(file), "--gpus", "8", "--explain")
    assert [x["name"] for x in found["unknown"]] == ["far_fft"]
    (operation,) = (x for x in found["explain"]["operations"] if x["kind"] == "unpriced")
    assert (operation["name"], operation["source"]) == ("spectrum", "/me/fft.py:7")


def test_tables_of_explain_fit_100_columns(plan):
    long = explain.Operation(
        "backward mlp/mlp.with_slots/mlp.experts/cond/branch_0_fun/jit(_scaled_matmul)", "gemm",
        "f8e4m3fn 131072x131072x131072 nt x128", "model/a_long_name_of_a_module.py:1234", "compute",
        40960, 0.09, tflops=1234.0,
    )  # fmt: skip
    exposed = explain.Exposed(
        long.name, "reduce-scatter", "0.125 GiB over 128 x 72 GPUs", "", 0.09, 1.0, 1.0,
        long.name, long.name,
    )  # fmt: skip
    tables = dataclasses.replace(plan.explanation, operations=(long,), exposed=(exposed,))
    for text in (str(plan.explanation), str(tables)):
        assert max(map(len, text.splitlines())) <= 100
    assert "f8 131072x131072" in str(tables)


def test_a_name_keeps_its_collective_its_pass_and_its_end():
    name = "all-to-all, backward mlp/down"
    assert explain._end(name, 22) == "all-to-all, bwd …/down"
    assert explain._end(name, 28) == "all-to-all, bwd mlp/down"
    assert explain._end("backward attn/qkv", 22) == "backward attn/qkv"
    frame = hlo.Frame("/a/model/loss.py", "Head._chunk.<locals>.<lambda>", 3)
    assert explain._function(frame) == "loss/chunk"


def test_scopes_are_without_the_parts_that_jax_writes():
    name = (
        "jit(step)/transpose(jvp(Net))/while/body/closed_call/checkpoint/mlp/mlp.f/jit(_where)/up"
    )
    assert op_names.scopes(f"{name}/cond/branch_0_fun/dot_general") == ["Net", "mlp", "up"]
    assert op_names.pass_of(name) == "backward"
