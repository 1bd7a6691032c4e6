"""Observers as Linen layers: identities that keep their statistic in the collection "observers"."""

from jqobs.linen._layers import (
    FixedQParamsObserver,
    HistogramObserver,
    LogHistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    NoopObserver,
    Observe,
    ObserverBase,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    default_dynamic_quant_observer,
    default_observer,
    default_weight_observer,
)
from jqobs.linen._models import calculate_qparams, check_observed

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
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "calculate_qparams",
    "check_observed",
    "default_dynamic_quant_observer",
    "default_observer",
    "default_weight_observer",
]
