"""The benchmark's rows and fit, for the tests that hold the calibration to them."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.recipes import load_recipe

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "time_model.py"


@cache
def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("time_model_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def _problem() -> Any:
    return _benchmark().load_problem()


@pytest.fixture
def script() -> ModuleType:
    return _benchmark()


@pytest.fixture
def problem() -> Any:
    """The published rows of the calibration."""
    return _problem()


@cache
def model_of(recipe: str) -> Architecture:
    return architecture(load_recipe(recipe))


@pytest.fixture
def dense() -> Architecture:
    return model_of("llama3_70b")


@pytest.fixture
def experts() -> Architecture:
    return model_of("qwen3_235b_a22b")


@pytest.fixture
def layout() -> ParallelLayout:
    return ParallelLayout(num_gpus=64, tp=2, pp=4, vp=5, mbs=1, gbs=256)


@pytest.fixture
def expert_layout() -> ParallelLayout:
    return ParallelLayout(num_gpus=256, pp=8, ep=8, etp=1, mbs=1, gbs=8192)
