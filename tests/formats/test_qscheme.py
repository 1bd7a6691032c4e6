import jqobs


def test_schemes():
    flags = {scheme.value: (scheme.is_per_channel, scheme.is_symmetric) for scheme in jqobs.QScheme}
    assert flags == {
        "per_tensor_affine": (False, False),
        "per_tensor_symmetric": (False, True),
        "per_channel_affine": (True, False),
        "per_channel_symmetric": (True, True),
    }
    for name in flags:
        assert getattr(jqobs, name).value == name == repr(getattr(jqobs, name))
