"""The moments of a training step at which memory can peak."""

from enum import Enum


class Moment(Enum):
    """In the order in which a step meets them. Between top and bottom blocks memory moves linearly,
    so the ends tell the peak.
    """

    GATHER = "gather of the head"
    FORWARD_END = "end of forward"
    LOSS = "start of backward"
    HEAD = "backward of the head"
    HEAD_REDUCE = "gradient reduction of the head"
    TOP = "backward of the last block"
    TOP_REDUCE = "gradient reduction of the last block"
    BLOCK_END = "end of a block's backward"
    BOTTOM = "backward of the first blocks"
    BOTTOM_REDUCE = "gradient reduction of the first block"
    EMBEDDING = "gradient of the embedding and the root"
    OPTIMIZER = "optimizer step"
