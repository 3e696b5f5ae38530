"""How the native library is found, refused and switched off."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import intention
from intention.solve.native import build, library

HAS_COMPILER = "CXX" in os.environ or any(map(shutil.which, build.COMPILERS))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler: $CXX is not set, none is on PATH")
ARCH = 'extern "C" __attribute__((visibility("default"))) const char *intention_native_arch() { return "baseline"; }\n'
ABI = 'extern "C" __attribute__((visibility("default"))) int intention_native_abi() { return %d; }\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where the library is looked for, as if for the first time."""
    monkeypatch.delenv("INTENTION_NATIVE", raising=False)
    monkeypatch.setattr(library, "PATH", tmp_path / "_kernels.so")
    monkeypatch.setattr(library, "_found", None)
    return tmp_path / "_kernels.so"


def compile_into(path: Path, source: str):
    folder = path.parent / "sources"
    folder.mkdir()
    (folder / "toy.cpp").write_text(source)
    build.compile_library(folder, path)


@needs_compiler
def test_a_library_is_loaded_once(place):
    compile_into(place, ABI % library.ABI + ARCH)
    loaded = library.library()
    assert loaded is not None
    assert library.library() is loaded
    want = {"native": True, "path": str(place), "arch": "baseline", "reason": None, "threads": torch.get_num_threads()}
    assert intention.native_info() == want


@needs_compiler
def test_off_holds_inside_only(place):
    compile_into(place, ABI % library.ABI + ARCH)
    with library.off():
        assert library.library() is None
        with library.off():
            pass
        assert library.library() is None
        assert intention.native_info()["reason"] == "switched off by library.off()"
    assert library.library() is not None


def test_without_a_file_there_is_no_warning(place):
    assert library.library() is None
    told = intention.native_info()
    assert (told["native"], told["path"], told["arch"]) == (False, None, None)
    assert f"there is no {place}: the package was built without" in told["reason"]


def test_the_environment_switches_off_and_is_read_once(place, monkeypatch):
    place.write_bytes(b"not looked at")
    monkeypatch.setenv("INTENTION_NATIVE", "0")
    assert library.library() is None
    monkeypatch.delenv("INTENTION_NATIVE")
    assert intention.native_info()["reason"] == "switched off: INTENTION_NATIVE is 0"


@needs_compiler
def test_the_environment_may_name_another_library(place, monkeypatch):
    other = place.with_name("sanitized.so")
    monkeypatch.setenv("INTENTION_NATIVE", str(other))
    assert library.library() is None
    assert intention.native_info()["reason"] == f"there is no {other}: INTENTION_NATIVE names it"
    compile_into(other, ABI % library.ABI + ARCH)
    monkeypatch.setattr(library, "_found", None)
    assert intention.native_info()["path"] == str(other)


def refused(place: Path, what: str):
    with pytest.warns(RuntimeWarning, match=rf"(?s){what}.*wanted is .* interface {library.ABI};.*Reinstall") as caught:
        assert library.library() is None
    assert [warning.filename for warning in caught] == [__file__]
    assert library.library() is None  # and is quiet from then on
    assert str(place) in intention.native_info()["reason"]


def test_what_is_no_library_is_refused(place):
    place.write_bytes(b"of another machine")
    refused(place, "cannot be used")


@needs_compiler
def test_a_library_that_is_not_ours_is_refused(place):
    compile_into(place, ARCH)
    refused(place, "intention_native_abi")


@needs_compiler
def test_another_interface_is_refused(place):
    compile_into(place, ABI % (library.ABI + 1) + ARCH)
    refused(place, f"has interface {library.ABI + 1}")


def test_both_sources_name_one_interface():
    source = Path(library.__file__).with_name("csrc").joinpath("dispatch.cpp").read_text()
    assert f"intention_native_abi(void) {{ return {library.ABI}; }}" in source


def test_importing_loads_no_library():
    code = "import intention; from intention.solve.native import library; print(library._found)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
