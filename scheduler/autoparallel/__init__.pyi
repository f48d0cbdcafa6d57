from .costs.layer_costs import MIXED_PRECISION as MIXED_PRECISION, StateBytes as StateBytes
from .costs.problem import Candidate as Candidate, SearchProblem as SearchProblem
from .inputs.choices import Choice as Choice, ChoiceRules as ChoiceRules, Sharding as Sharding
from .inputs.cluster import Cluster as Cluster
from .inputs.layer_graph import Layer as Layer, LayerGraph as LayerGraph, Tensor as Tensor
from .inputs.layer_profile import ClassTimes as ClassTimes, LayerProfile as LayerProfile, LayerTimes as LayerTimes
from .inputs.stages import StagePlan as StagePlan
from .modules.profiling import profile_layers as profile_layers
from .modules.tracing import TracedModel as TracedModel, trace_module as trace_module
from .result.reports import (
    Alternative as Alternative,
    EdgeReport as EdgeReport,
    StageReport as StageReport,
    TieReport as TieReport,
)
from .result.training_plan import TrainingPlan as TrainingPlan
from .searching import choose_training_plan as choose_training_plan, search as search
from .tuning import Measurement as Measurement, Round as Round, Tuned as Tuned, tune as tune
