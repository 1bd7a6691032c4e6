"""One of two processes of `test_merging.test_two_processes`: prints the leaves of every merged state.

python tests/two_processes.py PORT WHICH
"""

import json
import os
import sys


def main(port, which):
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)  # One device each.

    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", 2, which, initialization_timeout=60)

    import test_merging
    from jax.sharding import NamedSharding

    import jqobs

    mine = [batch[which * 8 : which * 8 + 8] for batch in test_merging.batches()]
    merged = {}
    for name, observer in test_merging.MERGEABLE.items():
        if not name.startswith("mean"):
            merged[name] = jqobs.merge_processes(observer, jqobs.calibrate(observer, mine))

    # The moving average: one program over the global batch.
    mesh, name = jax.make_mesh((2,), ("a",)), "moving_average_min_max/tensor"
    observer = test_merging.OBSERVERS[name]
    whole = [jax.make_array_from_process_local_data(NamedSharding(mesh, jax.P("a")), part) for part in mine]
    state, step = jax.device_put(observer.init(mine[0]), NamedSharding(mesh, jax.P())), jax.jit(observer.update)
    for x in whole:
        state = step(state, x)
    merged[name] = state

    leaves = {name: [jax.device_get(leaf).tolist() for leaf in jax.tree.leaves(each)] for name, each in merged.items()}
    print(json.dumps(leaves))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
