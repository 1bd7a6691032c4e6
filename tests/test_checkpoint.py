import errno
import json
import os
import pathlib
import stat
import subprocess
import sys

import cases
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs
from jqobs import checkpoint

safetensors = pytest.importorskip("safetensors.numpy")

X = jnp.asarray(9 - np.random.default_rng(0).exponential(1, (4, 3)).astype(np.float32))
BATCHES = [np.random.default_rng(i).standard_normal((8, 3)).astype(np.float32) for i in range(10)]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


def test_round_trip_of_every_observer(path):
    states, empty = {}, {}
    for case in cases.CASES:
        observer = case.build()
        empty[case.id] = {"layers/3/up": observer.init(X)}
        states[case.id] = {"layers/3/up": observer.update(observer.init(X), X)}
    jqobs.save(path, states)
    same(jqobs.load(path, empty), states)
    shapes = jax.eval_shape(lambda: empty)
    same(jqobs.load(str(path), shapes), states)


def test_round_trip_of_grids(path):
    ends = {"per_tensor": (-1.0, 3.0), "per_channel": (jnp.array([-1.0, -0.0]), jnp.array([1e-39, 3.0]))}
    grids = {
        f"a/{scheme}": jqobs.calculate_qparams(
            *ends[scheme[: scheme.rindex("_")]], getattr(jqobs, scheme), jqobs.qint4, **axis
        )
        for scheme, axis in (
            ("per_tensor_affine", {}),
            ("per_tensor_symmetric", {}),
            ("per_channel_affine", {"ch_axis": 0}),
            ("per_channel_symmetric", {"ch_axis": -1}),
        )
    }
    jqobs.save(path, {"one": grids, "two": grids["a/per_tensor_affine"]})
    loaded = jqobs.load(path)
    same(loaded["one"], grids)
    same(jqobs.load(path, {"one": grids, "two": grids["a/per_tensor_affine"]}), loaded)
    other = {**grids, "a/per_tensor_affine": jqobs.calculate_qparams(0.0, 1.0, jqobs.per_tensor_affine, jqobs.qint8)}
    with pytest.raises(jqobs.CheckpointError, match=r"one/a/per_tensor_affine is QParams.*qint4.*not QParams.*qint8"):
        jqobs.load(path, {"one": other, "two": other["a/per_tensor_affine"]})


def test_every_bit_of_odd_values_and_names(path):
    tree = {
        "": np.float32([-0.0, np.inf, 1e-45, np.nan]),
        "a/b": {"c": np.zeros((0, 3), np.uint32)},
        "a": {"b/c": np.bool_(1)},
    }
    jqobs.save(path, tree)
    same(jqobs.load(path), tree)


def test_nobodys_buffer(path):
    observer = jqobs.min_max()
    state = observer.update(observer.init(X), X)
    jqobs.save(path, state)
    step = jax.jit(observer.update, donate_argnums=0)
    loaded = step(jqobs.load(path, state), -X)
    assert float(loaded.min_val) != float(jqobs.load(path, state).min_val) == float(state.min_val)


def test_all_that_does_not_fit_is_in_one_error(path):
    small, large = jqobs.histogram(bins=8), jqobs.histogram(bins=16)
    jqobs.save(path, {"a": small.init(X), "b": small.init(X), "c": jqobs.min_max().init(X)})
    like = {"a": large.init(X), "b": jqobs.min_max().init(X), "d": jqobs.min_max().init(X)}
    with pytest.raises(jqobs.CheckpointError) as error:
        jqobs.load(path, like)
    for part in (
        "a/histogram/low is an array (8,) of uint32 and not an array (16,) of uint32",
        "b is HistogramState and not MinMaxState",
        "missing d/min_val",
        "unexpected c/max_val",
    ):
        assert part in str(error.value)
    with pytest.raises(jqobs.CheckpointError, match=r"like must be given to load .*HistogramState, MinMaxState"):
        jqobs.load(path)


def test_what_is_no_state(path):
    for tree, match in (({3: X}, "strings for keys"), ({"a": object()}, "at a"), ({"a": "text"}, "arrays and dicts")):
        with pytest.raises(ValueError, match=match):
            jqobs.save(path, tree)
    assert not path.exists()


def signed(described, tensors):
    """A file with a right checksum, whatever it says."""
    content = safetensors.save(tensors, {"jqobs": json.dumps({"checksum": "0" * 64, **described})})
    return content.replace(b"0" * 64, checkpoint._digest(content), 1)


ARRAY = {"kind": "array", "tensor": "a", "shape": [2], "dtype": "float32"}


@pytest.mark.parametrize(
    ("described", "match"),
    [
        ({"schema": 2, "tree": ARRAY}, "has schema 2, and this is jqobs .*, which reads 1"),
        ({"schema": "1", "tree": ARRAY}, "has schema '1'"),
        ({"schema": 1}, "KeyError"),
        ({"schema": 1, "tree": {**ARRAY, "shape": [10**12]}}, "contradicts itself"),
        ({"schema": 1, "tree": {**ARRAY, "tensor": "b"}}, "contradicts itself"),
        ({"schema": 1, "tree": {**ARRAY, "dtype": 3}}, "contradicts itself"),
        ({"schema": 1, "tree": 3}, "contradicts itself"),
        ({"schema": 1, "tree": {"kind": "dict", "entries": [["a", ARRAY], ["a", ARRAY]]}}, "contradicts itself"),
        (
            {"schema": 1, "tree": {"kind": "QParams", "static": {"qdtype": ["qint9", 0, 1]}, "entries": []}},
            "contradicts",
        ),
    ],
)
def test_headers_that_lie(path, described, match):
    path.write_bytes(signed(described, {"a": np.zeros(2, np.float32)}))
    with pytest.raises(jqobs.CheckpointError, match=match):
        jqobs.load(path, np.zeros(2, np.float32))


def test_a_huge_declared_shape_allocates_nothing(path):
    header = json.dumps(
        {
            "__metadata__": {"jqobs": json.dumps({"checksum": "0" * 64})},
            "a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        },
        separators=(",", ":"),
    ).encode()
    content = len(header).to_bytes(8, "little") + header
    path.write_bytes(content.replace(b"0" * 64, checkpoint._digest(content), 1))
    with pytest.raises(jqobs.CheckpointError, match=r"is no file of jqobs\.save"):
        jqobs.load(path)


def test_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        jqobs.load(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "pipe"):
        with pytest.raises(jqobs.CheckpointError, match="is not a file"):
            jqobs.load(tmp_path / name)
    (tmp_path / "empty").touch()
    with pytest.raises(jqobs.CheckpointError, match="no checksum"):
        jqobs.load(tmp_path / "empty")


VALID = {"a": jqobs.min_max().init(X), "b": jqobs.calculate_qparams(0.0, 1.0, jqobs.per_tensor_affine, jqobs.quint8)}


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("valid") / "file"
    jqobs.save(path, VALID)
    return path, path.read_bytes()


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=300)
def test_damage_is_always_found(content, data):
    path, valid = content
    kind = data.draw(st.sampled_from(["flip", "cut", "noise", "append"]))
    if kind == "flip":
        place, bit = data.draw(st.integers(0, len(valid) - 1)), data.draw(st.integers(0, 7))
        damaged = valid[:place] + bytes([valid[place] ^ 1 << bit]) + valid[place + 1 :]
    elif kind == "cut":
        damaged = valid[: data.draw(st.integers(0, len(valid) - 1))]
    elif kind == "append":
        damaged = valid + data.draw(st.binary(min_size=1, max_size=50))
    else:
        damaged = data.draw(st.binary(max_size=300))
    other = path.with_name("damaged")
    other.write_bytes(damaged)
    with pytest.raises(jqobs.CheckpointError):
        jqobs.load(other, VALID)


# --- Writing


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_an_interrupted_save_leaves_the_old_file(path, monkeypatch, fails):
    jqobs.save(path, {"old": X})
    before = path.read_bytes()

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="cannot save: No space left on device") as error:
        jqobs.save(path, {"new": X})
    assert error.value.filename == str(path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_full_disk_and_a_closed_directory_lose_nothing(tmp_path, monkeypatch):
    observer = jqobs.min_max()
    expected = jqobs.calibrate(observer, BATCHES[:4])
    with pytest.raises(OSError, match="cannot save") as error:
        jqobs.calibrate(observer, BATCHES, checkpoint=tmp_path / "missing" / "file", every=4)
    same(error.value.state, expected)
    if os.geteuid():
        tmp_path.chmod(stat.S_IREAD | stat.S_IEXEC)
        with pytest.raises(PermissionError):
            jqobs.save(tmp_path / "file", expected)


# --- Calibrations that go on


@pytest.mark.parametrize("deferred", [None, False, True])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(path, deferred):
    observer = jqobs.histogram(bins=8)  # Of which the order of batches shows.
    options = {} if deferred is None else {"mesh": jax.make_mesh((8,), ("a",)), "deferred": deferred}
    expected = jqobs.calibrate(observer, BATCHES, **options)

    def dies():
        yield from BATCHES[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jqobs.calibrate(observer, dies(), checkpoint=path, every=2, **options)
    resumed = jqobs.calibrate(observer, iter(BATCHES), checkpoint=path, every=2, **options)
    same(jax.device_get(resumed), jax.device_get(expected))
    finished = path.read_bytes()
    same(jax.device_get(jqobs.calibrate(observer, BATCHES, checkpoint=str(path), **options)), jax.device_get(expected))
    assert path.read_bytes() == finished


def test_a_calibration_of_a_function_goes_on(path):
    fn = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    batches = [(jnp.ones((3, 2)), x) for x in BATCHES]
    make = lambda: jqobs.observe(fn, jqobs.min_max(), params=0)  # noqa: E731
    expected = jqobs.calibrate(make(), batches)
    jqobs.calibrate(make(), batches[:5], checkpoint=path)
    again = make()
    state = jqobs.calibrate(again, batches, checkpoint=path)
    same(state, expected)
    assert set(again.calculate_qparams(state)) == {"w/lhs", "w/rhs"}


def test_a_checkpoint_of_something_else(path):
    jqobs.calibrate(jqobs.min_max(), BATCHES, checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(jqobs.CheckpointError, match="state is MinMaxState and not HistogramState"):
        jqobs.calibrate(jqobs.histogram(bins=8), BATCHES, checkpoint=path)
    with pytest.raises(ValueError, match=r"batches hold 3 batches, and .* was saved after 10"):
        jqobs.calibrate(jqobs.min_max(), BATCHES[:3], checkpoint=path)
    assert path.read_bytes() == before
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="every must be a whole number"):
            jqobs.calibrate(jqobs.min_max(), BATCHES, checkpoint=path, every=wrong)
    with pytest.raises(ValueError, match="every=2 needs checkpoint="):
        jqobs.calibrate(jqobs.min_max(), BATCHES, every=2)


def test_killed_twenty_times(tmp_path):
    script = pathlib.Path(__file__).parent / "killed.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr
    assert "20 kills" in done.stdout
    assert done.stdout.splitlines()[-1] == "equal"


# --- Ordinary pytrees


def test_states_pass_through_flax_serialization():
    from flax import serialization

    observer = jqobs.log_histogram(bins_per_octave=2)
    state = observer.update(observer.init(X), X)
    same(serialization.from_bytes(observer.init(X), serialization.to_bytes(state)), jax.device_get(state))


def test_states_pass_through_orbax(tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint")
    observer = jqobs.log_histogram(bins_per_octave=2)
    state = {"up/lhs": observer.update(observer.init(X), X)}
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", state)
        checkpointer.wait_until_finished()
        same(checkpointer.restore(tmp_path / "orbax", {"up/lhs": observer.init(X)}), state)
