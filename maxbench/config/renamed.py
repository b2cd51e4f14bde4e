"""Old names of settings, of their values and of keys of GPU files, to name the new one.

Old names are refused: on the command line, in workload files, in JSON run descriptions and in the
files of --hardware.
"""

from collections.abc import Mapping
from typing import Any

from maxbench.config.errors import UserError

# Old SECTION.FIELD of a run, or key of a GPU file -> new one.
NAMES = {
    "train.turn": "train.microbatch_group_size",
    "train.unroll": "train.unroll_layers",
    "train.combine": "train.collective_combine_bytes",
    "optim.constant": "optim.constant_steps",
    "output.keep": "output.max_to_keep",
    "output.keep_every": "output.keep_period",
    "runtime.wait": "runtime.rendezvous_timeout_s",
    "model.kinds": "model.layer_groups",
    "model.drop": "model.drop_policy",
    "physics": "efficiency",
    "efficiency.spread": "efficiency.step_jitter",
    "efficiency.round_us": "efficiency.wave_us",
    "efficiency.host_us": "efficiency.host_sync_us",
}
# SECTION.FIELD -> old value -> new one.
VALUES = {
    "train.remat": {"norms": "save_gemms_only", "products": "save_gemms_recompute_act"},
}
# Old column of a workload's table of layouts -> new one.
COLUMNS = {"turn": "microbatch_group_size"}


def check_name(path: str) -> None:
    """Raises UserError with the new name if path is an old name."""
    if new := NAMES.get(path):
        raise UserError(f"{path} is now {new}")


def check_value(path: str, value: Any) -> None:
    """Raises UserError with the new value if path=value is an old value."""
    if isinstance(value, str) and (new := VALUES.get(path, {}).get(value)):
        raise UserError(f"{path}={value} is now {path}={new}")


def check_columns(columns: Mapping[str, Any] | list[str]) -> None:
    """Raises UserError with the new name if a table of layouts has an old column."""
    for name in columns:
        if new := COLUMNS.get(name):
            raise UserError(f"layouts' column {name} is now {new}")


def check_section(section: str, fields: Mapping[str, Any]) -> None:
    """Raises UserError if a field of a section of a run description, or its value, is old."""
    for name, value in fields.items():
        check_name(f"{section}.{name}")
        check_value(f"{section}.{name}", value)
