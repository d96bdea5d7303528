"""What a run will need in memory, time and on the disk, term by term; and how to make it fit a device.

Known before anything is computed, from a model's header and the rows alone: neither torch nor any weight is loaded.
"""

from __future__ import annotations

from edgeft.plan.shape import STATE_BYTES, Shape, shape_of, shape_of_config, trained_parameters

__all__ = ["STATE_BYTES", "Shape", "shape_of", "shape_of_config", "trained_parameters"]
