"""Every knob, declared once; strict YAML; from options to one recipe."""

from edgeft.config.knobs import Knob, knobs
from edgeft.config.reader import build, dump, read_yaml, scalar, suggest
from edgeft.config.resolve import (
    DEFAULT_RECIPE,
    Options,
    apply_sets,
    check_heat,
    exists,
    learning_identity,
    load_recipe,
    names,
    place,
    recipe_of,
    shipped,
    use_profile,
)
from edgeft.config.schema import (
    CHANNELS,
    TENSORS,
    DataConfig,
    Device,
    EvalConfig,
    ExecutionConfig,
    ExportConfig,
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
