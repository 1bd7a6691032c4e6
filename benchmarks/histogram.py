"""What histograms cost: updates against PyTorch's, readings, memory.

    python benchmarks/histogram.py [--smoke]

All in one process, interleaved, medians. The reference is asked where torch is installed.
"""

import os

# Idle workers of one library must not spin on the cores of the other.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import argparse
import contextlib
import statistics
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jqobs

SIZES = [2**16, 2**20, 2**24]


def interleaved(functions, repeats):
    """The median time of each function, in seconds: one call each in turn, again and again."""
    times = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def updating(observer, x):
    """One jitted, donated update of a state that has seen the batch before."""
    step = jax.jit(observer.update, donate_argnums=0)
    state = [step(observer.init(x), x)]

    def run():
        state[0] = step(state[0], x)
        state[0].seen.low.block_until_ready()  # All leaves of a step are ready at once.

    return run


def reference(x):
    """One update of torch's HistogramObserver, over a range it has seen before."""
    import torch
    from torch.ao.quantization.observer import HistogramObserver

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watcher, batch = HistogramObserver(), torch.from_numpy(np.array(x))
        watcher(batch)
        watcher.calculate_qparams()
    return lambda: watcher(batch), lambda: watcher.calculate_qparams()


def updates(sizes, repeats):
    print(
        f"{'update of':>12} {'data':>10}" + "".join(f"{name:>20}" for name in ("log_histogram", "histogram", "min_max"))
    )
    for size in sizes:
        rng = np.random.default_rng(0)
        kinds = {"normal": rng.standard_normal(size), "uniform": rng.random(size), "relu": np.zeros(size)}
        kinds["relu"][::10] = rng.random(len(kinds["relu"][::10]))
        for kind, values in kinds.items():
            x = jnp.asarray(values, jnp.float32)
            functions = {
                name: updating(getattr(jqobs, name)(), x) for name in ("log_histogram", "histogram", "min_max")
            }
            with contextlib.suppress(ImportError):
                functions["reference"] = reference(x)[0]
            median = interleaved(functions, repeats)
            theirs = median.pop("reference", None)
            cells = [f"{t * 1e3:9.3f} ms" + (f" {theirs / t:5.1f}x" if theirs else "") for t in median.values()]
            tail = f"   reference {theirs * 1e3:.3f} ms" if theirs else ""
            print(f"{size:>12,} {kind:>10}" + "".join(f"{cell:>20}" for cell in cells) + tail, flush=True)


def memory(size):
    """Peak extra memory of a compiled update, as XLA plans it."""
    for name in ("log_histogram", "histogram", "min_max"):
        observer, x = getattr(jqobs, name)(), jax.ShapeDtypeStruct((size,), jnp.float32)
        state = jax.eval_shape(observer.init, x)
        plan = jax.jit(observer.update, donate_argnums=0).lower(state, x).compile().memory_analysis()
        print(f"peak extra memory of {name:14} over {size:,} values: {plan.temp_size_in_bytes / 2**20:.2f} MiB")


def readings(repeats, channels, tensors):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(2**16), jnp.float32)
    functions = {}
    for name, rule in (("log_histogram", jqobs.mse()), ("histogram", jqobs.mse()),
                       ("histogram", jqobs.norm_minimization()), ("log_histogram", jqobs.percentile(99.9)),
                       ("log_histogram", jqobs.entropy())):  # fmt: skip
        for qdtype in (jqobs.quint8, jqobs.quint4)[tensors < 100 :]:
            observer = getattr(jqobs, name)(range_rule=rule, qdtype=qdtype)
            state = observer.update(observer.init(x), x)
            functions[f"{name}, {rule}, {qdtype}"] = lambda o=observer, s=state: jax.block_until_ready(
                o.calculate_qparams(s).scale
            )
    with contextlib.suppress(ImportError):
        functions["reference, its walk, quint8"] = reference(x)[1]
    for name, median in interleaved(functions, repeats).items():
        print(f"calculate_qparams of {name:45} {median * 1e3:9.2f} ms")

    observer = jqobs.log_histogram()
    many = [observer.update(observer.init(x), x * (i + 1)) for i in range(tensors)]
    together = jax.jit(lambda states: [observer.calculate_qparams(state) for state in states])
    begin = time.perf_counter()
    jax.block_until_ready(together(many))
    compiled = time.perf_counter()
    jax.block_until_ready(together(many))
    print(
        f"{tensors} tensors in one jitted call: {time.perf_counter() - compiled:.2f} s, "
        f"the first with compilation {compiled - begin:.1f} s"
    )

    for bins in (32, 128)[tensors < 100 :]:
        observer = jqobs.log_histogram(
            bins_per_octave=bins, qscheme=jqobs.per_channel_symmetric, qdtype=jqobs.qint4, ch_axis=0
        )
        x = jnp.asarray(np.random.default_rng(0).standard_normal((channels, 1024)), jnp.float32)
        begin = time.perf_counter()
        state = jax.block_until_ready(observer.update(observer.init(x), x))
        updated = time.perf_counter()
        jax.block_until_ready(observer.calculate_qparams(state))
        print(f"{channels} channels x 1,024 values, {bins} bins an octave: update {updated - begin:.1f} s, "
              f"reading {time.perf_counter() - updated:.1f} s, both with compilation; state "
              f"{sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**20:.0f} MiB")  # fmt: skip


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--smoke", action="store_true", help="small sizes, once")
    smoke = arguments.parse_args().smoke
    updates(SIZES[:1] if smoke else SIZES, 2 if smoke else 15)
    memory(SIZES[0] if smoke else SIZES[-1])
    readings(*((1, 8, 2) if smoke else (15, 4096, 100)))


if __name__ == "__main__":
    main()
