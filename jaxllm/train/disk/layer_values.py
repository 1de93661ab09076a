"""Named values of a streamed layer: what its forward program returns for its backward program, by ``model.remat``.

A layer is differentiated under ``jax.checkpoint`` in its forward program. The pull-back holds the layer's arguments and
the named values that the policy saves (``jaxllm.models.remat``). The values are results of the forward program; the
backward program makes the pull-back again from its own arguments and the values, so that they are not computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Literal

from jaxllm.config import ConfigError
from jaxllm.models.remat import Policy, checkpointed

Layer = Callable[[Any, Any], tuple[Any, Any]]
"""``(parameters, input) -> (outputs that have gradients, further outputs)``."""


class LayerValues:
    """Values of a kind of layer between its two programs; ``forward`` is traced first.

    Args:
        what: the kind, for messages.
        policy: names the values that are saved.
    """

    def __init__(self, what: str, policy: Policy):
        self._what, self._policy = what, policy
        self._places: list[tuple[str, Any]] = []
        self._tree: Any = None

    def forward(self, layer: Layer, own: Any, x: jax.Array, given: Any) -> tuple[Any, Any, list[jax.Array]]:
        """Outputs of a layer, its further outputs, and the values that are saved.

        Args:
            layer: differentiable function; it may read ``given`` as well.
            own, x: its parameters and its input.
            given: other arguments of both programs.
        """

        def body(carry: Any, step: Any, wrap: Any = None) -> tuple[Any, None]:
            return layer(step, carry), None

        saving = checkpointed(self._policy, body)
        outs, pull, more = jax.vjp(lambda own, x: saving(x, own)[0], own, x, has_aux=True)
        leaves, self._tree = jax.tree.flatten(pull)
        known = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves((own, x, given)))}
        values: dict[int, tuple[int, jax.Array]] = {}
        self._places = []
        for leaf in leaves:
            if id(leaf) in known:
                self._places.append(("argument", known[id(leaf)]))
            elif isinstance(leaf, Tracer):
                number, _ = values.setdefault(id(leaf), (len(values), leaf))
                self._places.append(("value", number))
            else:
                self._places.append(("constant", leaf))
        return outs, more, [leaf for _, leaf in values.values()]

    def pull(self, own: Any, x: jax.Array, given: Any, values: Sequence[jax.Array]) -> Callable[[Any], Any]:
        """Pull-back of the layer in the backward program: gradients of the outputs -> those of ``own`` and ``x``."""
        arguments = jax.tree.leaves((own, x, given))
        sources = {"argument": arguments, "value": values}
        leaves = [place if what == "constant" else sources[what][place] for what, place in self._places]
        return self._tree.unflatten(leaves)

    def names(self, jaxpr: Any, count: int) -> list[str]:
        """Names of the values.

        Args:
            jaxpr: of the forward program, whose last results are the values.
            count: number of values.

        Raises:
            ConfigError: a value has no name: the layer would keep what its policy does not save.
        """
        variables = jaxpr.jaxpr.outvars[len(jaxpr.jaxpr.outvars) - count :]
        found = [_name_of(jaxpr.jaxpr, variable) for variable in variables]
        for name, variable in zip(found, variables, strict=True):
            if not name:
                raise ConfigError(
                    f"{self._what}: its backward pass reads a value {variable.aval} that model.remat = "
                    f'"{self._policy}" does not name, which would be kept beside the named ones; set model.remat to '
                    '"full".'
                )
        return found


def saves_values(policy: Policy) -> bool:
    """Whether streamed layers save values beside their input under a policy that they have."""
    return policy != "full"


def _name_of(jaxpr: Any, variable: Any) -> str:
    """``checkpoint_name`` of a variable; empty: it has none. Calls are entered, and views passed."""
    if isinstance(variable, Literal):
        return ""
    for equation in reversed(jaxpr.eqns):
        if variable not in equation.outvars:
            continue
        if equation.primitive.name == "name":
            return equation.params["name"]
        place = equation.outvars.index(variable)
        for inner in equation.params.values():
            body = getattr(inner, "jaxpr", inner)
            if len(getattr(body, "outvars", ())) == len(equation.outvars):
                return _name_of(body, body.outvars[place])
        if len(equation.invars) == len(equation.outvars) == 1:
            return _name_of(jaxpr, equation.invars[0])
        return ""
    return ""
