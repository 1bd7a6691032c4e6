import jax.numpy as jnp
import pytest

import jqobs
from jqobs.observers.reading import calculate_site_qparams, find_unseen

OBSERVER = jqobs.min_max()
EMPTY = OBSERVER.init(jnp.zeros(3))
FULL = OBSERVER.update(EMPTY, jnp.ones(3))
FIXED = jqobs.fixed_qparams(scale=0.5, zero_point=1)


def test_who_answers_and_who_is_named():
    sites = {
        "a": (OBSERVER, FULL),
        "b/c": (OBSERVER, EMPTY),
        "d": (OBSERVER, None),
        "e": (jqobs.noop(), None),
        "f": (jqobs.placeholder(), None),
        "g": (FIXED, None),
    }
    with pytest.warns(UserWarning, match="2 of 6 observers saw no data and are left out: b/c, d$"):
        qparams = calculate_site_qparams(sites)
    assert list(qparams) == ["a", "g"]
    assert find_unseen(sites) == ["b/c", "d"]


def test_nobody_answers():
    with pytest.raises(jqobs.NotCalibratedError, match="none of the observers has seen data: a, b"):
        calculate_site_qparams({"a": (OBSERVER, EMPTY), "b": (OBSERVER, None)})
    assert calculate_site_qparams({"e": (jqobs.noop(), None)}) == {}
