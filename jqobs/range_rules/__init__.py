"""Which range of a histogram is kept: one rule a file. A new one is its file, a line here, and its test."""

from jqobs.range_rules._entropy import entropy
from jqobs.range_rules._mse import mse
from jqobs.range_rules._norm_minimization import norm_minimization
from jqobs.range_rules._percentile import percentile
from jqobs.range_rules._rule import Range, RangeRule

__all__ = ["Range", "RangeRule", "entropy", "norm_minimization", "mse", "percentile"]
