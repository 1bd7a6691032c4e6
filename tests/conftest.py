"""Eight fake devices, and JAX as strict as it goes: what passes here passes under anybody's settings."""

import os
import pathlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax
import pytest

# Almost all the time of the suite is compilation: share it between workers, and with the next run.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles; a deadline would measure that.
hypothesis.settings.register_profile("jqobs", deadline=None, max_examples=15, derandomize=True)
hypothesis.settings.load_profile("jqobs")


@pytest.fixture
def traces():
    """Wraps a function so that `traces(function).count` says how often it was traced."""

    def wrap(function):
        def counted(*args, **kwargs):
            counted.count += 1
            return function(*args, **kwargs)

        counted.count = 0
        return counted

    return wrap
