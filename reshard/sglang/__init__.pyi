from .sglang_trainer import Trainer as Trainer
from .sglang_worker import load_weights as load_weights
