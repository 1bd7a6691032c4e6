"""The sites of a function, as a list that is printed as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jqobs.reporting.tables import table
from jqobs.tracing.program import Site


@dataclasses.dataclass(frozen=True)
class Sites(Sequence[Site]):
    """The sites of a function, in the order of the program; printed, they are a table.

    Attributes:
      all: The sites.
      opaque_calls: The calls that hold products and that nobody can look into.

    Example:
      >>> import jax.numpy as jnp, jqobs
      >>> calibration = jqobs.observe(lambda w, x: x @ w, jqobs.min_max(), weight_argnums=0)
      >>> sites = calibration.sites(jnp.ones((3, 4)), jnp.ones((2, 3)))
      >>> len(sites), sites[1].name, sites.opaque_calls
      (2, 'w/rhs', ())
    """

    all: tuple[Site, ...]
    opaque_calls: tuple[str, ...] = ()

    def __getitem__(self, place: Any) -> Any:
        return self.all[place]

    def __len__(self) -> int:
        return len(self.all)

    @property
    def by_name(self) -> dict[str, Site]:
        """The sites by their names."""
        return {site.name: site for site in self.all}

    def __str__(self) -> str:
        rows = [["site", "primitive", "side", "kind", "shape", "dtype", "ch_axis"]]
        for site in self:
            shape = " x ".join([*map(str, site.stack), str(site.shape)])
            axis = "-" if site.ch_axis is None else str(site.ch_axis)
            kind = "weight" if site.is_weight else "activation"
            rows.append([site.name, site.primitive, site.side, kind, shape, str(site.dtype), axis])
        lines = table(rows, left=6)
        return "\n".join([lines, *(f"not seen: what is inside {name}" for name in self.opaque_calls)])
