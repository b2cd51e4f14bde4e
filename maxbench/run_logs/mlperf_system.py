"""The system of an MLPerf log, which a submission describes in a file beside its results.

A log is ORG/results/SYSTEM/BENCHMARK/result_N.txt, its system ORG/systems/SYSTEM.json.
"""

import pathlib
import re

from maxbench.hardware.gpus import GpuTypes
from maxbench.run_logs import log_files
from maxbench.run_logs.record import Origin, RunRecord, dig, parse_json

_PACKAGE = re.compile(r"[- ](?:SXM\d?|\d{2,3}GB)\b")  # 'H200-SXM5-141GB': submitters' own forms


def read(record: RunRecord, gpu_types: GpuTypes) -> None:
    """Sets GPUs and GPU type by the description of the log's system, if there is one."""
    folder = pathlib.Path(*record.path.resolve().parts[:-4])
    name = record.path.resolve().parts[-3] if len(record.path.resolve().parts) > 4 else ""
    file = folder / "systems" / f"{name}.json"
    try:
        system = parse_json(b"".join(log_files.blocks(file)))
    except OSError:
        return
    number = lambda key: int(text) if (text := dig(system, key, "")).isdecimal() else 0
    device = dig(system, "accelerator_model_name", "")
    gpu_type = gpu_types.type_of(_PACKAGE.sub("", device))
    gpus = number("number_of_nodes") * number("accelerators_per_node")
    record.learn(Origin.LOG, gpus=gpus, gpu_type=gpu_type)
    record.device = "" if gpu_type else device
    record.inferred.append(f"its system is {gpus} {device}, by systems/{file.name}")
