"""Observers as NNX modules: identities that keep their statistic in a variable of their own type."""

from jqobs.nnx._layers import (
    FixedQParamsObserver,
    HistogramObserver,
    LogHistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    NoopObserver,
    Observe,
    ObserverBase,
    ObserverState,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    default_dynamic_quant_observer,
    default_observer,
    default_weight_observer,
)
from jqobs.nnx._models import calculate_qparams, check_observed

__all__ = [
    "FixedQParamsObserver",
    "HistogramObserver",
    "LogHistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "Observe",
    "ObserverBase",
    "ObserverState",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "calculate_qparams",
    "check_observed",
    "default_dynamic_quant_observer",
    "default_observer",
    "default_weight_observer",
]
