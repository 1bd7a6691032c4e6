"""The table of observers. A new observer is one line here, and every promise of the contract is asked of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jqobs


@dataclasses.dataclass(frozen=True)
class Case:
    factory: Callable[..., jqobs.Observer]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    needs_data: bool = True
    unit_is_value: bool = True  # Not so where the result depends on how the data was cut into batches.
    equal_to: str = "a bit"  # What streams that saw the same are equal to: "a bit", "rounding" of a float sum, "a bin".
    linen: str | None = None  # The class of this name in jqobs.linen and jqobs.nnx.

    @property
    def id(self):
        return self.factory.__name__

    def build(self, **more):
        return self.factory(**self.arguments, **more)

    def build_full(self, **more):
        """The same, keeping the full range where there is a rule to choose one."""
        rule = {"range_rule": jqobs.percentile(100)} if "histogram" in self.factory.__name__ else {}
        return self.factory(**{**self.arguments, **rule, **more})


CASES = [
    Case(jqobs.min_max, linen="MinMaxObserver"),
    Case(jqobs.moving_average_min_max, unit_is_value=False, linen="MovingAverageMinMaxObserver"),
    Case(jqobs.mean_min_max, unit_is_value=False, equal_to="rounding"),
    # The same statistics whatever the rule; one that does not search compiles in a tenth of the time.
    Case(jqobs.log_histogram, {"range_rule": jqobs.percentile(99)}, linen="LogHistogramObserver"),
    Case(
        jqobs.histogram, {"bins": 128, "range_rule": jqobs.percentile(99)}, equal_to="a bin", linen="HistogramObserver"
    ),
    Case(jqobs.fixed_qparams, {"scale": 0.5, "zero_point": 3}, needs_data=False, linen="FixedQParamsObserver"),
    Case(jqobs.placeholder, needs_data=False, linen="PlaceholderObserver"),
    Case(jqobs.noop, needs_data=False, linen="NoopObserver"),
]

WATCHING = [case for case in CASES if case.needs_data]
"""The cases that keep a statistic."""

GRANULARITIES = {
    "per_tensor": {},
    "per_channel": {"qscheme": jqobs.per_channel_affine, "ch_axis": 1},
    "per_group": {"qscheme": jqobs.per_channel_symmetric, "qdtype": jqobs.qint8, "ch_axis": -2, "group_size": 4},
}
"""Arguments for data of shape `(..., 3, 8)` in which the channel axis has size 3."""
