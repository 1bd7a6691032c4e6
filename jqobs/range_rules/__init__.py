"""Which range of a histogram is kept: one rule a file. A new one is its file, a line here, and its test."""

from jqobs.range_rules._entropy import entropy
from jqobs.range_rules._greedy_norm import greedy_norm
from jqobs.range_rules._least_squares import least_squares
from jqobs.range_rules._percentile import percentile
from jqobs.range_rules._rule import Range, RangeRule

__all__ = ["Range", "RangeRule", "entropy", "greedy_norm", "least_squares", "percentile"]
