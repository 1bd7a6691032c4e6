"""The picture in `jqobs/__init__.py`, held against the code."""

import ast
import pathlib
import re

import pytest

import jqobs

ROOT = pathlib.Path(jqobs.__file__).parent

LARGEST = 350
"""No file needs more lines. What is longer is named here, with the length that it may not pass."""
TOO_LARGE = {"tracing/program.py": 668, "nnx/_layers.py": 469}

PICTURE = jqobs.__doc__.split("Where things are")[1].split("Example:")[0]
FLAX = {"linen", "nnx"}


def drawn():
    """The modules in the order of the picture: `room` or `room.module`."""
    room = None
    for line in PICTURE.splitlines()[1:]:
        if match := re.match(r" {4}(\w+)(/?) ", line):
            room = match[1]
            yield room
        elif line.strip():
            yield from (f"{room}.{name}" for name in line.split())


PLACE = {name: place for place, name in enumerate(drawn())}
ROOM = {name: place for name, place in PLACE.items() if "." not in name}


def sources():
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name if name.removeprefix("jqobs.") in PLACE else node.module for name in whole)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_the_page(path):
    own = module(path)
    room = own.split(".")[0]
    assert own in PLACE, f"draw {own} in the picture of jqobs/__init__.py"
    for name in imports(path):
        if name.startswith("jqobs."):
            other = name.removeprefix("jqobs.")
            assert other in PLACE, f"{path}: {name} is not in the picture of jqobs/__init__.py"
            if room != other.split(".")[0]:
                assert ROOM[other.split(".")[0]] > ROOM[room], f"{own} may not import {name}: it is drawn above"
                assert {room, other.split(".")[0]} != FLAX, f"{own} and {name} are thin shells beside one another"
            elif path.name != "__init__.py":
                assert PLACE[other] > PLACE[own], f"{own} may not import {name}: it is drawn above"
        foreign = name.split(".")[0]
        allowed = {"flax"} if room in FLAX else set()
        assert foreign not in {"flax", "matplotlib", "torch", "sklearn"} - allowed, f"{path} may not import {name}"


def test_the_picture_draws_nothing_that_is_not_there():
    assert set(PLACE) == {module(path) for path in sources()}


def test_files_are_read_in_one_sitting():
    for path in sources():
        name, lines = str(path.relative_to(ROOT)), len(path.read_text().splitlines())
        assert lines <= TOO_LARGE.get(name, LARGEST), f"{name} has {lines} lines"
        assert name not in TOO_LARGE or lines > LARGEST, f"{name} is no longer too large: take it off the list"


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
