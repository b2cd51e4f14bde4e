"""Model, size, precision, GPUs and batch size from the name of a run or of its folder."""

import functools
import re

from maxbench.config import number_formats, recipes
from maxbench.evidence import published
from maxbench.hardware.gpus import GpuTypes
from maxbench.run_logs.record import RunRecord

AXES = re.compile(r"_(tp|pp|cp|vp|ep)(\d{1,5})(?![0-9a-z])")
BATCH_SIZE = re.compile(r"_gbs(\d{1,7})")
# Folders of NVIDIA's results: results/<version>/<dtype>/<size>/<gpus>/
RESULT_FOLDERS = re.compile(r"(?:^|/)(bf16|fp8)/(\d{1,4}b)/(\d{1,6}(?=/))?")


@functools.cache
def _workload_pattern() -> re.Pattern:
    """Model and size, and optionally preset, precision and number of GPUs or 8-GPU nodes."""
    longest_first = lambda names: [re.escape(x) for x in sorted(names, key=len, reverse=True)]
    models = longest_first(recipes.model_names())
    sizes = [*longest_first(recipes.sizes()), "[0-9]+b"]
    dtypes = "|".join(number_formats.DTYPES)
    return re.compile(
        rf"(?P<model>{'|'.join(models)})[_-](?P<size>{'|'.join(sizes)})"
        rf"(?P<preset>(?:-[a-z]+)*)(?:[_-](?P<dtype>{dtypes}))?"
        r"(?:_(?:gpus)?(?P<gpus>\d{1,6})(?P<nodes>n?)(?=[_.g]|$))?"
    )


def fill_from_name(record: RunRecord, name: str, gpu_types: GpuTypes) -> None:
    """Sets unknown fields of the record from a name, and then from the nearest published row."""
    if matches := list(_workload_pattern().finditer(name)):
        match = max(matches, key=lambda m: len(m.group(0)))
        if not record.model:  # the log itself knows better
            record.model = recipes.model_names()[match["model"]]
            record.size = match["size"] + (match["preset"] or "")
        record.dtype = record.dtype or match["dtype"] or ""
        count = int(match["gpus"] or 0)
        record.gpus = record.gpus or (count * 8 if match["nodes"] else count)
    for dtype, size, count in RESULT_FOLDERS.findall(name):
        record.dtype, record.size = record.dtype or dtype, record.size or size
        record.gpus = record.gpus or int(count or 0)
    if not record.device:
        record.gpu_type = record.gpu_type or gpu_types.type_of(name)
    if not record.layout:
        record.layout = {axis: int(size) for axis, size in AXES.findall(name)}
    if not record.gbs and (batch := BATCH_SIZE.search(name)):
        record.gbs = int(batch[1])
    rows = [r for r in published.rows() if (r.model, r.size) == (record.model, record.size)]
    if not record.seq and record.gpus and rows:
        nearest = min(rows, key=lambda r: abs(r.gpus / record.gpus - 1))
        record.seq, record.layers = nearest.seq, nearest.layers
    if not record.gbs and record.seq:
        record.gbs = record.tokens // record.seq
