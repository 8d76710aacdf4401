"""Tests of how well random draws fit the distribution they should come from.

They use torch rather than scipy: where scipy is installed, transformers imports it into every service that a test
starts.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Returns the probability that a chi-square statistic with `degrees` degrees of freedom is at least this large."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def farthest_p_value(cumulative: Numbers) -> float:
    """Returns an upper bound on the p-value of a Kolmogorov-Smirnov test: the probability that the empirical
    distribution is at least this far from the true one.

    `cumulative` holds the true cumulative distribution at each draw. The bound is Dvoretzky-Kiefer-Wolfowitz's, with
    Massart's constant.
    """
    ordered, num_draws = np.sort(cumulative), cumulative.shape[0]
    above = (np.arange(1, num_draws + 1) / num_draws - ordered).max()
    below = (ordered - np.arange(num_draws) / num_draws).max()
    return float(min(1.0, 2 * np.exp(-2 * num_draws * max(above, below) ** 2)))
