"""Calibrates, is killed at random moments, begins again, and ends with the bits of a run that nobody disturbed.

    python tests/killed.py DIRECTORY

Each run is a fork of this process, which imports JAX once and starts no backend, so that a kill costs little.
"""

import os
import pathlib
import random
import signal
import sys
import time

import jax
import numpy as np

import jqobs

os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(sys.argv[1]) / "compiled"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
KILLS = 20
PATH, RESULT = (pathlib.Path(sys.argv[1]) / name for name in ("checkpoint", "result"))
OBSERVER = jqobs.histogram(bins=32)


def batches():
    rng = np.random.default_rng(0)
    for scale in rng.uniform(1, 3, 400):
        yield (rng.standard_normal(64) * scale).astype(np.float32)


def in_a_fork(run):
    child = os.fork()
    if child:
        return child
    try:
        run()
    finally:
        os._exit(0)


def run_to_the_end(checkpoint, result):
    jqobs.save(result, jqobs.calibrate(OBSERVER, batches(), checkpoint=checkpoint, every=1 if checkpoint else None))


def main():
    random.seed(1)
    kills = moved = 0
    while kills < KILLS:
        before = PATH.stat().st_mtime_ns if PATH.exists() else 0
        child = in_a_fork(lambda: run_to_the_end(PATH, RESULT))
        # Once it has got somewhere, any moment is as good as any other.
        while (PATH.stat().st_mtime_ns if PATH.exists() else 0) == before and not os.waitpid(child, os.WNOHANG)[0]:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the run ended before it could be killed: give it more batches"
        kills, moved = kills + 1, moved + (PATH.stat().st_mtime_ns > before)
    print(f"{kills} kills, {moved} after progress")
    os.waitpid(in_a_fork(lambda: run_to_the_end(PATH, RESULT)), 0)
    undisturbed = RESULT.with_name("undisturbed")
    os.waitpid(in_a_fork(lambda: run_to_the_end(None, undisturbed)), 0)
    print("equal" if RESULT.read_bytes() == undisturbed.read_bytes() else "different")


if __name__ == "__main__":
    main()
