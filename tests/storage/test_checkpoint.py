import collections
import concurrent.futures
import errno
import io
import json
import os
import pathlib
import stat
import subprocess
import sys
import types

import cases
import flax.core
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs
from jqobs.storage import files, trees

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


@pytest.mark.parametrize("granularity", ["per_channel", "per_group"])
def test_round_trip_of_channels(path, granularity):
    rng, x, wider = np.random.default_rng(0), *(jax.ShapeDtypeStruct((2, n, 8), jnp.float32) for n in (3, 4))
    any_bits = lambda leaf: rng.bytes(leaf.size * leaf.dtype.itemsize)  # noqa: E731
    for case in cases.WATCHING:
        init = case.build(**cases.GRANULARITIES[granularity]).init
        like, other = (jax.eval_shape(init, each) for each in (x, wider))
        state = jax.tree.map(lambda leaf: np.frombuffer(any_bits(leaf), leaf.dtype).reshape(leaf.shape), like)
        jqobs.save(path, state)
        same(jqobs.load(path, like), state)
        with pytest.raises(jqobs.CheckpointError, match=r"seen/low is an array \(3\D.* and not an array \(4\D"):
            jqobs.load(path, other)


def test_round_trip_of_grids(path):
    ends = {"per_tensor": (-1.0, 3.0), "per_channel": (jnp.array([-1.0, -0.0]), jnp.array([1e-39, 3.0]))}
    grids = {
        f"a/{scheme}": jqobs.calculate_qparams(
            *ends[scheme[: scheme.rindex("_")]], jqobs.QuantSpec(jqobs.qint4, getattr(jqobs, scheme), **axis)
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
    other = {
        **grids,
        "a/per_tensor_affine": jqobs.calculate_qparams(0.0, 1.0, jqobs.QuantSpec(jqobs.qint8, jqobs.per_tensor_affine)),
    }
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


def test_the_result_is_like_the_example(path):
    state = jqobs.min_max().init(X)
    for like in ({"b": state, "a": X}, collections.OrderedDict(b=state, a=X), flax.core.freeze({"b": state, "a": X})):
        jqobs.save(path, like)
        same(jqobs.load(path, like), like)
    jqobs.save(path, {"n": 3, "x": np.arange(3, dtype=">f4"), "columns": np.asfortranarray(X)})
    same(jqobs.load(path), {"n": jnp.int32(3), "x": jnp.arange(3.0), "columns": X})


def test_equal_trees_are_equal_files(path):
    jqobs.save(path, {"b": X, "a": -X})
    content = path.read_bytes()
    jqobs.save(path, {"a": -X, "b": X})
    assert path.read_bytes() == content


def test_only_the_form_of_the_example_is_read(path):
    state = jax.tree.map(jnp.array, jqobs.min_max().init(X))
    jqobs.save(path, state)
    expected = jax.device_get(state)
    jax.tree.map(lambda leaf: leaf.delete(), state)
    same(jqobs.load(path, state), expected)


def test_an_array_over_devices(path):
    spread = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P("a")))
    jqobs.save(path, {"x": spread})
    same(jqobs.load(path, {"x": spread}), {"x": jnp.arange(8.0)})


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
    with pytest.raises(jqobs.CheckpointError, match=r"like must be given to load it: it holds Hist\w*, MinMaxState$"):
        jqobs.load(path)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({3: X}, "strings for keys"),
        ({3: X, "a": X}, "strings for keys"),
        ({"a": object()}, "at a"),
        ({"a": "text"}, "arrays and dicts"),
        ({"a": None}, "got None at a"),
        # What would come back as something else.
        ({"a": [1, 2]}, r"got \[1, 2\] at a"),
        ({"a": (jqobs.Count(X, X), jqobs.Count(X, X))}, "arrays and dicts"),
        ({"a": types.MappingProxyType({"b": X})}, "arrays and dicts"),
        ({"a": X.astype(jnp.bfloat16)}, "arrays and dicts"),
        ({"a": np.longdouble(1)}, "arrays and dicts"),
        ({"a": jax.random.key(0)}, "arrays and dicts"),
        ({"a": 2**40}, "got 1099511627776 at a"),
        ({"a": np.int64([1])}, "int64 at a needs a cast, or jax_enable_x64"),
        ({"a": np.float64(0.1)}, "float64 at a needs a cast, or jax_enable_x64"),
    ],
)
def test_what_is_no_state(path, tree, match):
    with pytest.raises(ValueError, match=match):
        jqobs.save(path, tree)
    assert not path.exists()


def test_depth_is_the_same_for_writing_and_reading(path):
    deep = X
    for _ in range(trees.DEEPEST):
        deep = {"k": deep}
    jqobs.save(path, deep)
    same(jqobs.load(path), deep)
    with pytest.raises(ValueError, match="at most 100 deep"):
        jqobs.save(path, {"k": deep})


def signed(described, tensors):
    """A file with a right checksum, whatever it says."""
    content = safetensors.save(tensors, {"jqobs": json.dumps({"checksum": "0" * 64, **described})})
    return content.replace(b"0" * 64, files._digest(content), 1)


ARRAY = {"kind": "array", "tensor": "a", "shape": [2], "dtype": "float32"}
STATIC = {
    "qdtype": ["qint8", -128, 127],
    "qscheme": "per_tensor_affine",
    "ch_axis": None,
    "group_size": None,
    "eps": 1e-8,
}
LIES = "contradicts itself"


def entries(kind, *parts, **more):
    return {"kind": kind, **more, "entries": [list(part) for part in parts]}


def grid(scale=ARRAY, **changed):
    static = {**STATIC, **changed}
    return entries("QParams", ("scale", scale), ("zero_point", {**ARRAY, "tensor": "b"}), static=static)


@pytest.mark.parametrize(
    ("described", "match"),
    [
        ({"schema": 3, "tree": ARRAY}, "has schema 3, and this is jqobs .*, which reads 2"),
        ({"schema": 3, "elsewhere": ARRAY}, "has schema 3"),
        ({"schema": 0, "tree": ARRAY}, "has schema 0"),
        ({"schema": True, "tree": ARRAY}, "has schema True"),
        ({"schema": "2", "tree": ARRAY}, "has schema '2'"),
        ({"tree": ARRAY}, "KeyError"),
        ({"schema": 2}, LIES),
        ({"schema": 2, "tree": {**ARRAY, "shape": [10**12]}}, LIES),
        ({"schema": 2, "tree": {**ARRAY, "shape": [2.0]}}, LIES),
        ({"schema": 2, "tree": {**ARRAY, "tensor": "c"}}, LIES),
        ({"schema": 2, "tree": {**ARRAY, "tensor": []}}, LIES),
        ({"schema": 2, "tree": {**ARRAY, "dtype": 3}}, LIES),
        ({"schema": 2, "tree": {**ARRAY, "entries": 7}}, LIES),
        ({"schema": 2, "tree": 3}, LIES),
        ({"schema": 2, "tree": {"kind": [1], "entries": []}}, LIES),
        ({"schema": 2, "tree": {"kind": "dict", "entries": 7}}, LIES),
        ({"schema": 2, "tree": {"kind": "dict", "entries": [], "static": 7}}, LIES),
        ({"schema": 2, "tree": entries("dict")}, "nothing is said of a, b"),
        ({"schema": 2, "tree": entries("dict", (1, ARRAY))}, LIES),
        ({"schema": 2, "tree": entries("dict", ("a", ARRAY), ("a", {**ARRAY, "tensor": "b"}))}, LIES),
        ({"schema": 2, "tree": entries("dict", ("a", ARRAY), ("b", ARRAY))}, LIES),
        ({"schema": 2, "tree": grid(qdtype=["qint9", 0, 1])}, LIES),
        ({"schema": 2, "tree": grid(qdtype=["qint8", False, True])}, LIES),
        ({"schema": 2, "tree": grid(qscheme=[])}, LIES),
        ({"schema": 2, "tree": grid(ch_axis=0)}, LIES),
        ({"schema": 2, "tree": grid(qscheme="per_channel_affine", ch_axis=0, group_size=-1)}, LIES),
        ({"schema": 2, "tree": grid(other=1)}, LIES),
        ({"schema": 2, "tree": grid(scale=entries("dict", ("x", ARRAY)))}, LIES),
    ],
)
def test_headers_that_lie(path, described, match):
    named = [name for name in "ab" if f'"tensor": "{name}"' in json.dumps(described)]  # Or that would be the error.
    path.write_bytes(signed(described, {name: np.zeros(2, np.float32) for name in named or "ab"}))
    for like in (None, np.zeros(2, np.float32)):
        with pytest.raises(jqobs.CheckpointError, match=match):
            jqobs.load(path, like)


@pytest.mark.parametrize("depth", [101, 330, 900, 10_000])
def test_a_header_without_end(path, depth):
    text = '{"kind": "dict", "entries": [["k", ' * depth + json.dumps(ARRAY) + "]]}" * depth
    text = f'{{"checksum": "{"0" * 64}", "schema": 2, "tree": {text}}}'
    content = safetensors.save({"a": np.zeros(2, np.float32)}, {"jqobs": text})
    path.write_bytes(content.replace(b"0" * 64, files._digest(content), 1))
    with pytest.raises(jqobs.CheckpointError):
        jqobs.load(path)


def test_numbers_that_jax_would_cut(path):
    wide = {"kind": "array", "tensor": "a", "shape": [1], "dtype": "int64"}
    path.write_bytes(signed({"schema": 2, "tree": wide}, {"a": np.int64([2**40])}))
    with pytest.raises(jqobs.CheckpointError, match="holds int64, for which JAX needs jax_enable_x64"):
        jqobs.load(path)
    with jax.enable_x64(True):
        assert int(jqobs.load(path)[0]) == 2**40


@pytest.mark.parametrize("what", ["zeros", "header", "tail"])
def test_no_more_of_a_large_file_is_read_than_it_declares(path, what):
    if what == "tail":
        jqobs.save(path, {"a": X})
    else:
        path.write_bytes((0 if what == "zeros" else 2**39).to_bytes(8, "little"))
    os.truncate(path, 2**40)  # It takes no space on the disk.
    match = "its header is for" if what == "tail" else "its header has no checksum"
    with pytest.raises(jqobs.CheckpointError, match=match):
        jqobs.load(path, {"a": X})


def test_a_huge_declared_shape_allocates_nothing(path):
    header = json.dumps(
        {
            "__metadata__": {"jqobs": json.dumps({"checksum": "0" * 64})},
            "a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        },
        separators=(",", ":"),
    ).encode()
    content = len(header).to_bytes(8, "little") + header
    path.write_bytes(content.replace(b"0" * 64, files._digest(content), 1))
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


VALID = {
    "a": jqobs.min_max().init(X),
    "b": jqobs.calculate_qparams(0.0, 1.0, jqobs.QuantSpec(jqobs.quint8, jqobs.per_tensor_affine)),
}


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("valid") / "file"
    jqobs.save(path, VALID)
    return path, path.read_bytes()


def test_no_byte_can_change(path):
    jqobs.save(path, {"a": np.float32([1])})
    valid = path.read_bytes()
    for place in range(len(valid)):
        path.write_bytes(valid[:place] + bytes([valid[place] ^ 1 << place % 8]) + valid[place + 1 :])
        with pytest.raises(jqobs.CheckpointError):
            jqobs.load(path)


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_and_a_closed_directory_leave_the_old_file(path, monkeypatch, number):
    jqobs.save(path, {"old": X})
    before = path.read_bytes()

    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(number, os.strerror(number))

    def opens(name, mode):
        if number == errno.EACCES:  # As for anybody but root.
            raise PermissionError(number, os.strerror(number), name)
        open(name, mode).close()
        return Full()

    with monkeypatch.context() as patched:
        # Not through the module: doctest may have imported it a second time.
        patched.setitem(jqobs.save.__globals__["write_signed"].__globals__, "open", opens)
        with pytest.raises(OSError, match="cannot save") as error:
            jqobs.save(path, {"new": X})
    assert (error.value.errno, error.value.filename) == (number, str(path))
    assert isinstance(error.value, PermissionError) == (number == errno.EACCES)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_calibration_that_cannot_be_saved_is_not_lost(tmp_path):
    observer = jqobs.min_max()
    expected = jqobs.calibrate(observer, BATCHES[:4])
    with pytest.raises(OSError, match="cannot save") as error:
        jqobs.calibrate(observer, BATCHES, checkpoint=tmp_path / "missing" / "file", checkpoint_every=4)
    same(error.value.state, expected)
    if os.geteuid():
        tmp_path.chmod(stat.S_IREAD | stat.S_IEXEC)
        with pytest.raises(PermissionError):
            jqobs.save(tmp_path / "file", expected)


def test_many_may_write_one_file(path):
    trees = [{"x": np.full(20_000, i, np.float32)} for i in range(4)]
    jqobs.save(path, trees[0])

    def write(tree):
        for _ in range(10):
            jqobs.save(path, tree)
            assert len(set(np.asarray(jqobs.load(path)["x"]).tolist())) == 1

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(write, trees))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_link_in_the_way_is_not_followed(path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "guessed")
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.with_name(".jqobs-guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError, match="cannot save"):
        jqobs.save(path, {"a": X})
    assert victim.read_text() == "precious"


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="cannot save: It is a pipe or a device"):
        jqobs.save(tmp_path / "pipe", {"a": X})
    with pytest.raises(IsADirectoryError, match="cannot save"):
        jqobs.save(tmp_path, {"a": X})
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_without_the_extra(path, monkeypatch):
    jqobs.save(path, {"a": X})
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (lambda: jqobs.save(path, {"a": X}), lambda: jqobs.load(path)):
        with pytest.raises(ImportError, match=r"pip install 'jqobs\[checkpoint\]'"):
            call()


# --- Calibrations that go on


@pytest.mark.parametrize("deferred", [None, False, True])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(path, deferred):
    observer = jqobs.histogram(bins=8)  # Of which the order of batches shows.
    options = {} if deferred is None else {"mesh": jax.make_mesh((8,), ("a",)), "merge_at_end": deferred}
    expected = jqobs.calibrate(observer, BATCHES, **options)

    def dies():
        yield from BATCHES[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jqobs.calibrate(observer, dies(), checkpoint=path, checkpoint_every=2, **options)
    resumed = jqobs.calibrate(observer, iter(BATCHES), checkpoint=path, checkpoint_every=2, **options)
    same(jax.device_get(resumed), jax.device_get(expected))
    finished = path.read_bytes()
    same(jax.device_get(jqobs.calibrate(observer, BATCHES, checkpoint=str(path), **options)), jax.device_get(expected))
    assert path.read_bytes() == finished


def test_a_calibration_of_a_function_goes_on(path):
    fn = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    batches = [(jnp.ones((3, 2)), x) for x in BATCHES]
    make = lambda: jqobs.observe(fn, jqobs.min_max(), weight_argnums=0)  # noqa: E731
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
            jqobs.calibrate(jqobs.min_max(), BATCHES, checkpoint=path, checkpoint_every=wrong)
    with pytest.raises(ValueError, match="checkpoint_every=2 needs checkpoint="):
        jqobs.calibrate(jqobs.min_max(), BATCHES, checkpoint_every=2)


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
