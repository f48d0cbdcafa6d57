from .costs.layer_costs import MIXED_PRECISION as MIXED_PRECISION, StateBytes as StateBytes
from .inputs.cluster import Cluster as Cluster
from .inputs.layer_choices import ChoiceRules as ChoiceRules, LayerChoice as LayerChoice
from .inputs.layer_graph import Layer as Layer, LayerGraph as LayerGraph, Tensor as Tensor
from .inputs.layer_profile import LayerProfile as LayerProfile
from .modules.layer_tracing import trace_module as trace_module
from .modules.profiling import profile_layers as profile_layers
from .result.training_plan import TrainingPlan as TrainingPlan
from .searching import search as search
from .tuning import tune as tune
