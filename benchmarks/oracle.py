"""The best range there is, by exhaustive search over the raw data in float64. Knows nothing of histograms."""

import numpy as np


def deployed(lo, hi, levels, symmetric, quant_min):
    """Step and codes below zero for ranges, by the formula of the README's `calculate_qparams`, in float32."""
    lo, hi = np.minimum(np.float32(lo), 0), np.maximum(np.float32(hi), 0)
    if symmetric:
        middle = 0 if quant_min < 0 else (2 * quant_min + levels) // 2
        scale = np.maximum(np.maximum(-lo, hi) / np.float32((levels - 1) / 2), np.float32(1e-8))
        return scale, np.full(scale.shape, middle - quant_min)
    scale = np.maximum((hi - lo) / np.float32(levels - 1), np.float32(1e-8))
    return scale, np.clip(-np.round(lo / scale), 0, levels - 1)


class Oracle:
    """Squared errors of grids on one set of values, exact and fast: from running sums over the sorted values."""

    def __init__(self, x, levels, symmetric, quant_min):
        self.x = np.sort(np.asarray(x, np.float64).ravel())
        self.sums = [np.append(0, np.cumsum(self.x**power)) for power in (0, 1, 2)]
        self.levels, self.symmetric, self.quant_min = levels, symmetric, quant_min

    def error(self, scale, below):
        """Mean squared errors of grids given by their step and their number of codes below zero, `[grids]`."""
        scale, below = np.float64(scale)[:, None], np.float64(below)[:, None]
        codes = np.arange(self.levels) - below
        borders = np.searchsorted(self.x, (codes[:, :-1] + 0.5) * scale)
        whole = np.zeros((len(scale), 1), int)
        borders = np.concatenate([whole, borders, whole + self.x.size], 1)
        n, first, second = (np.diff(total[borders], axis=1) for total in self.sums)
        centre = codes * scale
        return np.sum(second - 2 * centre * first + centre**2 * n, 1) / self.x.size

    def of_range(self, lo, hi):
        """Mean squared errors of ranges, `[ranges]`."""
        return self.error(*deployed(lo, hi, self.levels, self.symmetric, self.quant_min))

    def full(self):
        """The error of the full range."""
        return self.of_range(self.x[:1], self.x[-1:])[0]

    def best(self, basins=6):
        """The smallest error of all ranges inside the extremes: a fine grid, then finer ones around the best of it."""
        ends = np.minimum(self.x[0], 0), np.maximum(self.x[-1], 0)
        fractions = np.append(2.0 ** -np.arange(0, 11, 1 / 6), 0)
        low = fractions if ends[0] < 0 and not (self.symmetric and -ends[0] < ends[1]) else np.ones(1)
        high = fractions if ends[1] > 0 and not (self.symmetric and -ends[0] >= ends[1]) else np.ones(1)
        if self.symmetric:
            ends = (-max(-ends[0], ends[1]), max(-ends[0], ends[1]))
            low, high = fractions, np.zeros(1)
        pairs = np.stack(np.meshgrid(low, high), -1).reshape(-1, 2)
        smallest = np.inf
        for reach in (0.13, 0.02, 0.003, None):
            errors = self.of_range(pairs[:, 0] * ends[0], pairs[:, 1] * ends[1])
            smallest = min(smallest, errors.min())
            if reach is None:
                return smallest
            near = pairs[np.argsort(errors)[:basins]]
            moves = 1 + reach * np.linspace(-1, 1, 15)
            grid = np.stack(np.meshgrid(moves if low.size > 1 else [1], moves if high.size > 1 else [1]), -1)
            pairs = np.clip((near[:, None] * grid.reshape(-1, 2)).reshape(-1, 2), 0, 1)
        return smallest
