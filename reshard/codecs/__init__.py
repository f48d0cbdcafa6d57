"""Codecs: how values are compressed for the wire. Planning uses only their sizes.

May import the modules at the root only.
"""

from reshard.codecs.block import (
    BLOCK_CODECS,
    CODED_DTYPES,
    ELEMENT_VALUES,
    BlockCodec,
    find_block_codec,
    is_block_dtype,
)
from reshard.codecs.codec import (
    Codec,
    TransferPolicy,
    codec_name,
    find_codec,
    has_base,
    has_variable_size,
    parse_codec,
)
from reshard.codecs.custom import CustomCodec, find_custom_codec
from reshard.codecs.elements import ElementCodec, ErrorSums
from reshard.codecs.formats import LOSSLESS_CODECS
from reshard.codecs.rates import measure_rates

__all__ = [
    "BLOCK_CODECS",
    "CODED_DTYPES",
    "ELEMENT_VALUES",
    "LOSSLESS_CODECS",
    "BlockCodec",
    "Codec",
    "CustomCodec",
    "ElementCodec",
    "ErrorSums",
    "TransferPolicy",
    "codec_name",
    "find_block_codec",
    "find_codec",
    "find_custom_codec",
    "has_base",
    "has_variable_size",
    "is_block_dtype",
    "measure_rates",
    "parse_codec",
]
