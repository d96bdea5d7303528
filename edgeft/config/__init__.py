"""Every knob, declared once; strict YAML; from options to one recipe."""

from edgeft.config.reader import Knob, build, dump, knobs, read_yaml, scalar
from edgeft.config.resolve import (
    DEFAULT_RECIPE,
    Options,
    apply_sets,
    exists,
    learning_identity,
    load_recipe,
    names,
    place,
    recipe_of,
    shipped,
)
from edgeft.config.schema import (
    CHANNELS,
    TENSORS,
    DataConfig,
    Device,
    EvalConfig,
    ExecutionConfig,
    GovernorConfig,
    ModelConfig,
    PartConfig,
    Recipe,
    TrainConfig,
    UpdateConfig,
    knob,
    windows,
)
from edgeft.config.units import format_count, format_duration, format_size, parse_size, parse_time
