"""How likely draws are, were they from the distribution they should be from. (Where scipy is installed transformers
imports it into every service that a test starts.)
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Of a chi-square statistic as large or larger."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def farthest_p_value(cumulative: Numbers) -> float:
    """At most the probability that an empirical distribution is as far from its true one, anywhere, or farther
    (Dvoretzky-Kiefer-Wolfowitz, with Massart's constant). `cumulative`: of each draw the true distribution's value.
    """
    ordered, num_draws = np.sort(cumulative), cumulative.shape[0]
    above = (np.arange(1, num_draws + 1) / num_draws - ordered).max()
    below = (ordered - np.arange(num_draws) / num_draws).max()
    return float(min(1.0, 2 * np.exp(-2 * num_draws * max(above, below) ** 2)))
