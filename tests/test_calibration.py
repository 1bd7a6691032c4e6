from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqobs

BATCHES = [jnp.arange(6.0).reshape(2, 3) + 7 * i for i in range(4)]


def loop(observer, batches):
    state = observer.init(batches[0])
    for batch in batches:
        state = observer.update(state, batch)
    return state


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("observer", [jqobs.min_max(), jqobs.moving_average_min_max(), jqobs.log_histogram()], ids=repr)
def test_it_is_the_loop(observer):
    assert same(jqobs.calibrate(observer, BATCHES), loop(observer, BATCHES))
    assert same(jqobs.calibrate(observer, iter(BATCHES)), loop(observer, BATCHES))


def test_it_continues_and_leaves_the_given_state_alone():
    observer = jqobs.min_max()
    first = jqobs.calibrate(observer, BATCHES[:2])
    kept = jax.tree.map(np.array, first)
    assert same(jqobs.calibrate(observer, BATCHES[2:], state=first), loop(observer, BATCHES))
    assert same(first, kept)


def test_it_compiles_once(traces):
    update = traces(jqobs.min_max().update)
    step = lambda state, x: (None, update(state, x))  # noqa: E731
    jqobs.calibrate(step, BATCHES, state=jqobs.min_max().init(BATCHES[0]))
    assert update.count == 1


def test_it_sees_what_a_function_closes_over():
    scale = [1.0]
    step = lambda state, x: (None, jqobs.min_max().update(state, x * scale[0]))  # noqa: E731
    empty = jqobs.min_max().init(BATCHES[0])
    assert jqobs.calibrate(step, BATCHES[:1], state=empty).max_val == 5
    scale[0] = 100.0
    assert jqobs.calibrate(step, BATCHES[:1], state=empty).max_val == 500


def test_a_step_has_to_return_a_pair():
    for wrong in (lambda state, x: jqobs.min_max().update(state, x), lambda state, x: (state, x)):
        with pytest.raises(ValueError, match=r"step must return \(out, state\)"):
            jqobs.calibrate(wrong, BATCHES, state=jqobs.min_max().init(BATCHES[0]))


def test_empty_batches_say_nothing():
    observer = jqobs.min_max(qscheme=jqobs.per_channel_affine, ch_axis=1)
    empty = jnp.zeros((2, 0))
    assert same(jqobs.calibrate(observer, [empty, *BATCHES, empty]), loop(observer, BATCHES))
    with pytest.raises(ValueError, match="at least one batch with data"):
        jqobs.calibrate(observer, [empty, empty])


def test_integers_of_64_bits_are_rounded_and_not_wrapped():
    state = jqobs.calibrate(jqobs.min_max(), [np.array([2**40, -(2**33)])])
    assert (state.min_val, state.max_val) == (-(2.0**33), 2.0**40)


def test_a_step_that_fails_while_it_runs_says_so():
    def boom(x):
        if x[0, 0] == 14:
            raise OSError("lost")
        return x

    def step(state, x):
        return None, jqobs.min_max().update(state, jax.pure_callback(boom, jax.ShapeDtypeStruct(x.shape, x.dtype), x))

    with pytest.raises(Exception, match="lost") as caught:
        jax.block_until_ready(jqobs.calibrate(step, BATCHES, state=jqobs.min_max().init(BATCHES[0])))
    assert not hasattr(caught.value, "state") or not caught.value.state.min_val.is_deleted()


def test_a_step_is_a_function_or_a_calibration():
    observer = jqobs.min_max()

    def step(state, x, y):
        return x + y, observer.update(state, x * y)

    pairs = [(x, x.T + 1) for x in BATCHES]
    calibration = jqobs.observe(lambda x, y: x @ y, observer)
    state = calibration.init(*pairs[0])
    for pair in pairs:
        _, state = calibration.update(state, *pair)
    assert same(jqobs.calibrate(calibration, pairs), state)

    pairs = [(x, x + 1) for x in BATCHES]
    expected = loop(observer, [x * (x + 1) for x in BATCHES])
    assert same(jqobs.calibrate(step, pairs, state=observer.init(BATCHES[0])), expected)
    with pytest.raises(ValueError, match="state must be given"):
        jqobs.calibrate(step, pairs)
    with pytest.raises(ValueError, match="step must be"):
        jqobs.calibrate(3, pairs)


def test_a_tuple_is_arguments_and_a_named_tuple_is_one():
    class Pair(NamedTuple):
        x: jax.Array
        mask: jax.Array

    observer, mask = jqobs.min_max(), jnp.array([[True], [False]])
    assert jqobs.calibrate(observer, [(x, mask) for x in BATCHES]).seen == 3 * len(BATCHES)
    step = lambda state, pair: (None, observer.update(state, pair.x, mask=pair.mask))  # noqa: E731
    state = jqobs.calibrate(step, [Pair(x, mask) for x in BATCHES], state=observer.init(BATCHES[0]))
    assert state.seen == 3 * len(BATCHES)


def test_no_batches():
    observer, used = jqobs.min_max(), iter(BATCHES)
    state = jqobs.calibrate(observer, used)
    for given in (None, state):
        with pytest.raises(ValueError, match=r"at least one batch.*0 batches.*used up"):
            jqobs.calibrate(observer, used, state=given)


def test_nothing_collected_is_lost():
    observer = jqobs.min_max(qscheme=jqobs.per_channel_affine, ch_axis=1)

    def failing():
        yield from BATCHES[:2]
        raise OSError("the disk is gone")

    for batches in (failing(), [*BATCHES[:2], jnp.ones((2, 5))]):
        with pytest.raises((OSError, ValueError)) as caught:
            jqobs.calibrate(observer, batches)
        assert same(caught.value.state, loop(observer, BATCHES[:2]))
        assert any("2 batches" in note for note in caught.value.__notes__)


def test_nothing_is_read_on_the_host():
    with jax.transfer_guard_device_to_host("disallow"):
        jqobs.calibrate(jqobs.log_histogram(), BATCHES)


def test_memory_does_not_grow_with_the_number_of_batches():
    jqobs.calibrate(jqobs.log_histogram(), BATCHES)
    before = len(jax.live_arrays())
    state = jqobs.calibrate(jqobs.log_histogram(), (BATCHES[i % 4] for i in range(512)))
    assert len(jax.live_arrays()) <= before + len(jax.tree.leaves(state))


def test_progress(capsys):
    state = jqobs.calibrate(jqobs.min_max(), BATCHES, progress=True)
    assert same(state, loop(jqobs.min_max(), BATCHES))
    assert "4/4" in capsys.readouterr().err


def test_progress_without_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"jqobs\[progress\]"):
        jqobs.calibrate(jqobs.min_max(), BATCHES, progress=True)


def test_a_batch_for_an_observer_is_not_longer_than_a_mask():
    x = BATCHES[0]
    with pytest.raises(ValueError, match=r"batches must hold x or \(x, mask\) for an observer; got a tuple of 3"):
        jqobs.calibrate(jqobs.min_max(), [(x, x > 0, x)])
