"""What every observer promises, asked of every observer, per tensor, per channel and per group.

The data is shifted away from 0 and 1: a statistic that starts at a default value passes every law on data around it.
"""

import inspect
import warnings

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs

SHAPE = (8, 3, 8)

watching = pytest.mark.parametrize("case", cases.WATCHING, ids=lambda case: case.id)
every = pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
mergeable = pytest.mark.parametrize(
    "case", [case for case in cases.WATCHING if case.build().merge is not None], ids=lambda case: case.id
)
granularity = pytest.mark.parametrize("how", cases.GRANULARITIES.values(), ids=cases.GRANULARITIES)


def batch(seed, shape=SHAPE, dtype=np.float32):
    """Skewed data between 7 and 9 with exact ties."""
    return jnp.asarray((9 - np.random.default_rng(seed).exponential(0.4, shape).clip(0, 2).round(3)).astype(dtype))


def run(observer, batches, **kwargs):
    state = observer.init(batches[0])
    for x in batches:
        state = observer.update(state, x, **kwargs)
    return state


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, (x, y) in zip(
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(a)],
        zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True),
        strict=True,
    ):
        assert x.dtype == y.dtype, path
        assert x.shape == y.shape, path
        # As bits: -0.0 is not 0.0, and two NaN are the same.
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), (path, x, y)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-7), a, b)


def assert_within_bins(a, b):
    assert_same(a._replace(histogram=a.seen), b._replace(histogram=b.seen))
    below = [np.cumsum(np.asarray(state.histogram).astype(int), -1) for state in (a, b)]
    assert (below[0][..., -1] == np.asarray(a.seen)).all()
    # A bin for every time that a range grew after another: in both streams, twice or more.
    for one, other in (below, below[::-1]):
        assert (one[..., :-2] <= other[..., 2:]).all()


STREAMS_EQUAL = {"a bit": assert_same, "rounding": assert_close, "a bin": assert_within_bins}


# The life of a state


@every
def test_init_reads_only_shape_and_dtype(case):
    x = batch(0)
    assert_same(case.build().init(x), case.build().init(jax.ShapeDtypeStruct(x.shape, x.dtype)))


@every
def test_init_counts_nothing(case):
    state = case.build().init(batch(0))
    assert bool(jqobs.is_calibrated(state)) is not case.needs_data


@watching
@granularity
def test_before_data_an_error_names_the_observer(case, how):
    observer = case.build(**how)
    with pytest.raises(jqobs.NotCalibratedError, match=case.factory.__name__):
        observer.calculate_qparams(observer.init(batch(0)))


@watching
@granularity
def test_before_data_a_trace_gets_one_and_zero(case, how):
    observer = case.build(**how)
    empty, full = observer.init(batch(0)), run(observer, [batch(0)])
    scale, zero_point = jax.jit(observer.calculate_qparams)(empty)
    after = observer.calculate_qparams(full)
    assert (scale.shape, scale.dtype) == (after.scale.shape, jnp.float32)
    assert (zero_point.shape, zero_point.dtype) == (after.zero_point.shape, jnp.int32)
    assert (np.asarray(scale) == 1).all()
    assert (np.asarray(zero_point) == 0).all()
    assert not np.any(jax.jit(jqobs.is_calibrated)(empty))
    assert np.all(jax.jit(jqobs.is_calibrated)(full))
    assert jqobs.is_calibrated(full).shape == scale.shape


@watching
@granularity
def test_leaves_have_their_dtype_and_buffer(case, how):
    state = case.build(**how).init(batch(0))
    leaves = jax.tree.leaves(state)
    assert not any(leaf.weak_type for leaf in leaves)
    assert {leaf.dtype for leaf in leaves} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.uint32)}
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@watching
@granularity
def test_update_keeps_structure_and_traces_once(case, how, traces):
    observer = case.build(**how)
    update = traces(observer.update)
    step = jax.jit(update, donate_argnums=0)
    state = observer.init(batch(0))
    kinds = jax.tree.map(lambda leaf: leaf.aval, state)
    for seed in range(3):
        state = step(state, batch(seed))
        assert jax.tree.map(lambda leaf: leaf.aval, state) == kinds
    assert update.count == 1


@watching
@granularity
def test_one_result_on_every_path(case, how):
    observer = case.build(**how)
    batches = jnp.stack([batch(seed) for seed in range(5)])
    loop = run(observer, list(batches))
    jitted = observer.init(batches[0])
    for x in batches:
        jitted = jax.jit(observer.update)(jitted, x)
    body = jax.checkpoint(lambda state, x: (observer.update(state, x), None))
    scanned, _ = jax.lax.scan(body, observer.init(batches[0]), batches)
    for other in (jitted, scanned):
        assert_same(loop, other)
    mapped = jax.vmap(observer.update)(jax.vmap(observer.init)(batches), batches)
    for i, x in enumerate(batches):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], mapped), run(observer, [x]))
    assert_same(observer.calculate_qparams(loop), jax.jit(observer.calculate_qparams)(loop))


@watching
def test_update_reads_nothing_on_the_host(case):
    observer = case.build()
    state = observer.update(observer.init(batch(0)), batch(0))
    batches = [batch(seed) for seed in range(3)]
    with jax.transfer_guard_device_to_host("disallow"):
        for x in batches:
            state = observer.update(state, x)
    assert int(state.seen) == 4 * np.prod(SHAPE)


# What goes in


@watching
@granularity
def test_counts_and_extremes_against_numpy(case, how):
    observer = case.build_full(**how)
    x = batch(0)
    state, seen = run(observer, [x]), observer.init(x).seen.shape
    rows = {0: lambda x: x.reshape(1, -1), 1: lambda x: np.moveaxis(x, 1, 0).reshape(3, -1)}
    groups = rows[min(len(seen), 1)](np.asarray(x)).reshape(*seen, -1)
    assert np.array_equal(state.seen, np.full(seen, groups.shape[-1]))
    scale, zero_point = observer.calculate_qparams(state)
    assert scale.shape == zero_point.shape == seen
    levels = 127.5 if how.get("group_size") else 255
    np.testing.assert_allclose(scale, groups.max(-1) / levels, rtol=2e-7)


@watching
def test_nonfinite_values_are_ignored_and_counted(case):
    observer = case.build_full()
    state = run(observer, [jnp.array([1, jnp.nan, -2], jnp.float32)])
    assert state.nonfinite == 1
    assert state.seen == 2
    scale, zero_point = observer.calculate_qparams(state)
    np.testing.assert_allclose(scale, 3 / 255, rtol=2e-7)
    assert zero_point == 170
    state = run(observer, [jnp.array([-jnp.inf, -1, 2, jnp.inf], jnp.float32)])
    assert state.nonfinite == 2
    np.testing.assert_allclose(observer.calculate_qparams(state).scale, 3 / 255, rtol=2e-7)


@watching
@granularity
def test_a_batch_with_nothing_finite_changes_only_the_counter(case, how):
    observer = case.build(**how)
    before = run(observer, [batch(0)])
    after = observer.update(before, jnp.full(SHAPE, jnp.nan, jnp.float32))
    assert np.all(np.asarray(after.nonfinite) == np.asarray(before.seen))
    assert_same(before, after._replace(nonfinite=before.nonfinite))


@every
@granularity
def test_an_empty_batch_is_the_identity(case, how):
    how = how if case.needs_data else {}
    observer = case.build(**how)
    for state in (observer.init(batch(0)), run(observer, [batch(0)])):
        for shape in [(0, 3), (0, 3, 8), (5, 0)]:
            assert observer.update(state, jnp.zeros(shape, jnp.float32)) is state
            assert_same(jax.jit(observer.update)(state, jnp.zeros(shape, jnp.float32)), state)


@watching
@granularity
def test_what_is_masked_was_never_there(case, how):
    observer = case.build(**how)
    x = batch(1)
    keep = jnp.arange(8).reshape(8, 1, 1) < 5
    spoiled = jnp.where(keep, x, jnp.where(jnp.arange(8).reshape(1, 1, 8) % 2 == 0, jnp.nan, 1e9).astype(jnp.float32))
    if "group_size" in how:  # Groups are cut along rows, so that whole groups stay or go.
        kept = run(observer, [x], mask=keep)
        assert np.asarray(kept.seen).tolist() == [[4] * 10 + [0] * 6] * 3
        assert_same(run(observer, [spoiled], mask=keep), kept)
        return
    alone = run(observer, [batch(0), x[:5]])
    assert_same(observer.update(run(observer, [batch(0)]), spoiled, mask=keep), alone)
    assert_same(observer.update(run(observer, [batch(0)]), spoiled, mask=keep.astype(jnp.int32)), alone)


@watching
@granularity
def test_a_fully_masked_batch_is_an_empty_batch(case, how):
    observer = case.build(**how)
    for state in (observer.init(batch(0)), run(observer, [batch(0)])):
        assert_same(observer.update(state, batch(1), mask=jnp.zeros((1, 1, 1), bool)), state)


@watching
@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (8,), (4, 1, 1), (8, 3, 8, 1)])
def test_a_mask_that_does_not_fit_is_refused(case, shape):
    observer = case.build()
    with pytest.raises(ValueError, match=r"mask.*mask\[\.\.\., None\]"):
        observer.update(observer.init(batch(0)), batch(0), mask=jnp.ones(shape, bool))


DTYPES = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "uint8", "uint32", "bool", "int4"]


@watching
def test_input_dtypes(case):
    """All in one program: compiling is what takes the time of this suite."""
    observer = case.build()
    batches = [batch(0).astype(jnp.dtype(dtype)) for dtype in DTYPES]

    @jax.jit
    def seen_as(batches):
        return [observer.update(observer.init(x), x) for x in batches]

    for x, state in zip(batches, seen_as(batches), strict=True):
        assert_same(state, run(observer, [x.astype(jnp.float32)]))
        assert state.seen == x.size


@watching
def test_float64_is_judged_after_the_cast(case):
    with jax.enable_x64(True):
        x = jnp.array([8.0, 7.5, 1e300], jnp.float64)
        state = run(case.build(), [x])
        assert state.nonfinite == 1
        assert_same(state._replace(nonfinite=state.seen), run(case.build(), [x[:2]])._replace(nonfinite=state.seen))


@watching
def test_half_extremes_do_not_overflow(case):
    observer = case.build_full()
    state = run(observer, [jnp.array([-65504, 65504], jnp.float16)])
    assert not hasattr(state, "histogram") or np.asarray(state.histogram).sum() == 2
    scale, zero_point = observer.calculate_qparams(state)
    np.testing.assert_allclose(scale, 131008 / 255, rtol=2e-7)
    assert int(zero_point) in (127, 128)


@watching
def test_float32_extremes_do_not_overflow(case):
    observer = case.build_full()
    x = jnp.array([-3.4028234663852886e38, 3.4028234663852886e38], jnp.float32)
    scale, _ = observer.calculate_qparams(run(observer, [x, x, x]))
    np.testing.assert_allclose(scale, 2.6688811501061087e36, rtol=2e-7)


@watching
def test_complex_input_is_refused(case):
    with pytest.raises(ValueError, match="complex64"):
        case.build().init(jnp.zeros(3, jnp.complex64))
    with pytest.raises(ValueError, match="complex64"):
        case.build().update(case.build().init(batch(0)), jnp.zeros(3, jnp.complex64))


@watching
def test_rank_and_size_may_change(case):
    observer = case.build()
    state = run(observer, [batch(0)])
    for shape in [(), (5,), (2, 2, 2, 2)]:
        state = observer.update(state, batch(1, shape))
    assert state.seen == np.prod(SHAPE) + 1 + 5 + 16


@watching
def test_channels_may_not_change(case):
    observer = case.build(qscheme=jqobs.per_channel_affine, ch_axis=0)
    state = run(observer, [batch(0, (3, 1))])
    with pytest.raises(ValueError, match=r"3 channels.*1 channel"):
        observer.update(state, batch(0, (1, 1)))
    assert_same(
        observer.update(state, batch(1, (3, 4, 2))).seen, run(observer, [batch(0, (3, 1)), batch(1, (3, 8))]).seen
    )


@watching
def test_channel_axis(case):
    x = batch(0)
    for axis in range(3):
        by_front = run(case.build(qscheme=jqobs.per_channel_affine, ch_axis=axis), [x])
        assert_same(by_front, run(case.build(qscheme=jqobs.per_channel_affine, ch_axis=axis - 3), [x]))
        each = [run(case.build(), [jnp.take(x, i, axis)]) for i in range(x.shape[axis])]
        assert_same(by_front, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    for axis in (3, -4):
        with pytest.raises(ValueError, match=rf"ch_axis={axis}.*rank 3"):
            case.build(qscheme=jqobs.per_channel_affine, ch_axis=axis).init(x)
    with pytest.raises(ValueError, match="ch_axis"):
        case.build(qscheme=jqobs.per_channel_affine).init(x)


@watching
def test_groups(case):
    observer = case.build(qscheme=jqobs.per_channel_affine, ch_axis=0, group_size=4)
    x = batch(0, (2, 12))
    state = run(observer, [x])
    assert observer.calculate_qparams(state).scale.shape == (2, 3)
    each = [[run(case.build(), [x[i, j : j + 4]]) for j in (0, 4, 8)] for i in (0, 1)]
    rows = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *row) for row in each]
    assert_same(state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))
    with pytest.raises(ValueError, match="group_size=4"):
        observer.init(batch(0, (2, 10)))
    with pytest.raises(ValueError, match=r"3 groups.*2 groups"):
        observer.update(state, batch(0, (2, 8)))


@watching
@granularity
def test_no_gradient_flows_through(case, how):
    observer = case.build(**how)
    state = observer.init(batch(0))

    def loss(x):
        ends = jax.tree.leaves(observer.update(state, x))
        return jnp.sum(x**2) + sum(jnp.sum(leaf) for leaf in ends if leaf.dtype == jnp.float32)

    assert_same(jax.grad(loss)(batch(0)), jax.grad(lambda x: jnp.sum(x**2))(batch(0)))


# What comes out


@watching
@granularity
def test_the_state_does_not_depend_on_the_grid(case, how):
    plain, other = case.build(**how), case.build(**{**how, "qdtype": jqobs.qint4, "eps": 0.01})
    state = run(plain, [batch(0)])
    assert_same(state, run(other, [batch(0)]))
    assert other.calculate_qparams(state).qdtype is jqobs.qint4


@watching
def test_an_unseen_channel_gets_eps_and_is_reported(case):
    observer = case.build(qscheme=jqobs.per_channel_affine, ch_axis=0, eps=1e-5)
    seen = jnp.array([[True], [False], [True]])
    state = run(observer, [batch(0, (3, 4))], mask=seen)
    with pytest.warns(UserWarning, match=rf"{case.factory.__name__}: 1 of 3 .*: 1$"):
        scale, zero_point = observer.calculate_qparams(state)
    assert np.asarray(scale)[1] == np.float32(1e-5)
    assert np.asarray(zero_point)[1] == 0
    assert np.asarray(jqobs.is_calibrated(state)).tolist() == [True, False, True]
    traced = jax.jit(observer.calculate_qparams)(state)
    assert_same((scale, zero_point), tuple(traced))


@watching
def test_states_of_another_kind_are_refused(case):
    observer = case.build()
    for other in (jqobs.noop().init(batch(0)), {"min_val": 1}, (1, 2)):
        with pytest.raises(ValueError, match=case.factory.__name__):
            observer.update(other, batch(0))
        with pytest.raises(ValueError, match=case.factory.__name__):
            observer.calculate_qparams(other)


@watching
def test_states_stacked_by_a_scan_are_read_as_a_stack(case):
    observer = case.build(qscheme=jqobs.per_channel_affine, ch_axis=-1)
    stack = jnp.stack([batch(0), batch(1)])
    qparams = observer.calculate_qparams(jax.vmap(lambda x: run(observer, [x]))(stack))
    for i in range(2):
        assert_same(
            jax.tree.map(lambda leaf, i=i: leaf[i], qparams), observer.calculate_qparams(run(observer, [stack[i]]))
        )
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        jqobs.quantize(stack, qparams)
    assert jax.vmap(jqobs.quantize)(stack, qparams).dtype == jnp.uint8


# Streams, devices


@mergeable
@granularity
def test_merge_is_a_monoid(case, how):
    observer = case.build(**how)
    a, b, c = (run(observer, [batch(seed), batch(seed + 10) + seed]) for seed in range(3))
    nothing = observer.init(batch(0))
    assert_same(observer.merge(a, nothing), a)
    assert_same(observer.merge(nothing, a), a)
    assert_same(observer.merge(nothing, nothing), nothing)
    assert_same(observer.merge(a, b), observer.merge(b, a))
    STREAMS_EQUAL[case.equal_to](observer.merge(observer.merge(a, b), c), observer.merge(a, observer.merge(b, c)))


@mergeable
@granularity
def test_merge_is_what_one_stream_would_have_seen(case, how):
    observer = case.build(**how)
    batches = [batch(seed) - seed for seed in range(6)]
    whole = run(observer, batches)
    parts = [run(observer, batches[:1]), run(observer, batches[1:4]), run(observer, batches[4:])]
    same = STREAMS_EQUAL[case.equal_to]
    same(observer.merge(parts[0], observer.merge(parts[1], parts[2])), whole)
    same(run(observer, batches[::-1]), whole)


@mergeable
def test_any_cut_into_batches_is_the_same(case):
    if not case.unit_is_value:
        pytest.skip("the unit of this statistic is the batch")
    observer = case.build()
    x = batch(0)
    whole = run(observer, [x])
    for cut in (1, 2, 4):
        STREAMS_EQUAL[case.equal_to](run(observer, list(x.reshape(-1, cut, 3, 8))), whole)
    STREAMS_EQUAL[case.equal_to](run(observer, [x[:3], x[3:]]), whole)
    assert_same(run(observer, [jnp.flip(x)]), whole)


@mergeable
def test_merge_names_the_shapes(case):
    observer = case.build(qscheme=jqobs.per_channel_affine, ch_axis=0)
    with pytest.raises(ValueError, match=r"3 channels.*1 channel"):
        observer.merge(run(observer, [batch(0, (3, 2))]), run(observer, [batch(0, (1, 2))]))


def test_only_the_moving_average_cannot_be_merged():
    assert {case.factory for case in cases.CASES if case.build().merge is None} == {jqobs.moving_average_min_max}


# Descriptions


@every
def test_factories_are_cached_by_meaning_and_hash(case):
    assert case.build() is case.build()
    assert hash(case.build()) == hash(case.build())
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(case.factory).parameters.items()
        if parameter.default is not parameter.empty
    }
    assert case.factory(**{**dict(reversed(defaults.items())), **case.arguments}) is case.build()


@every
def test_the_recipe_prints_and_rebuilds(case):
    observer = case.build()
    assert observer.recipe() is observer
    assert observer.replace() is observer
    names = {name: getattr(jqobs, name) for name in jqobs.__all__}
    assert eval(repr(observer), names) is observer


@every
def test_an_observer_can_be_a_static_argument(case, traces):
    update = traces(lambda observer, state, x: observer.update(state, x))
    step = jax.jit(update, static_argnums=0)
    step(case.build(), case.build().init(batch(0)), batch(0))
    step(case.build(), case.build().init(batch(0)), batch(0))
    assert update.count == 1


@every
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qscheme", "per_tensor_affine"),
        ("qdtype", "int8"),
        ("qdtype", jnp.int8),
        ("eps", 0.0),
        ("eps", -1e-08),
        ("eps", float("nan")),
        ("ch_axis", 0),
        ("ch_axis", 1.0),
        ("group_size", 4),
        ("group_size", 0),
    ],
)
def test_bad_arguments_die_where_they_are_written(case, name, value):
    if name not in inspect.signature(case.factory).parameters:
        pytest.skip("not an argument of this factory")
    with pytest.raises(ValueError, match=name):
        case.build(**{name: value})


def test_every_public_factory_is_in_the_table():
    factories = {getattr(jqobs.observers, name) for name in jqobs.observers.__all__}
    missing = factories - {case.factory for case in cases.CASES}
    assert not missing, f"add a line to tests/observers/cases.py for {missing}"


def test_parameters_are_spelled_alike_and_keyword_only():
    known = {"qscheme", "qdtype", "ch_axis", "group_size", "eps"}
    for case in cases.CASES:
        parameters = inspect.signature(case.factory).parameters
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values()), case.id
        if case.needs_data:
            assert known <= set(parameters), case.id
            own = [name for name in parameters if name not in known]
            assert list(parameters) == own + list(parameters)[len(own) :], f"{case.id}: its own arguments come first"


def test_nothing_warns_for_calibrated_states():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in cases.WATCHING:
            case.build().calculate_qparams(run(case.build(), [batch(0)]))
