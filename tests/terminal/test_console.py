"""The table printer: alignment, folding in narrow terminals, Markdown."""

import pytest

from maxbench.terminal import console

HEADS = ["run", "step s", "why"]
ROWS = [
    ["pretrain_llama", "1.234", ""],
    ["short", "10.5", "node failure on the second host of the job"],
    ["no steps"],
]


def table(width: int) -> list[str]:
    return console.table(HEADS, ROWS, text=(0, 2), width=width)


def test_text_is_left_aligned_and_figures_are_right_aligned():
    assert table(0) == [
        "run             step s  why",
        "-------------- ------- -------------------------------------------",
        "pretrain_llama   1.234",
        "short             10.5  node failure on the second host of the job",
        "no steps",
    ]


def test_last_text_column_folds_in_a_narrow_terminal():
    lines = table(48)
    assert max(map(len, lines)) <= 48
    assert "pretrain_llama   1.234" in lines
    assert "short             10.5  node failure on the" in lines


@pytest.mark.parametrize("width", [16, 20, 30])
def test_row_becomes_lines_where_the_columns_do_not_fit(width):
    lines = table(width)
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).startswith("pretrain_llama step s 1.234 short step s")
    assert lines[-1] == "no steps"


def test_markup_and_control_sequences_of_rich_are_printed_as_they_are():
    assert console.table((), [["[bold]x[/bold] :smile:", "1"]]) == ["[bold]x[/bold] :smile:  1"]


def test_meanings_of_definitions_start_in_one_column_and_fold():
    pairs = [("--short", "a meaning of several words"), ("--name-of-20-columns", "other")]
    lines = console.definitions(pairs, width=30, column=12)
    assert lines == [
        "  --short     a meaning of",
        "              several words",
        "  --name-of-20-columns",
        "              other",
    ]


def test_markdown_escapes_bars():
    assert console.markdown(["run", "s"], [["a|b", "1"]]) == [
        "| run | s |",
        "|---|---:|",
        "| a\\|b | 1 |",
    ]


def test_sizes_and_intervals_have_the_digits_that_they_need():
    gib = 1 << 30
    assert [console.size(x * gib) for x in (73.5, 0.1, 0.01, 0)] == [
        "73.50 GiB", "0.10 GiB", "10.2 MiB", "0.0 MiB",
    ]  # fmt: skip
    assert console.interval(7, 11.2) == "7.00 to 11.20"
    assert console.interval(5.866, 8.051) == "5.87 to 8.05"
    assert console.interval(20.1, 131) == "20.1 to 131.0"
    assert console.interval(812.4, 1210) == "812 to 1210"


def test_a_number_that_is_not_0_never_prints_as_0():
    shown = [console.fixed(x, 2) for x in (0, 0.004, 0.006, 12.345)]
    assert shown == ["0.00", "<0.01", "0.01", "12.35"]
    assert [console.share(x) for x in (0, 4e-4, 0.123)] == ["0.0%", "<0.1%", "12.3%"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "+1.2%"), (-0.5, "-50.0%"), (0.0004, "0.0%"), (-0.0004, "0.0%"), (0.1, "+10.0%")],
)
def test_change_that_rounds_to_nothing_has_no_sign(value, text):
    assert console.change(value) == text
