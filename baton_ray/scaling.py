"""How many replicas a deployment should have, by the load that they report.

Serve runs a policy in its controller, and copies this module there.
"""

from __future__ import annotations

from typing import Any

LOAD = "load"
"""The name under which each replica reports its load to Serve."""
_NUM_DIGITS = 6
"""Rounds a floating-point error away, because Serve would round it up to one more replica."""


class LoadPolicy:
    """A policy of Serve's autoscaling: as many replicas as bring each one's mean load to `target`.

    Serve applies the bounds and the delays of the deployment's `autoscaling_config`, and takes the mean of each
    replica's load over its `look_back_period_s`. While a running replica has reported no load, the number does not
    fall: the replica may be too busy to report.
    """

    def __init__(self, target: float) -> None:
        if not target > 0:
            raise ValueError(f"policy_kwargs: target is {target}, not above 0")
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns the wanted number of replicas, and the policy's state, which is empty.

        `context` is Serve's AutoscalingContext.
        """
        loads = (context.aggregated_metrics or {}).get(LOAD, {})
        wanted = round(sum(loads.values()) / self._target, _NUM_DIGITS)
        if not loads or len(loads) < context.current_num_replicas:
            wanted = max(wanted, context.target_num_replicas)
        return wanted, {}
