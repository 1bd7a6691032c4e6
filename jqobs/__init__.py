"""Calibration observers for JAX.

An observer is a pair of pure functions over a pytree, like an optimizer in Optax, and two readers of that pytree:
`init`, `update`, `merge`, `calculate_qparams`. Four choices make one, independent of one another:

* the statistic: `min_max`, `moving_average_min_max`, `mean_min_max`, `log_histogram`, `histogram`, and those that need
  no data, `fixed_qparams`, `placeholder`, `noop`;
* the range rule: the extremes, or over a histogram `mse()`, `percentile(p)`, `entropy()`, `norm_minimization()`;
* the codes: a `QDtype` (`qint8`, `quint8`, ...) and the affine or symmetric half of a `QScheme`;
* who shares a scale: the per-tensor or per-channel half of it, with `ch_axis` and `group_size`.

The last two are one value, a `QuantSpec`, that an observer and its `QParams` carry.

Where things are. Imports point down the page, between the rooms and inside them; a test reads both.

    linen/         thin shells: observers, QAT and models as Flax Linen modules
                   _qat _models _layers
    nnx/           the same names as NNX modules
                   _qat _models _layers
    calibration    the loop over batches: `calibrate`
    storage/       states in files; state dicts of the other frameworks
                   state_dict checkpoint trees encoding files
    layers/        what FakeQuantize does, under linen and nnx
                   fake_quant
    models/        `observe`, `simulate`, `sensitivity`; which observer watches what; the state of a model
                   sensitivity simulation observation state assignment share qconfig sites patterns
    tracing/       a function as a program: what feeds its products, and how it runs with them shown
                   program compilation arguments naming products
    reporting/     the report, its table; progress
                   report tables progress
    observers/     Observer, the lifting, merging, reading; then one statistic a file
                   _histogram _log_histogram _mean_min_max _moving_average_min_max _min_max
                   _fixed_qparams _placeholder _noop
                   lifting batches merging reading observer statistic
    range_rules/   which range is kept: one rule a file, and the search they share
                   _mse _entropy _norm_minimization _percentile _rule _bins _search
    quantization/  QParams, quantize and dequantize, the learned step
                   learned_step rounding qparams
    formats/       the codes, the schemes, and `QuantSpec` of both and of who shares a scale
                   quant_spec qdtype qscheme
    sharding/      what an array says about its devices; placing arguments
                   placement array_types
    numerics/      arithmetic that no compiler changes; counters past 2^32; the one door for arrays
                   arithmetic counting inputs
    recipe         a factory and its arguments
    _version       which jqobs this is

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
