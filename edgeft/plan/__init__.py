"""Predicted memory, time and disk space of a run, term by term, and how to make it fit a device.

Computed from the model's header and the rows alone: neither torch nor any weight is loaded.
"""

from __future__ import annotations

from edgeft.plan.shape import STATE_BYTES, Shape, shape_of, shape_of_config, trained_parameters

__all__ = ["STATE_BYTES", "Shape", "shape_of", "shape_of_config", "trained_parameters"]
