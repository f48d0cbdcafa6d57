"""Meshes of ranks, layouts of tensors over them, and the regions that each rank holds and needs.

Imports only the modules at the root of :mod:`reshard`, and the sizes of :mod:`reshard.codecs`.
"""

from reshard.sharding import layout_drawing as layout_drawing  # registers the drawing of a layout
from reshard.sharding.block_grid import compress_tensor
from reshard.sharding.box_search import find_overlapping, locate_points
from reshard.sharding.dim_cuts import MAX_NDIM, check_shape
from reshard.sharding.global_shape import find_global_shape, find_minority
from reshard.sharding.layout import AnyLayout, Box, Layout, RegionLayout, format_box
from reshard.sharding.mesh import MAX_RANK, Mesh, check_integer, parse_ranks
from reshard.sharding.spec import Strided, axis_of, parse_axis_names, read_spec, write_2023, write_axis_names
from reshard.sharding.tensor_spec import Coding, TensorSpec, check_tensors
from reshard.sharding.tiles import Tiles, cut_tiles, find_overlaps

__all__ = [
    "MAX_NDIM",
    "MAX_RANK",
    "AnyLayout",
    "Box",
    "Coding",
    "Layout",
    "Mesh",
    "RegionLayout",
    "Strided",
    "TensorSpec",
    "Tiles",
    "axis_of",
    "check_integer",
    "check_shape",
    "check_tensors",
    "compress_tensor",
    "cut_tiles",
    "find_global_shape",
    "find_minority",
    "find_overlapping",
    "find_overlaps",
    "format_box",
    "locate_points",
    "parse_axis_names",
    "parse_ranks",
    "read_spec",
    "write_2023",
    "write_axis_names",
]
