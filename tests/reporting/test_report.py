import jax.numpy as jnp

import jqobs


def test_it_names_who_met_nan_and_who_saw_nothing():
    observer = jqobs.min_max()
    channels = jqobs.histogram(range_rule=jqobs.percentile(100), qscheme=jqobs.per_channel_affine, ch_axis=0)
    x = jnp.array([[1, 2], [-3, jnp.nan]], jnp.float32)
    states = {
        "block": {"conv": {"state": channels.update(channels.init(x), x)}, "idle": {"state": observer.init(x)}},
        "none": {"state": jqobs.noop().init(x)},
    }
    table = jqobs.report(states, {"block/conv": channels.calculate_qparams(states["block"]["conv"]["state"])})
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["site", "min", "max", "scale", "zero_point", "seen", "nonfinite"]
    assert rows[1] == ["block/conv", "-3", "2", "0.007843..0.01176", "0..255", "3", "1"]
    assert rows[2] == ["block/idle", "-", "-", "-", "-", "0", "0"]
    assert rows[3] == ["none", "-", "-", "-", "-", "-", "-"]
    assert len({len(line) for line in table.splitlines()}) == 1
