"""Sites that get one range: which they are, and whether they can."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jqobs.models.patterns import find_names
from jqobs.observers.observer import Observer
from jqobs.tracing.program import Site

Patterns = tuple[tuple[str, ...], ...]


def as_patterns(share: Any) -> Patterns:
    """The argument `share` of `jqobs.observe` as a tuple of patterns for every group.

    Raises:
      ValueError: Something else than a pattern, or a list of patterns and of tuples of patterns.

    Example:
      >>> from jqobs.models.share import as_patterns
      >>> as_patterns(["*/qkv/lhs", ("q/lhs", "k/lhs")])
      (('*/qkv/lhs',), ('q/lhs', 'k/lhs'))
    """
    if share is None:
        return ()
    entries = [share] if isinstance(share, str) else share
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str | list | tuple) for entry in entries):
        raise ValueError(f"share must be a pattern, or a list of patterns and of tuples of patterns; got {share!r}")
    return tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)


def resolve_groups(
    groups: Sequence[Sequence[str]], sites: Mapping[str, Site], chosen: Mapping[str, Observer]
) -> tuple[tuple[str, ...], ...]:
    """The names of the observed sites in each group.

    Raises:
      ValueError: A pattern that matches no site; sites in two groups, or that cannot have one range.
    """
    resolved: list[tuple[str, ...]] = []
    for patterns in groups:
        matched = dict.fromkeys(itertools.chain.from_iterable(find_names(pattern, sites) for pattern in patterns))
        members = tuple(name for name in matched if name in chosen)
        for name in members:
            if any(name in group for group in resolved):
                raise ValueError(f"share must put a site into one group; {name} is in two")
            _check_alike(members[0], name, sites, chosen)
        resolved.append(members)
    return tuple(resolved)


def _check_alike(first: str, name: str, sites: Mapping[str, Site], chosen: Mapping[str, Observer]) -> None:
    if chosen[name].merge is None:
        raise ValueError(
            f"share: {chosen[name]!r} at {name} cannot be merged, since its result depends on the order of "
            "batches; use a statistic that can, such as min_max or log_histogram"
        )
    if chosen[name] != chosen[first]:
        raise ValueError(
            f"share: the sites of a group must have one observer; {first} has {chosen[first]!r} and "
            f"{name} has {chosen[name]!r}"
        )
    if _form_of(name, sites, chosen) != _form_of(first, sites, chosen):
        raise ValueError(
            f"share: the sites of a group must have states of one shape; that of {first} is for "
            f"{sites[first].shape}, that of {name} for {sites[name].shape}"
        )


def _form_of(name: str, sites: Mapping[str, Site], chosen: Mapping[str, Observer]) -> Any:
    site, observer = sites[name], chosen[name]
    state = jax.eval_shape(observer.init, jax.ShapeDtypeStruct(site.shape, site.dtype))
    return site.stack, [leaf.shape for leaf in jax.tree.leaves(state)]
