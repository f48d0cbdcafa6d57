from .trainer import Trainer as Trainer
from .worker import load_weights as load_weights
