"""The picture in `jqobs/__init__.py`, held against the code."""

import ast
import pathlib
import re

import pytest

import jqobs

ROOT = pathlib.Path(jqobs.__file__).parent

LAYERS = [
    ["_version", "arithmetic", "counting", "meshes", "naming", "products", "progress", "qtypes", "tables"],
    ["arguments", "granularity"],
    ["batches", "qparams", "tracing"],
    ["observer", "quantization"],
    ["lifting", "range_rules"],
    ["observers"],
    ["fake_quantizer", "merging", "qconfig", "reading", "report", "spreading", "state_dict"],
    ["checkpoint"],
    ["calibration", "observation"],
    ["linen", "nnx"],
]
"""A module imports from the layers above its own in this list, never from its own or from those below."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FLAX = {"linen", "nnx"}


def sources():
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def unit(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ([f"jqobs.{name.name}" for name in node.names] if node.module == "jqobs" else [node.module])
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    assert unit(path) in LEVEL, f"add {unit(path)} to LAYERS in {__file__}, and to the picture in jqobs/__init__.py"
    for name in imports(path):
        if name.startswith("jqobs."):
            other = name.split(".")[1]
            inside = other == unit(path) and path.parent != ROOT
            assert inside or LEVEL[other] < LEVEL[unit(path)], f"{path}: {unit(path)} may not import {name}"
        foreign = name.split(".")[0]
        allowed = {"flax"} if unit(path) in FLAX else set()
        assert foreign not in {"flax", "matplotlib", "torch", "sklearn"} - allowed, f"{path} may not import {name}"


def test_the_picture_names_every_module():
    picture = set(re.findall(r"[a-z_]+", jqobs.__doc__.split("Where things are")[1].split("Example")[0]))
    missing = {name for names in LAYERS for name in names if not name.startswith("_")} - picture
    assert not missing, f"the docstring of jqobs/__init__.py does not mention {missing}"


def test_no_module_is_a_drawer():
    for path in sources():
        assert path.stem.strip("_") not in {"utils", "util", "core", "helpers", "common", "misc"}, path


def test_observer_files_have_one_skeleton():
    for name in jqobs.observers.__all__:
        tree = ast.parse((ROOT / "observers" / f"_{name}.py").read_text())
        kinds = [type(node) for node in tree.body]
        assert ast.get_docstring(tree), name
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert functions[0] == name, f"the factory comes first in _{name}.py"
        if ast.ClassDef in kinds:
            assert kinds.index(ast.ClassDef) < kinds.index(ast.FunctionDef), (
                f"the state comes before the factory in _{name}.py"
            )


def test_public_names_are_documented():
    for module in (jqobs, jqobs.linen, jqobs.nnx, jqobs.observers):
        for name in module.__all__:
            assert getattr(getattr(module, name), "__doc__", "x"), f"{module.__name__}.{name} has no docstring"


def test_public_functions_show_an_example():
    for name in jqobs.__all__:
        thing = getattr(jqobs, name)
        if callable(thing) and thing.__module__.startswith("jqobs") and not isinstance(thing, type):
            assert ">>>" in thing.__doc__, f"jqobs.{name} shows no example"


def test_linen_and_nnx_offer_the_same_names():
    assert set(jqobs.nnx.__all__) - set(jqobs.linen.__all__) == {"ObserverState"}
    assert set(jqobs.linen.__all__) <= set(jqobs.nnx.__all__)
