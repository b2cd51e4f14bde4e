"""Charts of text."""

from maxbench.terminal.chart import chart


def test_lines_share_their_axes_and_a_later_one_is_above():
    falling = {i: 90 - 10 * i for i in range(10)}
    text = chart({".": falling, "o": {0: 90, 9: 0, 4: 20}}, "step", "loss", width=19)
    assert text == [
        "   loss",
        "     90 |o",
        "        | .",
        "        |  .",
        "        |   .",
        "        |    .",
        "     40 |     .",
        "        |      .",
        "        |    o  .",
        "        |        .",
        "      0 |         o",
        "         0 step   9",
    ]


def test_columns_have_the_mean_of_their_values_and_flat_lines_a_row():
    text = chart({"x": dict.fromkeys(range(1000), 2.5)}, "step", "loss", width=40)
    assert [line.count("x") for line in text] == [0, 31, *[0] * 10]
    noise = {i: float(i % 2) for i in range(1000)}
    text = chart({"x": noise}, "step", "loss", width=40)
    assert {i for i, line in enumerate(text) if "x" in line} <= {5, 6}
    assert chart({"x": {0: 1.0}}, "step", "loss") == []
