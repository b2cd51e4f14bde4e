"""Writes docs/reference/recipes.md: the workload files' layouts, and the published figures.

python -m benchmarks.recipes_table
"""

import pathlib
from collections.abc import Iterable, Mapping

from ml_collections import ConfigDict

from maxbench.config.recipes import table, workloads
from maxbench.hardware import published

PAGE = pathlib.Path(__file__).parents[1] / "docs/reference/recipes.md"
TEXT = """# Recipes and published figures

`python -m benchmarks.recipes_table` makes this page from the workload files and from published.csv.

## Layouts

What `--gpus`, `--gpu_type`, `--dtype` and `--strong_scaling` pick: numbers in the last four columns
go together. The columns are words of the [glossary](glossary.md); `maxbench configs` lists the
sizes alone.

{layouts}

## Published

What others have published, with its source; `maxbench report` holds a run against the row of its
own work. Seconds are of one step, tokens/s over all GPUs, and MFU is in the convention of the
publication ([Read a report](../how-to/read_a_report.md#conventions-of-flops)). A cell is empty
where the source has none.

{figures}
"""


def figures(rows: Iterable[published.Published]) -> str:
    """All published figures as one Markdown table."""
    heads = (
        "workload dtype GPU GPUs layers seq gbs mbs s/step tokens/s MFU% convention remat source"
    )
    lines = ["| " + heads.replace(" ", " | ") + " |", "|---" * len(heads.split()) + "|"]
    for r in rows:
        mfu = "" if r.mfu_pct is None else f"{r.mfu_pct:.2f}"
        cells = [f"{r.model} {r.size}", r.dtype, r.gpu_type, r.gpus, r.layers, r.seq, r.gbs, r.mbs]
        cells += [f"{r.step_s:g}", f"{r.tokens_per_s:,.0f}", mfu, r.convention, r.remat, r.source]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def markdown(configs: Mapping[str, ConfigDict]) -> str:
    """The layouts of all workloads as one Markdown table: file name -> config.

    A line holds the rows that differ in scale alone; its GPUs, gbs, dp and fsdp go together.
    """
    head = ["gpu_type", "dtype", "scaling", "layers", "seq", "pp", "vp", "ep", "cp", "tp", "mbs"]
    head += ["microbatch_group_size", "remat", "remat_layers"]  # of tables that have them
    scale = ["gpus", "dp", "fsdp", "gbs"]
    lines = ["| workload | " + " | ".join([*head, *scale]) + " |"]
    lines.append("|---" * (1 + len(head) + len(scale)) + "|")
    for name, config in configs.items():
        lists: dict[tuple, dict[tuple, list[str]]] = {}
        for row in table(config.layouts):
            dtypes = lists.setdefault(tuple(row.get(h) or "" for h in head if h != "dtype"), {})
            dtypes.setdefault(tuple(row[s] for s in scale), []).append(row["dtype"])
        for key, scales in lists.items():
            for dtype in dict.fromkeys(map(", ".join, scales.values())):
                columns = zip(*(k for k, d in scales.items() if ", ".join(d) == dtype), strict=True)
                texts = [" ".join(map(str, c if len(set(c)) > 1 else c[:1])) for c in columns]
                cells = [key[0], dtype, *key[1:], *texts]
                lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def page() -> str:
    """The page."""
    layouts = markdown({path.stem: config for path, config in sorted(workloads().items())})
    return TEXT.format(layouts=layouts, figures=figures(published.rows()))


if __name__ == "__main__":
    PAGE.write_text(page())
