"""One of two processes of `test_merging.test_two_processes`: prints the leaves of every merged state."""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("XLA_FLAGS", None)  # One device each.

import jax

port, which = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(which), initialization_timeout=60)

import test_merging  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

import jqobs  # noqa: E402

mine = [batch[int(which) * 8 : int(which) * 8 + 8] for batch in test_merging.batches()]
merged = {}
for name, observer in test_merging.MERGEABLE.items():
    if not name.startswith("mean"):
        merged[name] = jqobs.merge_processes(observer, jqobs.calibrate(observer, mine))

# The moving average: one program over the global batch.
mesh, name = jax.make_mesh((2,), ("a",)), "moving_average_min_max/tensor"
observer = test_merging.OBSERVERS[name]
whole = [jax.make_array_from_process_local_data(NamedSharding(mesh, jax.P("a")), part) for part in mine]
state = jax.device_put(observer.init(mine[0]), NamedSharding(mesh, jax.P()))
step = jax.jit(observer.update)
for x in whole:
    state = step(state, x)
merged[name] = state

print(
    json.dumps(
        {name: [jax.device_get(leaf).tolist() for leaf in jax.tree.leaves(each)] for name, each in merged.items()}
    )
)
