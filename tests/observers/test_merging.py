"""One answer on any number of devices: every observer, per tensor and per channel, in one program for each way."""

import functools
import json
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jqobs
from jqobs.sharding.placement import on_each_device

PER_CHANNEL = {"qscheme": jqobs.per_channel_symmetric, "qdtype": jqobs.qint8, "ch_axis": 1}
FACTORIES = {
    "min_max": jqobs.min_max,
    "mean_min_max": jqobs.mean_min_max,
    "moving_average_min_max": functools.partial(jqobs.moving_average_min_max, averaging_constant=0.25),
    "log_histogram": functools.partial(jqobs.log_histogram, bins_per_octave=2),
    "histogram": functools.partial(jqobs.histogram, bins=16),
}
OBSERVERS = {
    f"{name}/{kind}": factory(**arguments)
    for name, factory in FACTORIES.items()
    for kind, arguments in (("tensor", {}), ("channel", PER_CHANNEL))
}
MERGEABLE = {name: observer for name, observer in OBSERVERS.items() if observer.merge is not None}


def batches():
    """Three of 16 x 8, one with a NaN on one device only; all away from zero, where a wrong identity would hide."""
    rng = np.random.default_rng(3)
    made = [(rng.standard_normal((16, 8)) * scale + 9).astype(np.float32) for scale in (1, 3, 2)]
    made[1][5, 3] = np.nan
    made[2][:2] = np.inf  # The first of eight devices has nothing finite.
    return made


def init(observers):
    return {name: observer.init(jnp.zeros((16, 8))) for name, observer in observers.items()}


def update(observers, states, x, **options):
    return {name: observer.update(states[name], x, **options) for name, observer in observers.items()}


@functools.cache
def single(count=3):
    step = jax.jit(functools.partial(update, OBSERVERS))
    states = init(OBSERVERS)
    for x in batches()[:count]:
        states = step(states, x)
    return jax.device_get(states)


def assert_same(states, expected, exact_histogram=True):
    for name, state in jax.device_get(states).items():
        if name.startswith("histogram") and not exact_histogram:
            assert_within(2, state, expected[name])
        elif name.startswith(("moving", "mean")):  # Sums of floats.
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-7), state, expected[name])
        else:
            jax.tree.map(np.testing.assert_array_equal, state, expected[name])


def assert_within(bins, state, expected):
    """No value lies more than so many bins from where it lay on one device."""
    for field in ("min_val", "max_val", "seen", "nonfinite"):
        np.testing.assert_array_equal(np.asarray(getattr(state, field)), np.asarray(getattr(expected, field)))
    ours, theirs = (np.cumsum(np.asarray(each.histogram).astype(np.int64), -1) for each in (state, expected))
    np.testing.assert_array_equal(ours[..., -1], theirs[..., -1])
    edges = [(0, 0)] * (theirs.ndim - 1) + [(bins, bins)]
    low, high = (np.pad(theirs, edges, mode="constant", constant_values=(0, theirs.max())) for _ in range(2))
    assert ((ours >= low[..., : -2 * bins]) & (ours <= high[..., 2 * bins :])).all()


MESHES = {
    "8 automatic": (((8,), ("a",), (AxisType.Auto,)), "a"),
    "8 explicit": (((8,), ("a",), (AxisType.Explicit,)), "a"),
    "4x2 explicit": (((4, 2), ("a", "b"), (AxisType.Explicit,) * 2), ("a", "b")),
}


@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "feature"])
@pytest.mark.parametrize("kind", MESHES)
def test_under_jit(kind, axis):
    arguments, names = MESHES[kind]
    mesh = jax.make_mesh(*arguments)
    spec = [None, None]
    spec[axis] = names
    if kind == "4x2 explicit" and axis == 1:
        spec = ["a", "b"]  # Both at once.
    step = jax.jit(functools.partial(update, OBSERVERS))
    with jax.set_mesh(mesh):
        states = init(OBSERVERS)
        for x in batches():
            states = step(states, jax.device_put(x, NamedSharding(mesh, jax.P(*spec))))
    assert_same(states, single())


def test_inside_shard_map():
    """Reduced batch by batch, and accepted as replicated."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    step = functools.partial(update, OBSERVERS, axis_name="a")
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("a")), out_specs=jax.P()))
    states = init(OBSERVERS)
    for x in batches():
        states = step(states, x)
    assert_same(states, single())


def test_axis_names_elsewhere():
    """Without the check, on what all devices hold (one batch, and not eight), and under vmap: one batch each time."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    observers = {name: each for name, each in OBSERVERS.items() if name.endswith("tensor")}
    before, x = update(observers, init(observers), batches()[0]), batches()[1]
    expected = jax.device_get(update(observers, before, x))
    step = functools.partial(update, observers, axis_name="a")
    for spec, check in ((jax.P("a"), False), (jax.P(), True)):
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), spec), out_specs=jax.P(), check_vma=check)
        assert_same(jax.jit(mapped)(before, x), expected)
    mapped = jax.vmap(step, in_axes=(None, 0), axis_name="a")(before, x.reshape(8, 2, 8))
    assert_same(jax.tree.map(lambda leaf: leaf[3], mapped), expected)


def test_groups_on_an_explicit_mesh():
    """Where a reshape has to be told where its result goes, jitted and eagerly."""
    mesh = jax.make_mesh((8,), ("a",))
    groups = {**PER_CHANNEL, "ch_axis": 0, "group_size": 4}
    observers = {name: FACTORIES[name](**groups) for name in ("min_max", "log_histogram")}
    expected = jax.jit(functools.partial(update, observers))(init(observers), batches()[1])
    with jax.set_mesh(mesh):
        x = jax.device_put(batches()[1], NamedSharding(mesh, jax.P("a")))
        for way in (jax.jit, lambda step: step):
            states = way(functools.partial(update, observers))(init(observers), x)
            assert_same(states, jax.device_get(expected))
    for name, observer in observers.items():
        jax.tree.map(
            np.testing.assert_array_equal,
            observer.calculate_qparams(states[name]),
            observer.calculate_qparams(jax.device_get(expected)[name]),
        )


def test_merge_across():
    """Each device goes through batches of its own, which are merged once, and accepted as replicated."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    observers = {name: each for name, each in MERGEABLE.items() if not name.startswith("mean")}

    def on_each(*parts):
        states = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "a", to="varying"), init(observers))
        for x in parts:
            states = update(observers, states, x)
        return {name: jqobs.merge_across(observers[name], state, "a") for name, state in states.items()}

    merged = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=(jax.P("a"),) * 3, out_specs=jax.P()))(*batches())
    assert_same(merged, single(), exact_histogram=False)


def test_deferred():
    mesh = jax.make_mesh((8,), ("a",))
    for name, observer in MERGEABLE.items():
        if not name.startswith("mean"):
            state = jqobs.calibrate(observer, batches(), mesh=mesh, merge_at_end=True)
            assert_same({name: state}, single(), exact_histogram=False)


@pytest.mark.parametrize("kind", MESHES)
def test_calibrate_on_a_mesh(kind):
    mesh = jax.make_mesh(*MESHES[kind][0])
    for name in ("moving_average_min_max/channel", "log_histogram/tensor"):
        assert_same({name: jqobs.calibrate(OBSERVERS[name], batches(), mesh=mesh)}, single())


@pytest.mark.parametrize("deferred", [False, True])
def test_what_does_not_divide_is_not_padded(deferred):
    mesh, observer = jax.make_mesh((8,), ("a",)), OBSERVERS["log_histogram/channel"]
    uneven = [*batches(), np.full((5, 8), 77, np.float32), np.zeros((0, 8), np.float32)]
    masks = [np.ones((len(x), 1), bool) for x in uneven]
    masks[0][2:4] = False  # All that the second device has.
    pairs = list(zip(uneven, masks, strict=True))
    got = jqobs.calibrate(observer, pairs, mesh=mesh, merge_at_end=deferred)
    expected = jqobs.calibrate(observer, pairs)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), expected)
    more = jqobs.calibrate(observer, pairs[:1], mesh=mesh, merge_at_end=deferred, state=got)
    assert np.asarray(more.seen).sum() == np.asarray(got.seen).sum() + np.isfinite(uneven[0][masks[0][:, 0]]).sum()


def fn(params, x):
    body = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    return jax.lax.scan(body, x, params["layers"])[0] @ params["head"]


PARAMS = {"layers": jnp.full((2, 8, 8), 0.1), "head": jnp.ones((8, 3))}


@pytest.mark.parametrize("deferred", [False, True])
def test_a_whole_function(deferred):
    mesh = jax.make_mesh((8,), ("a",))
    calibration = jqobs.observe(fn, jqobs.log_histogram(bins_per_octave=2), weight_argnums=0)
    data = [(PARAMS, np.nan_to_num(x, posinf=9)) for x in batches()]
    expected = jqobs.calibrate(calibration, data)
    got = jax.device_get(jqobs.calibrate(calibration, data, mesh=mesh, merge_at_end=deferred))
    for name, state in expected.items():
        if name.endswith("rhs"):  # What a weight shows, every device has seen.
            for field in ("min_val", "max_val"):
                np.testing.assert_array_equal(getattr(got[name], field), getattr(state, field))
        else:
            np.testing.assert_array_equal(np.asarray(got[name].seen), np.asarray(state.seen))
            np.testing.assert_allclose(got[name].min_val, state.min_val, rtol=1e-6)


def test_observers_that_remember_nothing():
    mesh = jax.make_mesh((8,), ("a",))
    for observer in (jqobs.noop(), jqobs.fixed_qparams(scale=0.5, zero_point=0)):
        assert jqobs.calibrate(observer, batches(), mesh=mesh, merge_at_end=True) == observer.init(0.0)


def test_who_cannot_be_merged_says_what_to_do():
    average, mesh = OBSERVERS["moving_average_min_max/tensor"], jax.make_mesh((8,), ("a",))
    state = average.init(0.0)
    with pytest.raises(ValueError, match=r"merge_across cannot merge moving_average.*axis_name"):
        jqobs.merge_across(average, state, "a")
    with pytest.raises(ValueError, match=r"merge_processes cannot merge moving_average.*sharded over all devices"):
        jqobs.merge_processes(average, state)
    with pytest.raises(ValueError, match="merge_at_end=True cannot merge moving_average"):
        jqobs.calibrate(average, batches(), mesh=mesh, merge_at_end=True)
    calibration = jqobs.observe(fn, jqobs.QConfig(activation=average), weight_argnums=0)
    with pytest.raises(ValueError, match="cannot merge moving_average_min_max"):
        jqobs.calibrate(calibration, [(PARAMS, batches()[0])], mesh=mesh, merge_at_end=True)
    with pytest.raises(ValueError, match="merge_at_end=True needs mesh="):
        jqobs.calibrate(OBSERVERS["min_max/tensor"], batches(), merge_at_end=True)
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh"):
        jqobs.calibrate(OBSERVERS["min_max/tensor"], batches(), mesh=8)
    with pytest.raises(ValueError, match="observer must be an Observer or a calibration"):
        jqobs.merge_across(3, state, "a")


# --- Collectives


def collectives(compiled):
    return re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text())


def test_collectives_are_few():
    """At most three all-reduces for an observer, and data is never gathered."""
    for axis, kind in ((0, AxisType.Auto), (1, AxisType.Auto), (0, AxisType.Explicit)):
        mesh = jax.make_mesh((8,), ("a",), axis_types=(kind,))
        spec = [None, None]
        spec[axis] = "a"
        x = jax.device_put(batches()[0], NamedSharding(mesh, jax.P(*spec)))
        with jax.set_mesh(mesh):
            for name, observer in OBSERVERS.items():
                step = jax.jit(lambda state, x, observer=observer: observer.update(state, x))
                found = collectives(step.lower(observer.init(x), x).compile())
                assert set(found) <= {"all-reduce"}, (name, axis, kind, found)
                assert len(found) <= 3, (name, axis, kind, found)
                assert found or (axis == 1 and name.endswith("channel")), name


def test_no_collective_when_deferred():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(batches()[0], NamedSharding(mesh, jax.P("a")))
    states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (8, *leaf.shape)), init(MERGEABLE))
    states = jax.device_put(states, NamedSharding(mesh, jax.P("a")))
    step = jax.jit(functools.partial(on_each_device, functools.partial(update, MERGEABLE), mesh), static_argnums=1)
    assert not collectives(step.lower(states, (jax.P("a"),), (x,)).compile())


# --- Processes


def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = pathlib.Path(__file__).parent / "two_processes.py"
    workers = [
        subprocess.Popen([sys.executable, str(script), port, str(i)], stdout=subprocess.PIPE, text=True) for i in (0, 1)
    ]
    try:
        printed = [worker.communicate(timeout=180)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    one, other = (json.loads(text.splitlines()[-1]) for text in printed)
    assert one == other
    for name, leaves in one.items():
        expected = single()[name]
        if name.startswith("histogram"):
            restored = jax.tree.unflatten(jax.tree.structure(expected), [np.array(leaf) for leaf in leaves])
            assert_within(2, restored, expected)
        else:
            for leaf, want in zip(leaves, jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(
                    np.array(leaf, np.float64), np.float64(want), rtol=2e-7 if "average" in name else 0
                )
