from .publisher import Publisher as Publisher, PublishHandle as PublishHandle, PublishReport as PublishReport
from .state_dict import transfer_state_dict as transfer_state_dict
from .subscriber import Subscriber as Subscriber
