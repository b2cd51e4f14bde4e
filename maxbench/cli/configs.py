"""Lists the workloads: `maxbench configs`."""

from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from maxbench.config import command_line, layout_table, options, recipes
from maxbench.config.model import Model
from maxbench.evidence import published
from maxbench.metrics import flops
from maxbench.terminal import console

MARK = "*"  # after a number of GPUs with a published figure


def main(argv: Sequence[str]) -> int:
    """Prints the workloads; returns the exit code."""
    command_line.read(options.Configs, argv)
    print(table())
    return 0


def table() -> str:
    """A line per workload, the sizes of its recipes, and the presets."""
    rows = [(path.stem, Model(**w.model), w) for path, w in recipes.workloads().items()]
    column = max(len(name) for name, _, _ in rows) + 2
    width, lines = console.terminal_width(), []
    for name, model, w in rows:
        size = f"{flops.params(model) / 1e9:.1f} billion parameters, {model.layers} layers"
        own = sorted({*w.known} - {*recipes.PRESETS})
        presets = f", presets of this workload: {', '.join(own)}" if own else ""
        meanings = [(name, f"{size}, seq {w.train.seq}{presets}")]
        meanings += [("", f"  {line}") for line in scales(w)]
        lines += console.definitions(meanings, width=width, indent="", column=column)
    presets = ", ".join(recipes.PRESETS)
    return "\n".join([
        *lines,
        "",
        f"Numbers of GPUs that have a recipe, for --gpus; {MARK} = with a published figure.",
        f"Presets of every workload, as in --config {rows[0][0]}:tiny: {presets}.",
    ])  # fmt: skip


def scales(w: ConfigDict) -> Iterator[str]:
    """Lines 'h100 bf16, fp8: 8* 16* 32': a GPU type, dtypes, and their rows' numbers of GPUs."""
    known = {
        (p.gpu_type, p.dtype, p.scaling, p.gpus)
        for p in published.rows()
        if (p.model, p.size) == (w.model.name, w.model.size)
    }
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}  # GPU type, scaling -> dtype -> GPUs
    for row in layout_table.table(w.layouts):
        key = tuple(row[name] for name in ("gpu_type", "dtype", "scaling", "gpus"))
        of_kind = rows.setdefault((row["gpu_type"], row["scaling"]), {})
        of_kind.setdefault(row["dtype"], []).append(f"{row['gpus']}{MARK * (key in known)}")
    for (gpu_type, scaling), dtypes in sorted(rows.items()):
        strong = ", --strong_scaling" if scaling == "strong" else ""
        for gpus in dict.fromkeys(" ".join(counts) for counts in dtypes.values()):
            same = ", ".join(dtype for dtype, counts in dtypes.items() if " ".join(counts) == gpus)
            yield f"{gpu_type} {same}{strong}: {gpus}"
