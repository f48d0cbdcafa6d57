from .choice.grid_choice import choose_grid as choose_grid
from .choice.transformer import TransformerSizes as TransformerSizes
from .conversion import parallelize as parallelize
from .converters import Conversion as Conversion, register as register
from .gradient_overlap import sync_during_backward as sync_during_backward
from .gradient_sync import sync_gradients as sync_gradients
from .grid import Grid as Grid
from .grid_change import relayout as relayout
from .layers.attention import Heads as Heads
from .layers.dropout import Dropout as Dropout
from .layers.embedding import Embedding as Embedding, PositionEmbedding as PositionEmbedding
from .layers.linear import Linear as Linear
from .layers.loss import CrossEntropy as CrossEntropy
from .layers.norms import LayerNorm as LayerNorm, RMSNorm as RMSNorm
from .plain_state import plain_state_dict as plain_state_dict
