"""Which range of a histogram is kept: one rule a file."""

from jqobs.range_rules._least_squares import least_squares
from jqobs.range_rules._rule import Range, RangeRule

__all__ = ["Range", "RangeRule", "least_squares"]
