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

KILLS = 20


def batches():
    import numpy as np

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


def main(directory):
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    import jqobs

    jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    path, result, undisturbed = (directory / name for name in ("checkpoint", "result", "undisturbed"))

    def run_to_the_end(checkpoint, result):
        observer = jqobs.histogram(bins=32)
        every = 1 if checkpoint else None
        jqobs.save(result, jqobs.calibrate(observer, batches(), checkpoint=checkpoint, checkpoint_every=every))

    def last_saved():
        return path.stat().st_mtime_ns if path.exists() else 0

    random.seed(1)
    kills = moved = 0
    while kills < KILLS:
        before, child = last_saved(), in_a_fork(lambda: run_to_the_end(path, result))
        # Once it has got somewhere, any moment is as good as any other.
        while last_saved() == before and not os.waitpid(child, os.WNOHANG)[0]:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the run ended before it could be killed: give it more batches"
        kills, moved = kills + 1, moved + (last_saved() > before)
    print(f"{kills} kills, {moved} after progress")
    os.waitpid(in_a_fork(lambda: run_to_the_end(path, result)), 0)
    os.waitpid(in_a_fork(lambda: run_to_the_end(None, undisturbed)), 0)
    print("equal" if result.read_bytes() == undisturbed.read_bytes() else "different")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
