"""Reading many observers at once: who answered, who saw nothing."""

import warnings
from collections.abc import Mapping

import numpy as np

from jqobs.observers.observer import NoQParamsError, NotCalibratedError, Observer, State, is_calibrated
from jqobs.quantization.qparams import QParams


def calculate_site_qparams(sites: Mapping[str, tuple[Observer, State]]) -> dict[str, QParams]:
    """Reads the scale and the zero point of every site of a model.

    Args:
      sites: The observer and the state of each site, by name; a state may be None where nothing was ever recorded.

    Returns:
      The `QParams` of the sites that saw data. Placeholders and noops have none and are left out. The sites that saw
      nothing are left out too, and are named in one warning.

    Raises:
      NotCalibratedError: No site saw anything.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> from jqobs.observers.reading import calculate_site_qparams
      >>> observer, x = jqobs.min_max(), jnp.ones(3)
      >>> list(calculate_site_qparams({"conv": (observer, observer.update(observer.init(x), x))}))
      ['conv']
    """
    qparams, unseen = {}, []
    for name, (observer, state) in sites.items():
        try:
            qparams[name] = observer.calculate_qparams(state)
        except NotCalibratedError:
            unseen.append(name)
        except NoQParamsError:
            continue
        except ValueError as error:
            error.add_note(f"at {name or 'the model itself'}")
            raise
    named = ", ".join(name or "the model itself" for name in unseen)
    if unseen and not qparams:
        raise NotCalibratedError(f"none of the observers has seen data: {named}")
    if unseen:
        warnings.warn(f"{len(unseen)} of {len(sites)} observers saw no data and are left out: {named}", stacklevel=3)
    return qparams


def find_unseen(sites: Mapping[str, tuple[Observer, State]]) -> list[str]:
    """The names of the sites that should have seen data and have seen none. Nothing is searched, so it is cheap.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> from jqobs.observers.reading import find_unseen
      >>> observer = jqobs.min_max()
      >>> find_unseen({"conv": (observer, observer.init(jnp.zeros(3))), "dense": (jqobs.noop(), None)})
      ['conv']
    """

    def saw_nothing(observer: Observer, state: State) -> bool:
        if state is not None:
            return not np.any(is_calibrated(state))
        try:
            observer.calculate_qparams(None)  # Only an observer that needs no data can answer from nothing.
        except NotCalibratedError:
            return True
        except NoQParamsError:
            return False
        return False

    return [name for name, (observer, state) in sites.items() if saw_nothing(observer, state)]
