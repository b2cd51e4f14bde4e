"""Prints the layouts of the workload files as docs/workloads.md has them."""

from collections.abc import Mapping

from ml_collections import ConfigDict

from maxbench.spec.recipes import table, workloads


def markdown(configs: Mapping[str, ConfigDict]) -> str:
    """The layouts of all workloads as one Markdown table: file name -> config.

    A line holds the rows that differ in scale alone; its GPUs, gbs, dp and fsdp go together.
    """
    head = ["gpu_type", "dtype", "scaling", "layers", "seq", "pp", "vp", "ep", "cp", "tp", "mbs"]
    scale = ["gpus", "dp", "fsdp", "gbs"]
    lines = ["| workload | " + " | ".join([*head, *scale]) + " |"]
    lines.append("|---" * (1 + len(head) + len(scale)) + "|")
    for name, config in configs.items():
        lists: dict[tuple, dict[tuple, list[str]]] = {}
        for row in table(config.layouts):
            dtypes = lists.setdefault(tuple(row[h] for h in head if h != "dtype"), {})
            dtypes.setdefault(tuple(row[s] for s in scale), []).append(row["dtype"])
        for key, scales in lists.items():
            dtype = ", ".join(next(iter(scales.values())))
            columns = zip(*scales, strict=True)
            texts = [" ".join(map(str, c if len(set(c)) > 1 else c[:1])) for c in columns]
            cells = [key[0], dtype, *key[1:], *texts]
            lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown({path.stem: config for path, config in sorted(workloads().items())}))
