"""Calibrates one model on one device, on eight, and in two processes, and compares the grids bit by bit.

    python examples/calibrate_sharded.py

The eight devices are made of one CPU; the two processes are real ones, that find each other through `jax.distributed`.
The model and the data are those of `calibrate_digits.py`, and the weights are those of its first day: untrained.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import argparse
import pathlib
import socket
import subprocess
import sys
import tempfile

import jax
import numpy as np
from calibrate_digits import CNN, WEIGHT, split_digits

import jqobs

CONFIG = jqobs.QConfig(activation=jqobs.log_histogram(), weight=WEIGHT)


def load() -> tuple[dict, list[np.ndarray]]:
    """The variables of the model, and the images in batches of 32."""
    _, (images, _), _ = split_digits()
    return CNN().init(jax.random.key(0), images[:1]), np.split(images, len(images) // 32)


def calibrate(**options) -> dict[str, jqobs.QParams]:
    """The grids, of all images."""
    variables, batches = load()
    calibration = jqobs.observe(CNN().apply, CONFIG, weight_argnums=0)
    state = jqobs.calibrate(calibration, [(variables, images) for images in batches], **options)
    return calibration.calculate_qparams(state)


def calibrate_part(port: str, which: int, path: str) -> None:
    """One of two processes: it sees every other batch, and merges what it has seen with the other."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, which, initialization_timeout=60)
    variables, batches = load()
    calibration = jqobs.observe(CNN().apply, CONFIG, weight_argnums=0)
    state = jqobs.calibrate(calibration, [(variables, images) for images in batches[which::2]])
    jqobs.save(path, calibration.calculate_qparams(jqobs.merge_processes(calibration, state)))


def calibrate_in_two_processes() -> list[dict[str, jqobs.QParams]]:
    """What each of the two came to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as directory:
        paths = [str(pathlib.Path(directory) / str(which)) for which in (0, 1)]
        command = [sys.executable, __file__, "--part", port]
        # The library between the processes greets on the standard output.
        workers = [
            subprocess.Popen([*command, str(which), path], stdout=subprocess.DEVNULL)
            for which, path in enumerate(paths)
        ]
        failed = [worker.wait(timeout=300) for worker in workers]
        if any(failed):
            sys.exit("a process failed")
        return [jqobs.load(path) for path in paths]


def differ(one: dict[str, jqobs.QParams], other: dict[str, jqobs.QParams]) -> int:
    """In how many sites two sets of grids differ, in any bit."""
    return sum(
        any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in zip(one[site], other[site], strict=True))
        for site in one
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--part", nargs=3, metavar=("PORT", "WHICH", "PATH"), help=argparse.SUPPRESS)
    part = arguments.parse_args().part
    if part:
        calibrate_part(part[0], int(part[1]), part[2])
        return

    mesh, single = jax.make_mesh((8,), ("data",)), calibrate()
    ways = {
        "8 devices, a state that all share": lambda: [calibrate(mesh=mesh)],
        "8 devices, a state each, merged at the end": lambda: [calibrate(mesh=mesh, merge_at_end=True)],
        "2 processes, merged at the end": calibrate_in_two_processes,
    }
    print(f"{len(single)} sites, calibrated on one device")
    for way, run in ways.items():
        results = run()
        differing = max(differ(single, result) for result in results)
        print(f"{way:46}{'identical to the last bit' if not differing else f'{differing} sites differ'}")


if __name__ == "__main__":
    main()
