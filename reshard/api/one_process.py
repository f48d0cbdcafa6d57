"""Reshard with the shards of all ranks in one process. This is the reference for all other backends."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import numpy as np
import xxhash

from reshard.api.arguments.options import PlanOptions, TransferOptions, read_options, shows_options
from reshard.api.arrays.equal_shards import CORNER, describe_equal_shards
from reshard.codecs import ErrorSums, has_base, has_variable_size
from reshard.codecs.raw_bytes import decoded_dtype
from reshard.dtypes import dtype_name
from reshard.errors import ArgumentError, DisagreementError
from reshard.formatting import brief
from reshard.plan import Plan, ensure_checked, expand_messages
from reshard.planner import compress_tensors, plan_tensors
from reshard.public_api import caller_level, not_compiled
from reshard.sharding import AnyLayout, Layout, Mesh, RegionLayout, TensorSpec, Tiles, check_shape, find_global_shape

Array = Any


@not_compiled
def execute_local(plan: Plan, shards: Sequence[Mapping[int, Array]]) -> list[dict[int, Array]]:
    """Execute a plan's messages in order on the shards of all ranks, held in this process.

    Args:
        plan: the plan. Checked once, as by :func:`reshard.check_plan`, unless :func:`reshard.make_plan` made it in
            this process.
        shards: for each tensor of the plan, ``{source rank: local array}``, all NumPy or all torch. If the tensor has
            a codec, its shards are encoded before the messages and decoded after them.

    Returns:
        For each tensor, ``{destination rank: local array}``: new arrays of the same kind.

    Raises:
        ArgumentError: a shard is missing or has the wrong shape or dtype.
        PlanError: the plan does not deliver every element.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"execute_local needs a Plan, not {type(plan).__name__}")
    if not isinstance(shards, Collection) or not all(isinstance(shard, Mapping) for shard in shards):
        raise ArgumentError("pass shards as a list with {source rank: local array} for each tensor of the plan")
    if len(shards) != len(plan.tensors):
        raise ArgumentError(f"the plan moves {len(plan.tensors)} tensors, but shards has {len(shards)}")
    for arrays in shards:
        _read_shards(arrays)
    ensure_checked(plan)
    for spec, arrays in zip(plan.tensors, shards, strict=True):
        _check_shards(spec.plain.src_tiles, spec.plain.dtype, arrays, spec.name)
    return _execute(plan, shards, [next(iter(arrays.values())) for arrays in shards])


def _execute(plan: Plan, shards: Sequence[Mapping[int, Array]], likes: Sequence[Array]) -> list[dict[int, Array]]:
    """Encode, move and decode; the results are of the kind and dtype of ``likes``, an array for each tensor."""
    moved = _move(plan, [_encode(spec, arrays) for spec, arrays in zip(plan.tensors, shards, strict=True)])
    return [
        {rank: _decode(spec, array, spec.plain.dst_tiles.local_shape(rank), like) for rank, array in arrays.items()}
        for spec, arrays, like in zip(plan.tensors, moved, likes, strict=True)
    ]


def _encode(spec: TensorSpec, arrays: Mapping[int, Array]) -> Mapping[int, Array]:
    """The arrays that messages move. With a codec: uint8 of shape ``(..., codec elements, bytes per element)``."""
    if spec.codec is not None:
        return _encode_measured(spec, arrays)[0]
    return {rank: _as_bytes(array) for rank, array in arrays.items()}


def _encode_measured(spec: TensorSpec, arrays: Mapping[int, Array]) -> tuple[Mapping[int, Array], float]:
    """The encoded arrays as :func:`_encode` returns them, and the relative error of the codec on them."""
    assert spec.codec is not None
    encoded, sums = {}, ErrorSums()
    for rank, array in arrays.items():
        if isinstance(array, np.ndarray):
            array = np.ascontiguousarray(array, dtype=_native(array.dtype))
        else:
            array = array.detach().resolve_neg().cpu().contiguous()
        encoded[rank] = np.empty((*spec.src_tiles.local_shape(rank), spec.itemsize), dtype=np.uint8)
        sums = sums.plus(spec.codec.encode_measured(array, encoded[rank], spec.ndim - 1))
    return encoded, sums.relative_error


def _decode(spec: TensorSpec, array: Array, shape: tuple[int, ...], like: Array) -> Array:
    """The inverse of :func:`_encode` for one array; ``like`` is an array of the result's kind."""
    if spec.codec is None:
        return array if array.dtype == like.dtype else array.view(like.dtype)
    decoded = _new_on_cpu(like, shape)
    spec.codec.decode(array, decoded, spec.ndim - 1)
    return _placed_as(like, decoded)


def _placed_as(like: Array, array: Array) -> Array:
    """The array in the byte order, or on the device, of another one."""
    return array.astype(like.dtype, copy=False) if isinstance(like, np.ndarray) else array.to(like.device)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in the byte order of this machine, in which values are encoded and compared."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _move(plan: Plan, shards: Sequence[Mapping[int, Array]]) -> list[dict[int, Array]]:
    """Execute the messages on arrays that :func:`_encode` has returned."""
    out: list[dict[int, Array]] = []
    for spec, arrays in zip(plan.tensors, shards, strict=True):
        like, inner = next(iter(arrays.values())), () if spec.codec is None else (spec.itemsize,)
        shapes = {rank: (*spec.dst_tiles.local_shape(rank), *inner) for rank in spec.dst.ranks}
        out.append({rank: _empty_like(like, shape) for rank, shape in shapes.items()})
    staging: dict[tuple[int, int], Array] = {}  # (message id, relay rank) -> received data
    for message in expand_messages(plan):
        for i, (tensor, start, stop) in enumerate(message.boxes):
            spec = plan.tensors[tensor]
            source = None if message.source is None else message.source + i
            if message.gathered:
                source = message.gathered[i]
            if source is None:
                data = _view(spec.src_tiles, message.sender, shards[tensor][message.sender], start, stop)
            elif (source, message.sender) in staging:
                data = staging[source, message.sender]
            else:
                data = _view(spec.dst_tiles, message.sender, out[tensor][message.sender], start, stop)
            assert data is not None, f"message {message.id}: the sender does not have it; see check_plan"
            target = None
            if message.receiver in spec.dst.ranks:
                target = _view(spec.dst_tiles, message.receiver, out[tensor][message.receiver], start, stop)
            if target is None:
                staging[message.id + i, message.receiver] = data
            else:
                target[...] = data
    return out


@not_compiled
@shows_options(PlanOptions)
def reshard_local(
    shards: Mapping[Any, Any],
    src: Any,
    dst: Any,
    *,
    src_spec: Any = None,
    dst_spec: Any = None,
    shape: Any = None,
    dst_dtype: Any = None,
    base: Mapping[int, Array] | None = None,
    out: Mapping[int, Array] | None = None,
    **options: Unpack[PlanOptions],
) -> dict[Any, Any]:
    """Reshard a tensor whose shards are all in this process, or several tensors.

    For several tensors, pass ``{name: shards}``. Each tensor gets a plan. Each other argument is then one value for all
    tensors, or ``{name: value}``.

    Args:
        shards: ``{source rank: local array}``, NumPy or torch.
        src, dst: a layout or a mesh.
        src_spec, dst_spec: how the mesh shards the tensor. Default: every rank of the mesh holds the whole tensor.
        shape: the global shape. Default: computed from the shards, with a warning if they are equal, as they are if
            each rank passes the whole tensor by mistake.
        dst_dtype: dtype of the result. Default: the source's.
        base, out: with ``compression="delta"``: the source shards of an earlier version, and the destination shards
            that hold it, ``{rank: array}``. They are not changed. Unless digests find the same version in both, the
            tensor is sent in full, with a warning.
        options: ``strategy``, ``topology``, ``compression`` and ``max_error`` of :class:`~reshard.TransferOptions`.
            A tensor over ``max_error`` moves without the codec.

    Returns:
        ``{destination rank: local array}``, new arrays that require no grad. For several tensors ``{name: arrays}``.

    Raises:
        ArgumentError: a shard is missing, has the wrong shape or dtype, or cannot be cast to ``dst_dtype``; or
            ``max_error`` is given without ``compression``.
        LayoutError: a spec does not fit its mesh or ``shape``.
        DisagreementError: ``src`` is a mesh without ``src_spec``, and the shards differ.

    >>> import numpy as np
    >>> from reshard import Layout, Mesh, reshard_local
    >>> rows = Layout(Mesh.of("2"), "S0")
    >>> cols = Layout(Mesh.of("2", first_rank=2), "R S0")
    >>> whole = np.arange(16).reshape(4, 4)
    >>> reshard_local({0: whole[:2], 1: whole[2:]}, rows, cols)[3][0]
    array([2, 3])
    """
    given = read_options(PlanOptions, options, reshard_local)
    arguments = _TensorArguments(src, dst, src_spec, dst_spec, shape, dst_dtype)
    if not isinstance(shards, Mapping) or not any(isinstance(value, Mapping) for value in shards.values()):
        return _reshard_one(None, shards, arguments, given, base=base, out=out)
    if base is not None or out is not None:
        raise ArgumentError("base= and out= are for one tensor; call reshard_local for each")
    return {name: _reshard_one(str(name), arrays, arguments.of(name), given) for name, arrays in shards.items()}


class _TensorArguments(NamedTuple):
    """Arguments of :func:`reshard_local`: of one tensor, or, for several, each a value or ``{name: value}``."""

    src: Any
    dst: Any
    src_spec: Any
    dst_spec: Any
    shape: Any
    dst_dtype: Any

    def of(self, name: Any) -> _TensorArguments:
        """The arguments of one of several tensors."""
        return _TensorArguments(*(_value_of(name, *item) for item in self._asdict().items()))


def _value_of(name: Any, argument: str, value: Any) -> Any:
    """The value of an argument for one of several tensors."""
    if not isinstance(value, Mapping):
        return value
    if name not in value:
        raise ArgumentError(f"{argument} has no value for tensor {name!r}: pass one value for all, or {{name: value}}")
    return value[name]


def _reshard_one(
    name: str | None,
    shards: Any,
    arguments: _TensorArguments,
    options: TransferOptions,
    *,
    base: Mapping[int, Array] | None = None,
    out: Mapping[int, Array] | None = None,
) -> dict[int, Array]:
    """Like :func:`reshard_local`, for the tensor of this name, or the only one."""
    src, dst, src_spec, dst_spec, shape, dst_dtype = arguments
    what = "the tensor" if name is None else f"tensor {name!r}"
    topology, compression, max_error = options["topology"], options["compression"], options["max_error"]
    src_layout, dst_layout = _read_layouts(src, dst, src_spec, dst_spec)
    if not isinstance(shards, Mapping) or not shards:
        raise ArgumentError(f"{what}: pass shards as {{source rank: local array}}, not {type(shards).__name__}")
    for rank in shards:
        if rank not in src_layout.ranks:
            raise ArgumentError(f"{what}: rank {rank} has a shard, but is not in the source layout")
    shards = _read_shards(shards)
    if shape is None:
        shape = find_global_shape(what, {rank: array.shape for rank, array in shards.items()}, src_layout)
        _warn_of_copies(what, shards, shape)
    if compression is not None:
        _check_values(shards, "shards")
    dtype = dtype_on_wire = dtype_name(next(iter(shards.values())).dtype)
    if dst_dtype is not None:
        dst_dtype = dtype_name(dst_dtype)
        dtype_on_wire = _find_wire_dtype(dtype, dst_dtype, what)
    make = functools.partial(plan_tensors, strategy=options["strategy"], topology=topology)
    tensor = TensorSpec(check_shape(shape), dtype, src_layout, dst_layout)
    if not has_base(compression) and (base is not None or out is not None):
        raise ArgumentError(f"base= and out= are for compression='delta', not {brief(compression)}")
    _check_shards(tensor.src_tiles, dtype, shards, name)
    if isinstance(src, Mesh) and src_spec is None:
        _check_replicas({rank: shards[rank] for rank in src.ranks})
    if has_variable_size(compression):
        from reshard.api.arguments.option_checks import check_compression
        from reshard.api.lossless.local_buckets import check_lossless  # imports torch

        check_compression(compression, max_error, "raw")
        check_lossless(tensor, str(compression), dst_dtype)
        bases, outs = ({} if given is None else given for given in (base, out))
        return _move_lossless(tensor, str(compression), shards, bases, outs, make)
    plan = make(compress_tensors([tensor], compression, max_error, topology, make, [dtype_on_wire]))
    spec = plan.tensors[0]
    if max_error is not None:
        from reshard.api.arguments.option_checks import check_compression  # imports torch

        check_compression(compression, max_error, "raw")
        if spec.codec is not None and _encode_measured(spec, shards)[1] > max_error:
            plan = make([replace(tensor, dtype=dtype_on_wire)])
            spec = plan.tensors[0]
    ensure_checked(plan)
    sent = {rank: _cast(array, spec.plain.dtype) for rank, array in shards.items()}
    like = next(iter(sent.values()))
    if spec.codec is not None and dst_dtype is not None:  # decodes as other front ends do
        like = _cast(like[:0], decoded_dtype(dst_dtype))
    moved = _execute(plan, [sent], [like])[0]
    return moved if dst_dtype is None else {rank: _cast(array, dst_dtype) for rank, array in moved.items()}


def _find_wire_dtype(dtype: str, dst_dtype: str, what: str) -> str:
    """The dtype in which elements travel. Raises ArgumentError if the cast is refused."""
    from reshard.api.arrays.casts import check_cast, warn_of_float8, wire_dtype  # imports torch

    check_cast(dtype, dst_dtype, what)
    warn_of_float8(dtype, dst_dtype, what)
    return wire_dtype(dtype, dst_dtype)


def _read_layouts(
    src: AnyLayout | Mesh, dst: AnyLayout | Mesh, src_spec: Any, dst_spec: Any
) -> tuple[AnyLayout, AnyLayout]:
    """The layouts of both sides. Raises ArgumentError if one is neither a mesh nor a layout, or has two specs."""
    src_layout = Layout(src, src_spec) if isinstance(src, Mesh) else src
    dst_layout = Layout(dst, dst_spec) if isinstance(dst, Mesh) else dst
    for what, layout in (("src", src_layout), ("dst", dst_layout)):
        if not isinstance(layout, (Layout, RegionLayout)):
            raise ArgumentError(f"{what} must be a Mesh, a Layout or a RegionLayout, not {type(layout).__name__}")
    for what, given, spec in (("src", src, src_spec), ("dst", dst, dst_spec)):
        if spec is not None and not isinstance(given, Mesh):
            raise ArgumentError(f"{what} is a layout, which already has a spec; omit {what}_spec")
    return src_layout, dst_layout


def _move_lossless(
    tensor: TensorSpec,
    codec: str,
    shards: Mapping[int, Array],
    base: Mapping[int, Array],
    out: Mapping[int, Array],
    make: Callable[[Sequence[TensorSpec]], Plan],
) -> dict[int, Array]:
    """Reshard by a lossless codec whose output has no fixed size."""
    from reshard.api.lossless.local_buckets import LocalArrays, as_torch, move_lossless  # imports torch

    like = next(iter(shards.values()))
    for what, given, side in (("base", base, tensor.src_tiles), ("out", out, tensor.dst_tiles)):
        if not isinstance(given, Mapping):
            raise ArgumentError(f"{what} must be {{rank: array}}, not {type(given).__name__}")
        _check_values(_read_shards(given), what)
        for rank, array in given.items():
            passed = tuple(array.shape), dtype_name(array.dtype)
            needed = (side.local_shape(rank), tensor.dtype) if rank in side.layout.ranks else None
            if passed != needed:
                raise ArgumentError(
                    f"{what}: rank {rank} passes {passed}, but its layout has {needed or 'no shard'} for this rank"
                )
    targets = {
        rank: _copy_of(out[rank]) if rank in out else _new_on_cpu(like, tensor.dst_tiles.local_shape(rank))
        for rank in tensor.dst.ranks
    }
    converted = [{rank: as_torch(array) for rank, array in item.items()} for item in (shards, base, out, targets)]

    def move(specs: Sequence[TensorSpec], buckets: Sequence[Mapping[int, np.ndarray]]) -> list[dict[int, np.ndarray]]:
        return execute_local(make(specs), buckets)

    if math.prod(tensor.shape):
        move_lossless(tensor, codec, LocalArrays(*converted), move)
    return {rank: _placed_as(like, target) for rank, target in targets.items()}


def _new_on_cpu(like: Array, shape: tuple[int, ...]) -> Array:
    is_numpy = isinstance(like, np.ndarray)
    return np.empty(shape, dtype=_native(like.dtype)) if is_numpy else like.new_empty(shape, device="cpu")


def _copy_of(array: Array) -> Array:
    if isinstance(array, np.ndarray):
        return array.astype(_native(array.dtype), order="C")
    return _as_bytes(array.detach().cpu()).contiguous().clone().view(array.dtype)


def _as_bytes(array: Array) -> Array:
    """The array; as bytes if it is a tensor with elements of one byte, because torch cannot copy all such dtypes."""
    if isinstance(array, np.ndarray) or array.itemsize > 1 or array.is_neg():
        return array
    import torch

    return array.view(torch.uint8)


def _read_shards(shards: Mapping[int, Array]) -> dict[int, Array]:
    """The shards, detached from autograd, after checking that they are arrays of one library."""
    arrays, kinds = {}, {}
    for rank, array in shards.items():
        is_tensor = hasattr(array, "detach") and hasattr(array, "is_meta")
        if not is_tensor and (not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray)):
            raise ArgumentError(f"rank {rank} holds {type(array).__name__}, not a NumPy array or a torch tensor")
        if is_tensor:
            from reshard.api.arrays.tensor_checks import check_dense, find_storage_problem  # imports torch

            if hasattr(array, "device_mesh"):
                raise ArgumentError(f"rank {rank} holds a DTensor; pass its to_local(), which is the shard of one rank")
            check_dense(array, "shards", rank)
            if not array.is_meta and (problem := find_storage_problem(array)):
                raise ArgumentError(f"rank {rank} holds a {problem}")
        kinds[is_tensor] = rank
        arrays[rank] = array.detach() if is_tensor else array
    if len(kinds) > 1:
        raise ArgumentError(
            f"rank {kinds[True]} holds a torch tensor and rank {kinds[False]} a NumPy array; pass one kind"
        )
    return arrays


def _check_values(arrays: Mapping[int, Array], what: str) -> None:
    """Raise ArgumentError if a tensor has no values to encode."""
    for rank, array in arrays.items():
        if not isinstance(array, np.ndarray) and array.is_meta:
            raise ArgumentError(f"{what}: rank {rank} passes a meta tensor, which has no values for compression=")


def _cast(array: Array, dtype: str) -> Array:
    if dtype_name(array.dtype) == dtype:
        return array
    if not isinstance(array, np.ndarray):
        import torch

        return array.to(getattr(torch, dtype))
    try:
        return array.astype(dtype)
    except TypeError:
        raise ArgumentError(f"NumPy has no dtype {dtype}; pass torch tensors") from None


def _check_replicas(shards: Mapping[int, Array]) -> None:
    """Raise DisagreementError if shards that should be replicas differ in a byte."""
    if any(getattr(array, "is_meta", False) for array in shards.values()):
        return  # without values
    digests = {rank: xxhash.xxh3_64(_bytes_of(array)).intdigest() for rank, array in shards.items()}
    first = next(iter(digests))
    for rank, digest in digests.items():
        if digest != digests[first]:
            raise DisagreementError(
                f"rank {rank} holds other elements than rank {first}, but without src_spec every source rank holds the "
                "whole tensor; pass src_spec= if it is sharded"
            )


def _warn_of_copies(what: str, shards: Mapping[int, Array], shape: Sequence[int]) -> None:
    """Warn if each rank seems to pass the whole tensor in place of its shard: their values are equal, and not constant.

    Reads the corners of the shards first, which tell almost always.
    """
    local_shape = tuple(next(iter(shards.values())).shape)
    if (
        tuple(shape) == local_shape
        or 0 in local_shape
        or any(getattr(array, "is_meta", False) for array in shards.values())
    ):
        return
    for ends in (slice(CORNER), slice(-CORNER, None), slice(None)):
        digests = {
            (tuple(array.shape), xxhash.xxh3_64(_bytes_of(array[(ends,) * array.ndim])).intdigest())
            for array in shards.values()
        }
        if len(digests) > 1:
            return
    values = _bytes_of(next(iter(shards.values()))).reshape(math.prod(local_shape), -1)
    if (values != values[0]).any():
        warnings.warn(describe_equal_shards(what, list(shards), local_shape, shape), stacklevel=caller_level())


def _bytes_of(array: Array) -> Any:
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array, dtype=_native(array.dtype)).reshape(-1).view(np.uint8)
    import torch

    from reshard.runtime.array_bytes import contiguous

    array = contiguous(array.detach().resolve_conj().resolve_neg().cpu())
    return array.reshape(-1).view(torch.uint8).numpy()


def _empty_like(array: Array, shape: tuple[int, ...]) -> Array:
    if isinstance(array, np.ndarray):
        return np.empty(shape, dtype=array.dtype)
    return array.new_empty(shape)


def _check_shards(shards: Tiles, dtype: str, arrays: Mapping[int, Array], name: str | None) -> None:
    what = f"{name!r}" if name is not None else "the tensor"
    for rank in shards.layout.ranks:
        if rank not in arrays:
            raise ArgumentError(f"{what}: rank {rank} is in the source layout, but has no shard")
        if tuple(arrays[rank].shape) != shards.local_shape(rank):
            raise ArgumentError(
                f"{what}: rank {rank} holds shape {list(arrays[rank].shape)}, "
                f"but its shard is {list(shards.local_shape(rank))}"
            )
        if dtype_name(arrays[rank].dtype) != dtype:
            raise ArgumentError(f"{what}: rank {rank} holds {dtype_name(arrays[rank].dtype)}, not {dtype}")


def _view(shards: Tiles, rank: int, array: Array, start: Sequence[int], stop: Sequence[int]) -> Array | None:
    """The part of a rank's local array that holds the box, as a view; None if no single tile contains the whole box."""
    for box, local in shards.boxes_of(rank):
        if all(lo <= a and b <= hi for (lo, hi), a, b in zip(box, start, stop, strict=True)):
            at = [
                slice(offset + a - lo, offset + b - lo)
                for (lo, _), offset, a, b in zip(box, local, start, stop, strict=True)
            ]
            return array[(*at, ...)]  # the ellipsis keeps a 0-d array a view
    return None
