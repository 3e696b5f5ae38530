"""What users can write stays: names, signatures, import paths; a change of them is made knowingly."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import intention

ROOT = Path(__file__).parents[2]
WRITTEN = Path(__file__).with_name("public_face.txt")
REWRITE = "python tests/repo/test_public_face.py"

MODULES = """
intention intention.constraints intention.discriminant intention.distributed intention.features intention.fewshot
intention.functional
intention.integrations.causal_lm intention.integrations.fla intention.integrations.transformers intention.kernels
intention.naive intention.nn intention.nn.alpha intention.nn.blocks intention.nn.convert intention.nn.embed
intention.nn.gated intention.nn.heads intention.nn.language
intention.nn.mixers intention.nn.multihead intention.nn.scaling intention.sklearn intention.lab
intention.lab.core.results intention.lab.core.train intention.lab.data intention.lab.experiments
intention.lab.report
"""

SOURCE = ROOT / "src" / "intention"
FILES = [path.relative_to(SOURCE).with_suffix("").parts for path in sorted(SOURCE.rglob("*.py"))]
# Helpers that users can see, too: all modules but the solver's, and those whose names begin with "_".
SHOWN = {".".join(("intention", *file)).removesuffix(".__init__") for file in FILES} - {"intention"}
SHOWN = {name for name in SHOWN if name.split(".")[1] != "solve" and "._" not in name}

# What the README, the documentation and the examples of version 0.2 said to import or named; what has moved since is
# not allowed to leave these.
PATHS = """
intention.AccuracyWarning intention.CausalState intention.Context.constrain intention.Context.load
intention.causal_intention intention.constraints.one_pass intention.discriminant.lda intention.discriminant.ls_svm
intention.discriminant.qda intention.distributed.fit intention.distributed.intention intention.features.nystroem
intention.fit intention.functional.Info intention.functional.attention intention.functional.intention
intention.functional.linear_attention intention.functional.sigma_intention
intention.integrations.transformers.register intention.kernels.Gaussian intention.kernels.Kernel
intention.lab.data.load intention.lab.results intention.lab.train.Plan intention.lab.train.train
intention.lab.experiments.anomaly intention.lab.experiments.computations_2d intention.lab.experiments.fewshot
intention.lab.experiments.fewshot_latent intention.lab.experiments.fewshot_resnet intention.lab.experiments.kabsch
intention.lab.experiments.normalisation intention.lab.experiments.pixels intention.lab.experiments.policy
intention.lab.experiments.scaling intention.lab.experiments.sine intention.naive.dual intention.naive.erf
intention.naive.intention intention.naive.ls_svm intention.naive.neural_process intention.naive.pseudo
intention.naive.sigma intention.native_info intention.nn.ContextAlpha intention.nn.Informer
intention.nn.InformerDecoderLayer intention.nn.InformerLM intention.nn.InformerLayer intention.nn.Intention
intention.nn.LearnableAlpha intention.nn.MultiheadAttention intention.nn.MultiheadIntention
intention.nn.MultiheadLinearAttention intention.nn.MultiheadNeuralProcess intention.nn.Transformer intention.nn.mlp
intention.nn.scaling.variance_scale intention.nn.swap_attention intention.sklearn.IntentionRegressor
intention.solve.native.build intention.solve.native.library.off
"""


def signature(thing):
    """As text, without what differs between runs and Python versions; "" where it is not ours."""
    made = thing.__init__ if inspect.isclass(thing) else thing
    if inspect.isclass(thing) and not issubclass(thing, tuple) and not ours(made):
        return ""
    text = re.sub(r" at 0x[0-9a-f]+|ForwardRef(?=\()", "", str(inspect.signature(thing)))
    return re.sub(r"\w*Path\('.*?'\)", "Path", text)


def ours(thing):
    return getattr(thing, "__module__", "").startswith("intention")


def lines_of(path, thing, public):
    """One line for the name, and for a class one for each public attribute that no other public class has."""
    if not inspect.isclass(thing):
        return [path + (signature(thing) if callable(thing) else "")]
    lines = [f"class {path}{signature(thing)}"]
    for name in sorted(dir(thing)):
        owner = next(c for c in thing.__mro__ if name in vars(c))
        if (name.startswith("_") and name != "__call__") or not ours(owner) or (owner in public and owner is not thing):
            continue
        found = vars(owner)[name]
        inside = getattr(found, "__func__", found)  # of a classmethod or staticmethod
        if inspect.isfunction(inside):
            lines.append(f"    .{name}{signature(inside)}")
        elif not type(found).__module__.startswith("sklearn"):  # which adds its own
            lines.append(f"    .{name}")
    return lines


def face():
    """Every public module with its names; a name is written out once, where it has the shortest path."""
    lines, written = [], []
    modules = {name: importlib.import_module(name) for name in MODULES.split()}
    public = [getattr(module, name) for module in modules.values() for name in module.__all__]
    for path, module in sorted(modules.items(), key=lambda item: (item[0].count("."), item[0])):
        lines.append(f"\n{path}: {' '.join(sorted(module.__all__))}")
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if not inspect.ismodule(thing) and not any(thing is x for x in written):
                lines += lines_of(f"{path}.{name}", thing, public)
                written.append(thing)
    return "\n".join(lines).strip() + "\n"


def test_names_and_signatures_are_those_written_down():
    assert face() == WRITTEN.read_text(), f"the public face has changed; if that is meant: {REWRITE}"


@pytest.mark.parametrize("module", sorted(SHOWN.union(MODULES.split())))
def test_a_star_gives_the_public_names_alone(module):
    found = {}
    exec(f"from {module} import *", found)
    found.pop("__builtins__")
    assert set(found) == set(importlib.import_module(module).__all__)
    assert not [name for name in found if name.startswith("_")]


@pytest.mark.parametrize("path", PATHS.split())
def test_what_the_documentation_named_is_there(path):
    parts, found = path.split("."), intention
    for i, name in enumerate(parts[1:], 2):
        module = ".".join(parts[:i])
        if not hasattr(found, name):  # a part of the package that nothing has imported yet
            importlib.import_module(module)
        found = getattr(found, name)


def test_what_the_documentation_imports_is_there():
    """The import lines of README, documentation and examples, as they are now."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    lines = set()
    for text in texts:
        lines |= set(re.findall(r"^[ >.]*((?:from|import) intention\b[\w., ]*)$", text.read_text(), re.MULTILINE))
    assert len(lines) > 10
    for line in sorted(lines):
        exec(line, {})


def test_the_oracle_imports_nothing_of_ours():
    """src/intention/naive.py is what the rest is compared with: torch and the standard library, nothing else."""
    tree = ast.parse((SOURCE / "naive.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level or node.module is None else node.module.split(".")[0])
    assert "torch" in names
    assert names <= {"torch", *sys.stdlib_module_names}


if __name__ == "__main__":
    WRITTEN.write_text(face())
