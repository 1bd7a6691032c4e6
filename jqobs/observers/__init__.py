"""The catalogue: one statistic a file. A new one is its file, a line here, a line in the table of cases, and its
test.
"""

from jqobs.observers._fixed_qparams import fixed_qparams
from jqobs.observers._histogram import histogram
from jqobs.observers._log_histogram import log_histogram
from jqobs.observers._mean_min_max import mean_min_max
from jqobs.observers._min_max import min_max
from jqobs.observers._moving_average_min_max import moving_average_min_max
from jqobs.observers._noop import noop
from jqobs.observers._placeholder import placeholder

__all__ = [
    "fixed_qparams",
    "histogram",
    "log_histogram",
    "mean_min_max",
    "min_max",
    "moving_average_min_max",
    "noop",
    "placeholder",
]
