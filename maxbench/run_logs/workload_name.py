"""Settings that a log does not name: by the user, or from the name of the run or of its folder."""

import functools
import re

from maxbench.config import number_formats, recipes
from maxbench.hardware.gpus import GpuTypes
from maxbench.run_logs.record import SETTINGS, Given, Origin, RunRecord

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


def complete(record: RunRecord, name: str, given: Given) -> None:
    """Sets fields of the record that its log does not name, by the user, then from a name."""
    of_known_model = lambda field: record.model and field not in SETTINGS
    record.learn(Origin.USER, **{k: x for k, x in given.settings.items() if not of_known_model(k)})
    _fill_from_name(record, name, given.gpu_types)


def _fill_from_name(record: RunRecord, name: str, gpu_types: GpuTypes) -> None:
    """Sets unknown fields of the record from a name."""
    if matches := list(_workload_pattern().finditer(name)):
        match = max(matches, key=lambda m: len(m.group(0)))
        if not record.model:
            model, size = recipes.model_names()[match["model"]], match["size"]
            record.learn(Origin.NAME, model=model, size=size + (match["preset"] or ""))
        count = int(match["gpus"] or 0)
        gpus = count * 8 if match["nodes"] else count
        record.learn(Origin.NAME, dtype=match["dtype"], gpus=gpus)
    for dtype, size, count in RESULT_FOLDERS.findall(name):
        record.learn(Origin.NAME, dtype=dtype, size=size, gpus=int(count or 0))
    if not record.device:
        record.learn(Origin.NAME, gpu_type=gpu_types.type_of(name))
    if not record.layout:
        record.layout = {axis: int(size) for axis, size in AXES.findall(name)}
    if batch := BATCH_SIZE.search(name):
        record.learn(Origin.NAME, gbs=int(batch[1]))
