"""The numbers of PyTorch are in tests/reference; here is what it is not asked there."""

import numpy as np
from distributions import sample

import jqobs


def test_it_reads_both_histograms_alike():
    x = sample("laplace")
    scales = []
    for factory in (jqobs.histogram, jqobs.log_histogram):
        observer = factory(range_rule=jqobs.norm_minimization())
        scales.append(observer.calculate_qparams(jqobs.calibrate(observer, x)).scale)
    np.testing.assert_allclose(*scales, rtol=0.05)
