"""Compiling a step over states and the arguments of a function, some of which are no arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from jqobs.numerics.inputs import is_array, owned
from jqobs.tracing.arguments import Arguments

Step = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""`(state, args, kwargs) -> result`."""


def compiled(step: Step, *, donates: bool = False) -> Step:
    """A step that is compiled once for every form of its arguments: flags and strings are part of the program.

    Of what the host owns a copy is handed over, since a loader may fill its buffer again before the step has run.

    Args:
      step: The step.
      donates: Whether the state is given up, so that its memory holds the next one.

    Example:
      >>> from jqobs.tracing.compilation import compiled
      >>> run = compiled(lambda total, args, kwargs: total + args[0] if args[1] == "plus" else total)
      >>> run(1, (2, "plus"), {}).item()
      3
    """

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1 if donates else ())
    def call(form: Arguments, state: Any, arrays: list[Any]) -> Any:
        return step(state, *form.restore(arrays))

    def run(state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form, arrays = Arguments.split(args, kwargs)
        return call(form, state, [owned(leaf) if is_array(leaf) else leaf for leaf in arrays])

    return run


def compiled_unless_traced(step: Step) -> Step:
    """A step that is compiled when it is called with arrays.

    Inside a program that is being traced it is a part of that: nothing is kept of it.

    Example:
      >>> import jax
      >>> from jqobs.tracing.compilation import compiled_unless_traced
      >>> add = compiled_unless_traced(lambda state, args, kwargs: state + args[0])
      >>> add(1, (2,), {}).item(), jax.jit(lambda x: add(x, (x,), {}))(1).item()
      (3, 2)
    """
    compiled_step = compiled(step)

    def run(state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((state, args, kwargs))):
            return step(state, args, kwargs)
        return compiled_step(state, args, kwargs)

    return run
