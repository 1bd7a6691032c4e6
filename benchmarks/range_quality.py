"""How far from the best range each rule ends: the true squared error of its grid over that of the best range.

    python benchmarks/range_quality.py [--seeds 3] [--smoke]

Twelve distributions, 8, 4 and 2 bits, affine and symmetric, 40,000 values in 8 batches. The best range comes from an
exhaustive search over the raw values in float64 (`oracle.py`). PyTorch's answers are recorded
(`reference_ranges.json`), and asked live where torch is installed and --live is given.
"""

import argparse
import itertools
import json
import pathlib
import warnings

import numpy as np
from distributions import DISTRIBUTIONS, sample
from oracle import Oracle

import jqobs

GRIDS = [
    (scheme, bits)
    for scheme, bits in itertools.product((jqobs.per_tensor_affine, jqobs.per_tensor_symmetric), (8, 4, 2))
]
RECORDED = pathlib.Path(__file__).with_name("reference_ranges.json")


def qdtype_for(scheme, bits):
    return getattr(jqobs, f"{'q' if scheme.is_symmetric else 'qu'}int{bits}")


def reference(name, scheme, bits, seed=0):
    """Scale and zero point of torch.ao.quantization.HistogramObserver."""
    import torch
    from torch.ao.quantization.observer import HistogramObserver

    qdtype = qdtype_for(scheme, bits)
    watcher = HistogramObserver(
        dtype=torch.qint8 if scheme.is_symmetric else torch.quint8,
        qscheme=getattr(torch, scheme.value),
        quant_min=qdtype.quant_min,
        quant_max=qdtype.quant_max,
        eps=1e-8,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in sample(name, seed):
            watcher(torch.from_numpy(batch))
        scale, zero_point = watcher.calculate_qparams()
    return float(scale), int(zero_point)


def ours(name, seed=0, factory=jqobs.log_histogram):
    """The grids of one collected state, at every width and scheme."""
    state = jqobs.calibrate(factory(), sample(name, seed))
    return {grid: factory(qscheme=grid[0], qdtype=qdtype_for(*grid)).calculate_qparams(state) for grid in GRIDS}


def ratios(name, seed=0, recorded=None):
    """Error over the best error, for `mse`, for the extremes, and for PyTorch."""
    x = sample(name, seed)
    chosen = ours(name, seed)
    for scheme, bits in GRIDS:
        qdtype = qdtype_for(scheme, bits)
        oracle = Oracle(x, qdtype.levels, scheme.is_symmetric, qdtype.quant_min)
        best = oracle.best()

        def error(scale, zero_point, oracle=oracle, qdtype=qdtype):
            return oracle.error(np.array([scale]), np.array([zero_point]) - qdtype.quant_min)[0]

        scale, zero_point = (np.asarray(leaf) for leaf in chosen[scheme, bits])
        row = {"ours": error(scale, zero_point), "min_max": oracle.full()}
        if recorded is not None:
            row["reference"] = error(*recorded[f"{name}/{scheme.value}/{bits}"])
        yield (scheme, bits), {column: value / best for column, value in row.items()}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=1, help="how many samples of every distribution")
    arguments.add_argument("--smoke", action="store_true", help="one distribution only")
    arguments.add_argument("--record", action="store_true", help="ask torch, and write reference_ranges.json")
    options = arguments.parse_args()
    names = list(DISTRIBUTIONS)[: 1 if options.smoke else None]
    if options.record:
        answers = {f"{name}/{s.value}/{b}": reference(name, s, b) for name in names for s, b in GRIDS}
        RECORDED.write_text(json.dumps(answers, indent=0) + "\n")
    recorded = json.loads(RECORDED.read_text())

    print("squared error over that of the best range: jqobs mse | min/max | reference framework")
    print(f"{'':14}" + "".join(f"{f'{s.value[11:]} {b} bits':>27}" for s, b in GRIDS))
    worst, largest_min_max = [], 0.0
    for name in names:
        for seed in range(options.seeds):
            cells = dict(ratios(name, seed, recorded if seed == 0 else None))
            worst += [
                (row["ours"], row["ours"] / row["min_max"], name, f"{scheme.value} {bits} bits", f"seed {seed}")
                for (scheme, bits), row in cells.items()
            ]
            largest_min_max = max(largest_min_max, *(row["min_max"] for row in cells.values()))
            line = "".join(
                f"{row['ours']:>10.4f} |{row['min_max']:>6.2f} |{row.get('reference', np.nan):>6.2f}"
                for row in cells.values()
            )
            print(f"{name:14}{line}", flush=True)
    largest, lossiest = max(worst), max(worst, key=lambda entry: entry[1])
    print(f"\nlargest ratio {largest[0]:.4f} ({', '.join(map(str, largest[2:]))}), "
          f"median {np.median([entry[0] for entry in worst]):.5f}")  # fmt: skip
    print(f"largest ratio of min/max {largest_min_max:.2f}")
    print(f"largest ratio of ours to min/max's {lossiest[1]:.4f} ({', '.join(map(str, lossiest[2:]))})")


if __name__ == "__main__":
    main()
