"""The whole training step, backward too, on fake CUDA tensors: a small library gives torch the device that it lacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
# what fake tensors cannot do: reads of values for which 0 does not stand
STOPPED = {("fewshot_latent", "intention_kernel"): "DataDependentOutputException"}  # a check reads its kernel's numbers
EXPERIMENTS = ("sine", "fewshot_latent", "needle", "vit")  # those that were tried

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is not None or shutil.which("g++") is None,
    reason="needs Linux, g++ and a torch without CUDA",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, lib = tmp_path_factory.mktemp("cuda") / "fake_cuda.so", TORCH / "lib"
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-I{TORCH / 'include'}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    made = ["g++", *flags, str(HERE / "fake_cuda.cpp"), "-o", str(path), "-lc10", "-ltorch_cpu"]
    subprocess.run(made, check=True, capture_output=True)
    return path


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_training_step_stays_on_the_device(name: str, library: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, str(HERE / "fake_step.py"), name]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {line["model"]: line["stopped"] for line in map(json.loads, done.stdout.splitlines())}
    assert found
    for model, stopped in found.items():
        expected = STOPPED.get((name, model), "")
        assert stopped.partition(":")[0] == expected, (model, stopped)
