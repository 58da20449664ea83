"""Lets `pytest -m gpu` run where there are torch, numpy and pytest only; a shared fixture."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")  # figures open no window


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know the option `timeout` of pyproject.toml without pytest-timeout; unknown is an error."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds per test; without pytest-timeout there is no limit")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import only files with such tests: others need cvxpy, hypothesis and more."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests for a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """`Trainer.train` collects garbage, which takes as long as a run where many modules are."""
    gc.freeze()
    yield
    gc.unfreeze()
