"""Transformer Engine: errors if it is missing; if it is installed, the tests of with_te.py."""

import importlib
import importlib.util
import os
import subprocess
import sys
from importlib import metadata

import jax
import pytest

from maxbench.config.errors import UserError
from maxbench.cost_model import absent_gpus, stub_libcuda
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.quantization import transformer_engine

INSTALLED = importlib.util.find_spec("transformer_engine") is not None
needs_te = pytest.mark.skipif(not INSTALLED, reason="./install_te.sh not run")


def test_absent_te_is_reported_with_the_install_command(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ValueError, match=r"not installed.*install_te\.sh"):
        transformer_engine.load.__wrapped__()


def test_te_of_pypi_is_installed_though_its_library_is_no_module(monkeypatch):
    assert importlib.util.find_spec("transformer_engine_jax") is None  # unless it is loaded
    assert transformer_engine.is_installed() == INSTALLED
    monkeypatch.setattr(metadata, "version", {"transformer-engine-jax": "2.20.2"}.__getitem__)
    assert transformer_engine.is_installed()


@pytest.mark.parametrize("version", ["1.13.0", "2.9.1", "2.16.0+abc"])
def test_old_te_is_reported_with_the_oldest_supported_version(version, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ValueError, match=r"older than 2\.17.*install_te\.sh"):
        transformer_engine.load.__wrapped__()


@pytest.mark.parametrize("error", [OSError("libcuda.so.1"), ImportError("no module")])
def test_import_error_is_reported(error, monkeypatch):
    def fail(name):
        raise error

    jax.devices()  # imports JAX's plugins before import_module fails
    monkeypatch.setattr(metadata, "version", lambda name: "2.20.2")
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ValueError, match=f"does not load.*{error}"):
        transformer_engine.load.__wrapped__()


def test_without_driver_and_compiler_the_requirements_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"driver, or a C compiler.*backend=xla"):
        stub_libcuda.build_stub(tmp_path)


@pytest.mark.gpu_compile
def test_programs_are_planned_where_te_does_not_load(monkeypatch, caplog):
    def install(chip):
        raise UserError("Transformer Engine 1.13 is older than 2.17")

    monkeypatch.setattr(transformer_engine, "is_installed", lambda: True)
    monkeypatch.setattr(stub_libcuda, "install", install)
    with absent_gpus.absent_gpus(GPU_TYPES["h100"], 8) as devices:
        assert len(devices) == 8
    assert "calls Transformer Engine cannot be planned: Transformer Engine 1.13" in caplog.text


@needs_te
@pytest.mark.exhaustive
def test_transformer_engine_on_the_cpu(tmp_path):
    """In a subprocess, which sets the environment before TE is loaded."""
    environment = os.environ | {
        "MAXBENCH_CACHE": str(tmp_path),
        "NVTE_JAX_CUSTOM_CALLS": "false",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    # TE 2.20 uses a name that JAX has deprecated.
    options = ["-p", "no:cacheprovider", "-W", "ignore:jax.interpreters.pxla:DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", *options, "tests/quantization/with_te.py"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
