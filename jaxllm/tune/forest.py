"""Forest of regression trees, by scikit-learn (the extra ``tune``).

scikit-learn is maintained, its wheels exist for every platform of jax, and scipy, the heavier part of it, is a
requirement of jax anyway: an own forest would save 10 MB and cost its upkeep.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

TREES = 100

Predict = Callable[[np.ndarray], np.ndarray]
"""Features [N, F] -> predicted targets [N, K]."""


def fit_forest(
    x: Float[np.ndarray, "N F"], y: Float[np.ndarray, " N"] | Float[np.ndarray, "N K"], *, seed: int = 0
) -> Predict:
    """Forest of extremely randomised trees, fitted to one or several targets.

    Args:
        x: features.
        y: targets; K is 1 where they have one dimension.
        seed: of the trees.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import ExtraTreesRegressor
    except ImportError as missing:
        raise ImportError("tuning fits forests with scikit-learn: pip install 'jaxllm[tune]'.") from missing
    model = ExtraTreesRegressor(TREES, random_state=seed).fit(x, y[:, 0] if y.shape[1:] == (1,) else y)
    return lambda x: model.predict(x).reshape(len(x), -1)


def r_squared(found: Float[np.ndarray, " N"], want: Float[np.ndarray, " N"]) -> float:
    """Coefficient of determination of predictions: 1 for perfect ones, 0 for those of the mean."""
    return 1 - float(np.square(found - want).sum() / np.square(want - want.mean()).sum())
