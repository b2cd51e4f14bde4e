"""The HLO parser, on small texts with every kind of instruction."""

import numpy as np
import pytest

from maxbench.cost_model import costs, hlo

HEAD = "HloModule m, is_scheduled=true\n\n"


def module(body: str, others: str = "") -> hlo.Program:
    return hlo.parse(f"{HEAD}{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("bf16[2,4096,8192]{2,1,0}", 2 * 4096 * 8192 * 2),
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("f8e4m3fn[16]{0}", 16),
        ("s4[10]{0:E(4)}", 5),
        ("(bf16[4]{0}, (f32[2]{0:T(8,128)S(5)}, u8[0]{0}))", 8 + 8),
        ("token[]", 0),
    ],
)
def test_shapes(text, size):
    assert hlo.size(hlo.parse_shape(text)) == size


def groups_of(attrs: str) -> np.ndarray:
    return hlo.Op("a", "all-gather", (), (), attrs, root=True).groups


@pytest.mark.parametrize(
    ("attrs", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=[2,4]<=[8]T(0)", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'c','a'}", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['a'=1,'b'=4], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4,'b'=1] {'a':(2)2,'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=4], device_ids=([2,2]T(1,0)) {'a':(2)2}", [[0, 2], [1, 3]]),
    ],
)
def test_replica_groups(attrs, groups):
    assert groups_of(attrs).tolist() == groups


def test_no_replica_groups_means_all():
    assert groups_of("channel_id=1").size == 0
    assert groups_of("replica_groups={}").size == 0
    with pytest.raises(ValueError, match="unknown form"):
        groups_of("replica_groups=mesh['a'=4] {'a':2}")


def test_replica_groups_of_several_lengths_are_not_read():
    for text in ("{{0,1},{2},{3,4,5}}", "{{0,a},{2,3}}"):
        with pytest.raises(ValueError, match="unknown form"):
            groups_of(f"channel_id=1, replica_groups={text}, dimensions={{0}}")


@pytest.mark.parametrize(
    ("attrs", "value"),
    [
        ('metadata={op_name="a/b c"}, to=%x.1', "x.1"),
        ("into=%y, to=%x.1", "x.1"),
        ("to={1}, to=%x.1, to=z", "x.1"),
        ("into=%y", ""),
        ('to=""', ""),
    ],
)
def test_value_of_an_attribute(attrs, value):
    assert hlo.Op("a", "call", (), (), attrs, root=True).attr("to") == value


def test_asynchronous_pair():
    p = module(
        """  %p = bf16[64,8]{1,0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %all-gather-start = ((bf16[64,8]{1,0}, f32[4]{0}), (bf16[512,8]{1,0}, f32[32]{0})) \
all-gather-start(%p, %q), channel_id=1, replica_groups=[2,8]<=[16], dimensions={0}, \
metadata={op_name="jit(f)/layer/all_gather" stack_frame_id=3}, \
backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %all-gather-done = (bf16[512,8]{1,0}, f32[32]{0}) all-gather-done(%all-gather-start)"""
    )
    start, done = p.entry.ops[2:]
    assert start.opcode == "all-gather-start"
    assert done.is_done
    assert done.root
    assert done.operands == (start.name,)
    assert start.operands == ("p", "q")
    assert start.sync
    assert not done.sync
    assert start.groups.shape == (2, 8)
    assert start.op_name == "jit(f)/layer/all_gather"
    assert hlo.size(done.shape) == 512 * 8 * 2 + 32 * 4
    assert p.entry.users["all-gather-start"] == [done]


def test_permute_pairs():
    p = module(
        """  %p = f32[8]{0} parameter(0)
  ROOT %s = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,0}}"""
    )
    assert p.entry.root.pairs.tolist() == [[0, 1], [1, 2], [2, 0]]


LOOP = """%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %x)
}

%less (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %n = s32[] constant(9)
  ROOT %c = pred[] compare(%a, %n), direction=LT
}

%cond (s: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  ROOT %f = pred[] fusion(%i.1), kind=kLoop, calls=%less
}
"""


@pytest.mark.parametrize(
    ("config", "trips"),
    [
        ('{"known_trip_count":{"n":"39"},"known_init_step":{"init":"1","step":"2"}}', 39),
        ('{"known_induction_variable":{"tuple_index":"0"}}', 4),  # 1, 3, 5, 7
    ],
)
def test_loops(config, trips):
    p = module(
        f"""  %p = f32[8]{{0}} parameter(0)
  %one = s32[] constant(1)
  %copy = s32[] copy(%one)
  %init = (s32[], f32[8]{{0}}) tuple(%copy, %p)
  %w = (s32[], f32[8]{{0}}) while(%init), condition=%cond, body=%body, backend_config={config}
  ROOT %out = f32[8]{{0}} get-tuple-element(%w), index=1""",
        LOOP,
    )
    loop = p.entry.by_name["w"]
    assert p.called(loop, "body").name == "body"
    assert p.trips(p.entry, loop) == trips


def test_the_trip_count_of_a_loop_on_data_is_refused():
    p = module(
        """  %p = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%p), condition=%cond, body=%body""",
        LOOP,
    )
    with pytest.raises(ValueError, match="loop w has no known trip count"):
        p.trips(p.entry, p.entry.root)


def test_conditionals_in_both_forms():
    p = module(
        """  %p = pred[] parameter(0)
  %a = f32[8]{0} conditional(%p, %p, %p), true_computation=%yes, false_computation=%no
  ROOT %b = f32[8]{0} conditional(%p, %p, %p), branch_computations={%zero, %one.2}"""
    )
    assert p.entry.by_name["a"].branches == ["yes", "no"]
    assert p.entry.root.branches == ["zero", "one.2"]


def test_library_calls():
    p = module(
        """  %x = bf16[8192,4096]{1,0} parameter(0)
  %w = bf16[4096,1024]{1,0} parameter(1)
  %g = (bf16[8192,1024]{1,0}, s8[4194304]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT %d = f32[2,8,4]{2,1,0} dot(%x, %w), lhs_batch_dims={0}, lhs_contracting_dims={1}, \
rhs_batch_dims={0}, rhs_contracting_dims={1}"""
    )
    _, _, gemm, dot = p.entry.ops
    assert gemm.target == "__cublas$lt$matmul"
    assert costs.gemm_sizes(p.entry, gemm) == (8192, 1024, 4096, 1, "bf16", "nn")
    assert dot.dims("lhs_batch_dimensions") == (0,)
    assert dot.dims("lhs_contracting_dimensions") == (1,)


@pytest.mark.parametrize(
    ("lhs", "rhs", "config", "sizes"),
    [
        (
            "8192,4096",
            "1024,4096",
            (1, "false", 1, "true"),
            (8192, 1024, 4096, 1, "f8e4m3fn", "nt"),
        ),
        ("2,64,96", "96,3,4,8", (2, "false", 1, "false"), (128, 96, 96, 1, "f8e4m3fn", "nn")),
        ("2,64,4,8", "4,8,48", (2, "false", 2, "false"), (128, 48, 32, 1, "f8e4m3fn", "nn")),
        ("2,64,96", "2,64,3,32", (2, "true", 2, "false"), (96, 96, 128, 1, "f8e4m3fn", "tn")),
    ],
)
def test_gemms_of_transformer_engine_contract_dims_on_one_side_of_a_boundary(
    lhs, rhs, config, sizes
):
    left, transposed, right, rhs_transposed = config
    p = module(
        f"""  %x = f8e4m3fn[{lhs}] parameter(0)
  %s = f32[1] parameter(1)
  %w = f8e4m3fn[{rhs}] parameter(2)
  ROOT %g = (bf16[8], u8[33554688]) custom-call(%x, %s, %w, %s), \
custom_call_target="te_gemm_v2_ffi", backend_config={{config = {{collective_op = 0 : i64, \
lhs_axis_boundary = {left} : i64, lhs_transposed = {transposed}, \
rhs_axis_boundary = {right} : i64, rhs_transposed = {rhs_transposed}, scaling_mode = 1 : i64}}}}"""
    )
    assert costs.gemm_sizes(p.entry, p.entry.root) == sizes


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes"),
    [
        ((4096, 2048, "false"), (16 * 2048, 1024, "false"), (256, 1024, 2048, 16, "bf16", "nn")),
        ((4096, 1024, "false"), (16 * 2048, 1024, "true"), (256, 2048, 1024, 16, "bf16", "nt")),
        ((4096, 2048, "true"), (4096, 1024, "false"), (2048, 1024, 256, 16, "bf16", "tn")),
    ],
)
def test_grouped_gemms_of_transformer_engine_have_even_groups(lhs, rhs, sizes):
    """Forward, the gradient of the inputs, and that of the weights."""
    p = module(
        f"""  %x = bf16[{lhs[0]},{lhs[1]}] parameter(0)
  %s = f32[0] parameter(1)
  %w = bf16[{rhs[0]},{rhs[1]}] parameter(2)
  %groups = s32[16] parameter(3)
  ROOT %g = (bf16[4096,1024], u8[33554688]) custom-call(%x, %s, %w, %s, %groups), \
custom_call_target="te_grouped_gemm_v2_ffi", backend_config={{lhs_axis_boundary = 1 : i64, \
lhs_is_trans = {lhs[2]}, lhs_left_size = {lhs[0]} : i64, lhs_right_size = {lhs[1]} : i64, \
rhs_is_trans = {rhs[2]}, rhs_left_size = {rhs[0]} : i64, rhs_right_size = {rhs[1]} : i64}}"""
    )
    assert costs.is_gemm(p.entry.root)
    assert costs.gemm_sizes(p.entry, p.entry.root) == sizes


def test_bytes_that_fusions_move():
    """A slice reads its result, an in-place update writes the new values, other operands are read
    whole."""
    p = module(
        """  %stack = f32[10,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %new = f32[100]{0} parameter(2)
  %one = f32[1,100]{1,0} fusion(%stack, %i), kind=kLoop, calls=%slice
  %rows = s32[2,1]{1,0} parameter(3)
  %some = f32[2,100]{1,0} parameter(4)
  %added = f32[10,100]{1,0} fusion(%stack, %rows, %some), kind=kInput, calls=%add_rows
  ROOT %all = f32[10,100]{1,0} fusion(%stack, %new, %i), kind=kLoop, calls=%update""",
        """%slice (a: f32[10,100], b: s32[]) -> f32[1,100] {
  %a = f32[10,100]{1,0} parameter(0)
  %b = s32[] parameter(1)
  ROOT %ds = f32[1,100]{1,0} dynamic-slice(%a, %b, %b), dynamic_slice_sizes={1,100}
}

%update (a: f32[10,100], c: f32[100], b: s32[]) -> f32[10,100] {
  %a.1 = f32[10,100]{1,0} parameter(0)
  %c.1 = f32[100]{0} parameter(1)
  %b.1 = s32[] parameter(2)
  %view = f32[1,100]{1,0} bitcast(%c.1)
  %sum = f32[1,100]{1,0} add(%view, %view)
  ROOT %dus = f32[10,100]{1,0} dynamic-update-slice(%a.1, %sum, %b.1, %b.1)
}

%add_rows (a: f32[10,100], at: s32[2,1], c: f32[2,100]) -> f32[10,100] {
  %a.2 = f32[10,100]{1,0} parameter(0)
  %at.2 = s32[2,1]{1,0} parameter(1)
  %c.2 = f32[2,100]{1,0} parameter(2)
  ROOT %sc = f32[10,100]{1,0} scatter(%a.2, %at.2, %c.2), update_window_dims={1}, to_apply=%plus
}
""",
    )
    entry = p.entry
    index = 4  # the s32 is also read
    assert costs.bytes_moved(p, entry, entry.by_name["one"]) == 400 + 400 + index
    assert costs.bytes_moved(p, entry, entry.by_name["all"]) == 400 + 400 + index
    # A scatter adds two rows: reads them, reads the updates, writes.
    assert costs.bytes_moved(p, entry, entry.by_name["added"]) == 3 * 800 + 2 * index


def test_text_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="is_scheduled"):
        hlo.parse("HloModule m\n\nENTRY %main () -> f32[] {\n}\n")


def test_iota_groups_equal_their_list_form():
    """A permuted iota over [2,3,4] against its definition: iota, transpose, reshape."""
    found = groups_of("replica_groups=[6,4]<=[2,3,4]T(1,0,2)")
    expect = np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2).reshape(6, 4)
    assert (found == expect).all()
