"""The native library's way into a wheel: compiled where a compiler is, left out with a notice where none is."""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from intention.solve.native import build
from intention.solve.native.library import ABI
from intention.solve.native.library import PATH as LIBRARY

ROOT = Path(__file__).parents[3]
INSIDE = "intention/solve/native/"
SOURCES = INSIDE + f"{build.SOURCES.relative_to(build.HERE)}/"
HAS_COMPILER = "CXX" in os.environ or any(map(shutil.which, build.COMPILERS))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler: $CXX is not set, none is on PATH")

ANSWERS = """
import json, torch, intention
torch.manual_seed(0)
query, key, value = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 7, 5), (3, 11, 5), (3, 11, 2)))
want = query @ torch.linalg.solve(key.mT @ key + 0.3 * torch.eye(5), key.mT @ value)
got = intention.functional.intention(query.float(), key.float(), value.float(), alpha=0.3)
print(json.dumps({"file": intention.__file__, "error": float((got - want).abs().max()), **intention.native_info()}))
"""


STUB = f"""
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED int intention_native_abi(void) {{ return {ABI}; }}
EXPORTED const char *intention_native_arch(void) {{ return "baseline"; }}
"""


def environment(**changes):
    """Ours, without what would lead to src/ or decide about compiling."""
    left_out = {"PYTHONPATH", "INTENTION_NATIVE", *(name for name, value in changes.items() if value is None)}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    kept.setdefault(build.CACHE, str(ROOT / "build" / "native"))  # where make puts the objects that are there already
    return kept | {name: value for name, value in changes.items() if value is not None}


def run(*command, env=None, cwd=None):
    words = list(map(str, command))
    done = subprocess.run(words, env=env or environment(), cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def project(tmp_path):
    """A copy of what a wheel is made of, so that no test changes the library that other tests have loaded."""
    copy = tmp_path / "project"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "_kernels.so"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture
def stub(project):
    """The same with a library that compiles in no time: the real kernels take a minute of processor time."""
    sources = project / "src" / SOURCES
    for source in (*sources.glob("*.cpp"), *sources.glob("*.h")):
        source.unlink()
    (sources / "dispatch.cpp").write_text(STUB)
    return project


def clean_python(folder):
    """The python of a new environment that finds torch and pip in ours, and not our intention."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    place = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}  # their own .pth files are not read again
    Path(place, "ours.pth").write_text("\n".join(sorted(ours)))
    return python


def wheel_of(project, out, env):
    """What `hatchling build` says, and the wheel."""
    said = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, env=env, cwd=project)
    (wheel,) = out.glob("*.whl")
    return said, wheel


def content(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tags_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        return [line for line in archive.read(name).decode().splitlines() if line.startswith("Tag: ")]


@pytest.mark.parametrize("compiler", [pytest.param(True, marks=needs_compiler), False])
def test_a_wheel_installs_and_computes(tmp_path, project, compiler):
    (tmp_path / "empty").mkdir()
    env = environment() if compiler else environment(PATH=str(tmp_path / "empty"), CXX=None)
    offline = ("--no-deps", "--no-index")
    pip_wheel = (sys.executable, "-m", "pip", "wheel", "-v", *offline, "--no-build-isolation")
    said = run(*pip_wheel, "-w", tmp_path / "out", project, env=env)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    python = clean_python(tmp_path / "clean")
    run(python, "-m", "pip", "install", *offline, "--ignore-installed", wheel)
    told = json.loads(run(python, "-c", ANSWERS, cwd=tmp_path).splitlines()[-1])

    assert Path(told["file"]).is_relative_to(tmp_path / "clean")
    assert told["error"] < 1e-5
    assert told["native"] == compiler
    assert wheel.name.endswith("-py3-none-any.whl") == (not compiler)
    notice = "intention: no C++ compiler found; installing without the native kernels, everything works in pure torch"
    assert (notice in said) == (not compiler)
    if compiler:
        assert "-py3-none-" in wheel.name
        assert "manylinux" not in wheel.name
        assert Path(told["path"]).is_relative_to(tmp_path / "clean")
        assert told["arch"] in build.X86_SETS
        assert told["reason"] is None
    else:
        assert told["path"] is None
        assert "built without a C++ compiler" in told["reason"]


@pytest.mark.skipif(sys.platform != "linux", reason="manylinux is for Linux")
def test_a_wheel_for_other_machines(tmp_path, project):
    for tool in ("auditwheel", "ziglang"):
        pytest.importorskip(tool, reason=f"{tool} is not installed: make wheel does it")
    said = run(sys.executable, ROOT / "tools" / "wheel.py", "--project", project, "--out", tmp_path / "out")
    (wheel,) = (tmp_path / "out").glob("*.whl")
    machine = platform.machine()
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    assert tags_of(wheel) == [f"Tag: py3-none-manylinux_2_28_{machine}"]
    assert ": needs glibc 2." in said
    python = clean_python(tmp_path / "clean")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    told = json.loads(run(python, "-c", ANSWERS, cwd=tmp_path).splitlines()[-1])
    assert told["error"] < 1e-5
    assert told["native"]
    assert Path(told["path"]).is_relative_to(tmp_path / "clean")


@needs_compiler
@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.34"), reason="needs a glibc that has what older ones have not")
def test_a_wheel_that_promises_too_much_is_refused(tmp_path, stub):
    pytest.importorskip("auditwheel", reason="auditwheel is not installed: make wheel does it")
    source = stub / "src" / SOURCES / "dispatch.cpp"
    source.write_text(f'#include <dlfcn.h>\n{STUB}\nEXPORTED void *find(void) {{ return dlsym(nullptr, "free"); }}')
    promise = f"manylinux_2_28_{platform.machine()}"
    _, wheel = wheel_of(stub, tmp_path / "out", environment(INTENTION_WHEEL_PLATFORM=promise))
    assert promise in wheel.name
    command = [sys.executable, ROOT / "tools" / "wheel.py", "--check", wheel]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert f"{wheel.name} needs glibc 2.34" in told.stderr


def test_a_wheel_without_kernels_on_demand(tmp_path, project):
    said, wheel = wheel_of(project, tmp_path / "out", environment(INTENTION_NATIVE="0"))
    assert "INTENTION_NATIVE is 0; installing without the native kernels" in said
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "intention/py.typed" in content(wheel)


@needs_compiler
def test_a_wheel_without_kernels_where_they_do_not_compile(tmp_path, stub):
    native = stub / "src" / INSIDE
    (native / "_kernels.so").write_bytes(b"of an older build")
    (stub / "src" / SOURCES / "broken.cpp").write_text("this is not C++;")
    said, wheel = wheel_of(stub, tmp_path / "out", environment())
    assert "compiling failed; installing without the native kernels" in said
    assert "broken.cpp:1" in said  # the compiler's own words
    assert wheel.name.endswith("-py3-none-any.whl")
    assert INSIDE + "_kernels.so" not in content(wheel)


@needs_compiler
def test_an_editable_install_compiles_beside_the_sources(tmp_path, stub):
    library = stub / "src" / INSIDE / "_kernels.so"
    library.write_bytes(b"of an older build")
    command = (sys.executable, "-c", "import sys, hatchling.build as b; b.build_editable(sys.argv[1])", tmp_path)
    run(*command, cwd=stub)
    (wheel,) = tmp_path.glob("*.whl")
    assert ctypes.CDLL(str(library)).intention_native_abi() == ABI
    assert INSIDE + "_kernels.so" not in content(wheel)
    run(*command, env=environment(INTENTION_NATIVE="0"), cwd=stub)
    assert not library.exists()  # the install says that there are none


def test_a_source_distribution_has_what_a_build_needs(tmp_path, project):
    (project / "src" / INSIDE / "_kernels.so").write_bytes(b"of this machine")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=project)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (top,) = (tmp_path / "unpacked").iterdir()
    assert (top / "hatch_build.py").exists()
    for source in (build.HERE / "build.py", *build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")):
        assert (top / source.relative_to(ROOT)).exists(), source
    assert not (top / "src" / INSIDE / "_kernels.so").exists()


# --- build.py -------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("options", [(), ("--sanitize", "address"), ("--sanitize", "undefined")])
def test_build_runs_by_its_path_with_the_standard_library_alone(tmp_path, stub, options):
    out = tmp_path / "new" / "kernels.so"
    said = run(sys.executable, "-I", "-S", stub / "src" / INSIDE / "build.py", "--out", out, *options)
    assert f"intention: compiled {out}" in said
    assert list(out.parent.iterdir()) == [out]
    assert (b"__asan_init" in out.read_bytes()) == ("address" in options)


KERNEL = """
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define NAME_(what, x) what##_##x
#define NAME(what, x) NAME_(what, x)
#define EXPORTED extern "C" __attribute__((visibility("default")))
#ifdef INTENTION_X86
#error kernels are compiled for one set
#endif
inline __attribute__((noinline)) const char *copy() { const char *volatile text = TEXT(INTENTION_ARCH); return text; }
EXPORTED const char *NAME(own, INTENTION_ARCH)() { return TEXT(INTENTION_ARCH); }
EXPORTED const char *NAME(shared, INTENTION_ARCH)() { return copy(); }
"""


@needs_compiler
def test_kernels_are_compiled_for_every_instruction_set(tmp_path):
    (tmp_path / "kernels_toy.cpp").write_text(KERNEL)
    (tmp_path / "other.cpp").write_text(
        "#ifdef INTENTION_X86\n#define SETS 3\n#else\n#define SETS 1\n#endif\n"
        'extern "C" __attribute__((visibility("default"))) int sets() { return SETS; }'
    )
    build.compile_library(tmp_path, tmp_path / "toy.so")
    library = ctypes.CDLL(str(tmp_path / "toy.so"))
    sets = tuple(build.X86_SETS) if build.makes_x86_64(build.find_compiler()) else ("baseline",)
    assert library.sets() == len(sets)
    for name in sets:
        # of an inline function one copy is left: it must run anywhere
        for what, want in (("own", name), ("shared", "baseline")):
            function = getattr(library, f"{what}_{name}")
            function.restype = ctypes.c_char_p
            assert function().decode() == want


@needs_compiler
@pytest.mark.skipif(not LIBRARY.exists(), reason="there is no compiled library")
def test_the_library_agrees_with_plain_loops(tmp_path):
    """What `make aarch64` runs in an emulator."""
    program, source = tmp_path / "selftest", Path(__file__).with_name("selftest.cpp")
    libraries = (LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}")
    run(*build.find_compiler(), "-std=c++17", "-O1", f"-I{build.SOURCES}", source, *libraries, "-o", program)
    assert ": 0 of 182 comparisons failed" in run(program)


@needs_compiler
def test_a_second_build_compiles_what_has_changed(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / f"{name}.cpp").write_text(
            f'#include "number.h"\nextern "C" __attribute__((visibility("default"))) int {name}() {{ return NUMBER; }}'
        )
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))

    def compiled(number):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}")
        lines = []
        build.compile_library(tmp_path, tmp_path / f"toy{number}.so", say=lines.append)
        library = ctypes.CDLL(str(tmp_path / f"toy{number}.so"))
        assert (library.one(), library.two()) == (number, number)
        assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
        return {line.split()[2] for line in lines if "from an earlier build" not in line}

    assert compiled(1) == {"one", "two"}
    assert compiled(2) == {"one", "two"}  # a header is part of every source
    assert compiled(1) == set()
    assert len(list((tmp_path / "cache").iterdir())) == 4
    (tmp_path / "two.cpp").write_text((tmp_path / "two.cpp").read_text() + "\n")
    assert compiled(1) == {"two"}
    monkeypatch.setenv("CXX", f"{build.find_compiler()[0]} -DOTHER")
    assert compiled(1) == {"one", "two"}  # another compiler's objects are not ours


def test_other_processors_get_the_baseline_alone(tmp_path):
    for name in ("kernels_toy.cpp", "other.cpp"):
        (tmp_path / name).touch()
    made = [(unit.object_name, unit.flags) for unit in build.units(tmp_path, x86=False)]
    assert made == [("kernels_toy.baseline.o", ("-DINTENTION_ARCH=baseline",)), ("other.o", ())]


def test_errors_say_what_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(build.NoCompiler, match="CXX is 'no-such-compiler -m64', which is not on PATH"):
        build.compile_library(tmp_path, tmp_path / "toy.so")
    monkeypatch.delenv("CXX")
    with pytest.raises(build.NoCompiler, match=r"none of c\+\+, g\+\+, clang\+\+ is on PATH"):
        build.compile_library(tmp_path, tmp_path / "toy.so")
    monkeypatch.setattr(build.os, "name", "nt")
    with pytest.raises(build.NoCompiler, match="not built on Windows"):
        build.find_compiler()


@needs_compiler
def test_errors_say_what_was_run(tmp_path):
    with pytest.raises(build.CompileFailed, match=r"there is no \*\.cpp in"):
        build.compile_library(tmp_path, tmp_path / "toy.so")
    (tmp_path / "toy.cpp").write_text("int f() { return missing; }")
    with pytest.raises(build.CompileFailed, match=r"(?s)-O3.* -c .*toy\.cpp.*ended with 1:.*missing"):
        build.compile_library(tmp_path, tmp_path / "toy.so")
    assert [path.name for path in tmp_path.iterdir()] == ["toy.cpp"]


def test_a_sanitizer_does_not_take_the_place_of_the_library(capsys):
    with pytest.raises(SystemExit):
        build.main(["--sanitize", "address"])
    assert "--sanitize needs --out" in capsys.readouterr().err
