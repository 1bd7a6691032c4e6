import jax.numpy as jnp
import pytest

import jqobs


def test_it_carries_its_configuration():
    observer = jqobs.placeholder(qdtype=jqobs.qint8, custom_op_name="embedding", is_dynamic=True)
    read = [observer.recipe.get(name) for name in ("qdtype", "custom_op_name", "is_dynamic", "qscheme")]
    assert read == [jqobs.qint8, "embedding", True, jqobs.per_tensor_affine]
    with pytest.raises(RuntimeError, match="range is taken at run time"):
        observer.calculate_qparams(observer.init(jnp.zeros(3)))
