"""Old names are refused with the new one, wherever they are used (config/renamed.py)."""

import json

import pytest

from maxbench.cli import entry
from maxbench.config import command_line, options, recipes, renamed
from maxbench.config.errors import UserError
from maxbench.config.resolve import run_from_dict
from maxbench.config.run import SECTIONS
from maxbench.hardware.gpus import Efficiency, Gpu
from tests.conftest import resolve

SETTINGS = [path for path in renamed.NAMES if path.partition(".")[0] in SECTIONS]
KEYS = [path for path in renamed.NAMES if path not in SETTINGS]
VALUES = [(path, old, new) for path, each in renamed.VALUES.items() for old, new in each.items()]
FILE = """
from maxbench.config import recipes

def get_config(presets=""):
    base = recipes.load_workload("llama31_8b")
    sections = {{name: dict(base[name]) for name in ("model", "train", "optim")}}
    sections[{section!r}][{name!r}] = 1
    return recipes.workload(presets, layouts={layouts!r}, **sections)
"""


@pytest.mark.parametrize("old", SETTINGS)
def test_old_flag_names_the_new_one(old, capsys):
    assert entry.run("train", ["--config", "llama31_8b:tiny", f"--config.{old}=1"]) == 2
    expected = f"maxbench train: error: {old} is now {renamed.NAMES[old]}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("old", [path for path in SETTINGS if path.split(".")[0] != "runtime"][:4])
def test_old_field_of_a_workload_file_names_the_new_one(old, tmp_path):
    section, _, name = old.partition(".")
    path = tmp_path / "copy.py"
    path.write_text(FILE.format(section=section, name=name, layouts=""))
    with pytest.raises(UserError, match=f"{old} is now {renamed.NAMES[old]}$"):
        recipes.load_workload(str(path))


@pytest.mark.parametrize("old", SETTINGS)
def test_old_field_of_a_run_description_names_the_new_one(old):
    description = json.loads(json.dumps(resolve("llama31_8b", "tiny").asdict()))
    section, _, name = old.partition(".")
    description[section][name] = 1
    with pytest.raises(UserError, match=f"^{old} is now {renamed.NAMES[old]}$"):
        run_from_dict(description)


@pytest.mark.parametrize(("path", "old", "new"), VALUES)
def test_old_value_names_the_new_one(path, old, new):
    with pytest.raises(UserError, match=f"^{path}={old} is now {path}={new}$"):
        command_line.run_of(["--config", "llama31_8b:tiny", f"--config.{path}={old}"])


@pytest.mark.parametrize("old", KEYS)
def test_old_key_of_a_gpu_file_names_the_new_one(old, tmp_path):
    section, _, key = old.rpartition(".")
    path = tmp_path / "gpus.toml"
    path.write_text(f'[mine]\nlike = "h100"\n[mine.{section or key}]\n{key} = 0.5\n')
    with pytest.raises(UserError, match=f"^{old} is now {renamed.NAMES[old]}$"):
        command_line.gpu_types(str(path))


@pytest.mark.parametrize("old", renamed.COLUMNS)
def test_old_column_of_a_table_of_layouts_names_the_new_one(old):
    with pytest.raises(UserError, match=f"column {old} is now {renamed.COLUMNS[old]}$"):
        recipes.table(f"gpu_type {old}\nh100 1\n")


def test_new_names_exist():
    fields = {**Gpu.__dataclass_fields__}
    fields |= {f"efficiency.{name}": 0 for name in Efficiency.__dataclass_fields__}
    for old, new in renamed.NAMES.items():
        assert new in options.SETTINGS or new in fields
        assert old not in options.SETTINGS
        assert old not in fields
