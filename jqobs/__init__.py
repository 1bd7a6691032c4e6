"""Calibration observers for JAX.

An observer is a pair of pure functions over a pytree, like an optimizer in Optax, and two readers of that pytree:
`init`, `update`, `merge`, `calculate_qparams`. Four choices make one, independent of one another:

* the statistic: `min_max`, `moving_average_min_max`, `mean_min_max`, `log_histogram`, `histogram`, and those that need
  no data, `fixed_qparams`, `placeholder`, `noop`;
* the range rule: the extremes, or over a histogram `mse()`, `percentile(p)`, `entropy()`, `norm_minimization()`;
* the grid: a `QDtype` (`qint8`, `quint8`, ...) and the affine or symmetric half of a `QScheme`;
* the granularity: the per-tensor or per-channel half of it, with `ch_axis` and `group_size`.

Where things are; imports point upwards only:

    qtypes          which codes exist                       arithmetic   floats that do not depend on the compiler
    granularity     who shares a scale                      counting     integers past 2**32
    qparams         the formula from range to grid          meshes       how arrays are spread over devices
    quantization    quantize, dequantize, fake_quantize     batches      looking at one batch
    observer        Observer, Recipe, Statistic             lifting      from a statistic to an observer
    observers/      the catalogue, one statistic a file     range_rules/ which range is kept, one rule a file
    reading         many observers at once                  merging      one state from many
    calibration     the loop                                spreading    arguments over the devices of a mesh
    observation     observe, simulate, sensitivity          qconfig      which observer watches what
    tracing         walks through a program                 naming, arguments, products: what it says of its operands
    linen/  nnx/    the same as Flax layers                 fake_quantizer, state_dict: what both are made of
    checkpoint      save, load                              report, tables, progress: for people

Example:
  >>> import jax.numpy as jnp, jqobs
  >>> observer = jqobs.min_max()
  >>> state = jqobs.calibrate(observer, [jnp.array([-1.0, 2.0]), jnp.array([0.0, 3.0])])
  >>> scale, zero_point = observer.calculate_qparams(state)
  >>> int(zero_point)
  64
"""

from jqobs import linen, nnx
from jqobs._version import __version__
from jqobs.calibration import calibrate
from jqobs.formats.qdtype import QDtype, qint2, qint4, qint8, qint16, qint32, quint2, quint4, quint8, quint16
from jqobs.formats.qscheme import (
    QScheme,
    per_channel_affine,
    per_channel_symmetric,
    per_tensor_affine,
    per_tensor_symmetric,
)
from jqobs.formats.quant_spec import QuantSpec
from jqobs.models.observation import Calibration, observe
from jqobs.models.qconfig import (
    QConfig,
    QConfigMapping,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from jqobs.models.sensitivity import sensitivity
from jqobs.models.simulation import simulate
from jqobs.models.sites import Sites
from jqobs.models.state import ModelState
from jqobs.numerics.counting import Count
from jqobs.observers import (
    fixed_qparams,
    histogram,
    log_histogram,
    mean_min_max,
    min_max,
    moving_average_min_max,
    noop,
    placeholder,
)
from jqobs.observers.lifting import lift
from jqobs.observers.merging import merge_across, merge_processes
from jqobs.observers.observer import NotCalibratedError, Observer, is_calibrated
from jqobs.observers.statistic import Chunk, Statistic
from jqobs.quantization.learned_step import lsq_fake_quantize
from jqobs.quantization.qparams import QParams, calculate_qparams
from jqobs.quantization.rounding import dequantize, fake_quantize, quantize
from jqobs.range_rules import RangeRule, entropy, mse, norm_minimization, percentile
from jqobs.recipe import Recipe, factory, with_args
from jqobs.reporting.report import report
from jqobs.storage.checkpoint import load, save
from jqobs.storage.files import CheckpointError
from jqobs.storage.state_dict import convert_torch_state_dict
from jqobs.tracing.program import Site

__all__ = [
    "Calibration",
    "CheckpointError",
    "Chunk",
    "Count",
    "ModelState",
    "NotCalibratedError",
    "Observer",
    "QConfig",
    "QConfigMapping",
    "QDtype",
    "QParams",
    "QScheme",
    "QuantSpec",
    "RangeRule",
    "Recipe",
    "Site",
    "Sites",
    "Statistic",
    "__version__",
    "calculate_qparams",
    "calibrate",
    "convert_torch_state_dict",
    "dequantize",
    "entropy",
    "factory",
    "fake_quantize",
    "fixed_qparams",
    "get_default_qat_qconfig",
    "get_default_qat_qconfig_mapping",
    "get_default_qconfig",
    "get_default_qconfig_mapping",
    "histogram",
    "is_calibrated",
    "lift",
    "linen",
    "load",
    "log_histogram",
    "lsq_fake_quantize",
    "mean_min_max",
    "merge_across",
    "merge_processes",
    "min_max",
    "moving_average_min_max",
    "mse",
    "nnx",
    "noop",
    "norm_minimization",
    "observe",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_tensor_affine",
    "per_tensor_symmetric",
    "percentile",
    "placeholder",
    "qint16",
    "qint2",
    "qint32",
    "qint4",
    "qint8",
    "quantize",
    "quint16",
    "quint2",
    "quint4",
    "quint8",
    "report",
    "save",
    "sensitivity",
    "simulate",
    "with_args",
]
