import jax.numpy as jnp
import pytest

import jqobs


def test_recipes_chain_override_and_print():
    recipe = jqobs.Recipe(dict).with_args(a=1).with_args(b=2, a=3)
    assert recipe() == {"a": 3, "b": 2}
    assert recipe(a=5) == {"a": 5, "b": 2}
    assert recipe() == {"a": 3, "b": 2}
    assert repr(recipe) == "dict(a=3, b=2)"
    assert hash(recipe) == hash(jqobs.Recipe(dict).with_args(a=3, b=2))


def test_with_args_as_a_decorator():
    @jqobs.with_args(quant_min=0)
    class Built:
        def __init__(self, quant_min=-128, quant_max=127):
            self.quant_min, self.quant_max = quant_min, quant_max

    assert Built().quant_min == 0
    assert Built(quant_min=5).quant_min == 5
    assert Built.with_args(quant_max=9)().quant_max == 9
    assert repr(Built) == "Built(quant_min=0)"


def test_the_cache_tells_one_from_true():
    assert jqobs.min_max(qscheme=jqobs.per_channel_affine, ch_axis=1).recipe.get("ch_axis") == 1
    for value in (True, 1.0):
        with pytest.raises(ValueError, match="ch_axis must be an integer"):
            jqobs.min_max(qscheme=jqobs.per_channel_affine, ch_axis=value)


def test_arguments_have_to_hash():
    with pytest.raises(ValueError, match="scale must be hashable"):
        jqobs.fixed_qparams(scale=jnp.ones(3), zero_point=0)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="qtype"):
        jqobs.min_max(qtype=jqobs.qint8)  # pyright: ignore
    with pytest.raises(TypeError):
        jqobs.min_max(jqobs.per_tensor_affine)  # pyright: ignore


def test_is_calibrated_of_a_dict_is_a_dict():
    observer = jqobs.min_max()
    empty = observer.init(jnp.zeros(3))
    states = {"seen": observer.update(empty, jnp.ones(3)), "not": empty, "fixed": jqobs.noop().init(jnp.zeros(3))}
    assert {name: bool(flag) for name, flag in jqobs.is_calibrated(states).items()} == {
        "seen": True,
        "not": False,
        "fixed": True,
    }
