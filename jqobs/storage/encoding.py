"""What is no array, as JSON: specs, observers by their recipes, and what a model's state is of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jqobs import observers, range_rules
from jqobs.formats.qdtype import QDtype
from jqobs.formats.qscheme import QScheme
from jqobs.formats.quant_spec import QuantSpec
from jqobs.models.assignment import Assignment
from jqobs.models.sites import Sites
from jqobs.observers.observer import respecified
from jqobs.recipe import Recipe
from jqobs.storage.files import CheckpointError
from jqobs.tracing.program import Site

_BUILT = {
    **{name: getattr(observers, name) for name in observers.__all__},
    **{name: getattr(range_rules, name) for name in ("entropy", "mse", "norm_minimization", "percentile")},
    "respecified": respecified,
}
"""The factories that a file may name: nothing else is called while one is read."""


def encode_spec(spec: QuantSpec) -> dict[str, Any]:
    """A spec as JSON.

    Example:
      >>> import jqobs
      >>> from jqobs.storage.encoding import decode_spec, encode_spec
      >>> decode_spec(encode_spec(jqobs.QuantSpec(jqobs.qint4)))
      QuantSpec(qint4, per_tensor_affine)
    """
    return {
        "qdtype": [spec.qdtype.name, spec.qdtype.quant_min, spec.qdtype.quant_max],
        "qscheme": spec.qscheme.value,
        "ch_axis": spec.ch_axis,
        "group_size": spec.group_size,
        "eps": spec.eps,
    }


def decode_spec(static: Mapping[str, Any]) -> QuantSpec:
    """And back."""
    return QuantSpec(**{**static, "qdtype": QDtype(*static["qdtype"]), "qscheme": QScheme(static["qscheme"])})


def encode_value(value: Any) -> Any:
    """An argument of a factory as JSON; what the library does not know is only named, so that it can be compared.

    Example:
      >>> import jqobs
      >>> from jqobs.storage.encoding import decode_value, encode_value
      >>> encode_value((1, 2.0))
      {'tuple': [1, 2.0]}
      >>> decode_value(encode_value(jqobs.log_histogram(range_rule=jqobs.percentile(99.0))))
      log_histogram(range_rule=percentile(p=99.0))
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {"tuple": [encode_value(each) for each in value]}
    if isinstance(value, QDtype):
        return {"qdtype": [value.name, value.quant_min, value.quant_max]}
    if isinstance(value, QScheme):
        return {"qscheme": value.value}
    recipe = getattr(value, "recipe", None)
    if isinstance(recipe, Recipe):
        name = getattr(recipe.factory, "__name__", "")
        if _BUILT.get(name) is recipe.factory:
            return {"factory": name, "arguments": {key: encode_value(each) for key, each in recipe.arguments}}
    return {"foreign": repr(value)}


def decode_value(encoded: Any) -> Any:
    """And back.

    Raises:
      CheckpointError: It is not of this library.
    """
    if not isinstance(encoded, dict):
        return encoded
    if "tuple" in encoded:
        return tuple(decode_value(each) for each in encoded["tuple"])
    if "qdtype" in encoded:
        return QDtype(*encoded["qdtype"])
    if "qscheme" in encoded:
        return QScheme(encoded["qscheme"])
    if "foreign" in encoded:
        raise CheckpointError(f"like must be given to load what is not of this library: {encoded['foreign']}")
    return _BUILT[encoded["factory"]](**{name: decode_value(each) for name, each in encoded["arguments"].items()})


def encode_assignment(assignment: Assignment) -> dict[str, Any]:
    """What a model's state is of, as JSON."""
    return {
        "sites": [{**dataclasses.asdict(site), "dtype": jnp.dtype(site.dtype).name} for site in assignment.sites],
        "opaque_calls": list(assignment.sites.opaque_calls),
        "observers": {name: encode_value(observer) for name, observer in assignment.observed},
        "groups": [list(group) for group in assignment.groups],
    }


def decode_assignment(static: Mapping[str, Any]) -> Assignment:
    """And back.

    Raises:
      CheckpointError: One of the observers is not of this library.
    """
    sites = [
        Site(
            **{
                **site,
                "dtype": jnp.dtype(site["dtype"]),
                **{name: tuple(site[name]) for name in ("shape", "loops", "stacked")},
            }
        )
        for site in static["sites"]
    ]
    return Assignment(
        Sites(tuple(sites), tuple(static["opaque_calls"])),
        tuple((name, decode_value(each)) for name, each in static["observers"].items()),
        tuple(tuple(group) for group in static["groups"]),
    )
