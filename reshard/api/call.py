"""``reshard`` and ``reshard_async``. A call takes four steps, each of which takes the value of the step before.

:func:`~reshard.api.arguments.inputs.read_inputs` reads the arguments of this rank. In
:func:`~reshard.api.preparation.agreement.agree` the ranks agree on them, and in
:func:`~reshard.api.preparation.prepare.prepare` on a plan. One of three functions starts the transfer:
:func:`~reshard.api.transfers.start.start_plain`, :func:`~reshard.api.transfers.start.start_recovery` if ranks are lost,
and :func:`~reshard.api.lossless.lossless_call.start_lossless` for codecs without loss.
"""

from __future__ import annotations

import functools
from typing import Any, Unpack

from reshard.api.arguments.inputs import find_members, leave_call_of_arguments, read_inputs
from reshard.api.arguments.options import TransferOptions, is_fault_tolerant, read_options, shows_options
from reshard.api.arrays.memory_in_use import reserve_until_waited
from reshard.api.lossless.lossless_call import PreparedBuckets, prepare_buckets, sends_buckets, start_lossless
from reshard.api.preparation.agreement import agree
from reshard.api.preparation.prepare import Prepared, prepare
from reshard.api.transfers.handle import Handle
from reshard.api.transfers.start import start_plain, start_recovery
from reshard.coordination import (
    calling,
    count_call,
    find_group,
    known_groups,
    leave_call,
    publish_exceptions,
    publish_interruption,
)
from reshard.errors import ReshardError
from reshard.public_api import not_compiled


@publish_exceptions(leave_call_of_arguments)
@not_compiled
@shows_options(TransferOptions)
def reshard(
    tensor: Any = None,
    src_mesh: Any = None,
    dst_mesh: Any = None,
    *,
    src_spec: Any = None,
    dst_spec: Any = None,
    shape: Any = None,
    dtype: Any = None,
    dst_dtype: Any = None,
    group: Any = None,
    out: Any = None,
    base: Any = None,
    **options: Unpack[TransferOptions],
) -> Any:
    """Move a sharded tensor from one mesh and layout to another.

    All ranks of the source and the destination must call it, and no other rank. The source is not changed. Autograd
    is not recorded: the result requires no grad.

    CUDA tensors move over NCCL. With ``verify``, ``on_loss``, ``max_error``, or a ``compression`` that only the CPU
    encodes, they are copied to host memory and move over Gloo.

    To move several tensors in one plan, pass ``{name: shard}`` as ``tensor``, with the same names on every rank and
    None where a rank has no shard. Meshes, specs and ``dst_dtype`` are then one value for all, or ``{name: value}``.

    Args:
        tensor: this rank's source shard, a torch tensor with any strides; None outside the source. A DTensor
            supplies its own mesh, spec, shape and dtype.
        src_mesh, dst_mesh: a :class:`~reshard.Mesh`, a torch ``DeviceMesh``, a ``jax.sharding.Mesh``, or a
            :class:`~reshard.Layout` or :class:`~reshard.RegionLayout`, which includes the spec.
        src_spec, dst_spec: how the mesh shards the tensor, in any notation of :class:`~reshard.Layout`. Default:
            every rank of the mesh holds the whole tensor.
        shape, dtype: global shape and dtype. Default: derived from the source shards, whose sizes add up to the
            global shape. If source shards on CPUs then seem equal, each may be the whole tensor by mistake: their ranks
            warn.
        dst_dtype: dtype of the result, cast as by ``Tensor.to``: floating point to floating point of any width, or a
            type promotion. Default: the source's. The narrower dtype is on the wire. A cast to float8 has no scale, and
            warns.
        group: the process group (default: the world) or the result of :func:`~reshard.join` that the ranks of the
            meshes refer to. Ranks of a DeviceMesh are world ranks and are translated.
        out: where to write this rank's destination shard; must not share storage with the source.
        base: with ``compression="delta"``: this rank's source shard of an earlier version of the tensor, which ``out``
            of the destination ranks must still hold. Digests compare the versions of all ranks. Unless they are equal,
            the tensor is sent in full, with a warning if a rank passes a base. ``out`` changes only after all ranks
            have received their data: after an error every ``out`` holds the earlier version. Every rank must call
            ``wait`` of the handle, whose ``report`` says what was sent. See
            :mod:`reshard.api.lossless.lossless_transfer`.
        options: see :class:`~reshard.TransferOptions`.

    Returns:
        This rank's destination shard, None outside the destination. The result is a DTensor if the source is a DTensor
        and ``dst_mesh`` a DeviceMesh. For several tensors ``{name: shard}``.

    Raises:
        ReshardError: an error of :mod:`reshard.errors`, the same on every calling rank. If an argument is wrong or
            ranks disagree, no data has moved.
        RankLostError: with ``on_loss="offer"``, ranks were lost; with ``"recover"``, regions that surviving ranks need
            were lost with them.
    """
    return reshard_async(
        tensor,
        src_mesh,
        dst_mesh,
        src_spec=src_spec,
        dst_spec=dst_spec,
        shape=shape,
        dtype=dtype,
        dst_dtype=dst_dtype,
        group=group,
        out=out,
        base=base,
        **read_options(TransferOptions, options, reshard),
    ).wait()


@publish_exceptions(leave_call_of_arguments)
@not_compiled
@shows_options(TransferOptions)
def reshard_async(
    tensor: Any = None,
    src_mesh: Any = None,
    dst_mesh: Any = None,
    *,
    src_spec: Any = None,
    dst_spec: Any = None,
    shape: Any = None,
    dtype: Any = None,
    dst_dtype: Any = None,
    group: Any = None,
    out: Any = None,
    base: Any = None,
    **options: Unpack[TransferOptions],
) -> Handle:
    """Like :func:`reshard`, but return as soon as the ranks have agreed and the transfer has started.

    Returns:
        A handle; ``handle.wait(timeout_seconds=...)`` returns the result of :func:`reshard`. The transfer progresses
        without a call to ``wait``, but tensors are encoded before this function returns, and decoded or cast in
        ``wait``. Neither the source, nor ``base`` and ``out``, may change until ``wait`` has returned.
    """
    all_options = read_options(TransferOptions, options, reshard_async)
    try:
        member_group = find_group(group)
    except ReshardError as error:
        for known in known_groups(group):  # their other ranks may wait for this one
            leave_call(known, error, functools.partial(find_members, tensor, src_mesh, dst_mesh, known))
        raise
    given = {
        "tensor": tensor, "base": base, "src_mesh": src_mesh, "dst_mesh": dst_mesh, "src_spec": src_spec,
        "dst_spec": dst_spec, "shape": shape, "dtype": dtype, "dst_dtype": dst_dtype, "out": out,
    }  # fmt: skip
    with (
        publish_interruption(member_group, lambda: find_members(tensor, src_mesh, dst_mesh, member_group)),
        calling(member_group),
    ):
        inputs = read_inputs(member_group, given, all_options)
        prepared: Prepared | PreparedBuckets
        with count_call(member_group, inputs.members, is_fault_tolerant(all_options)) as purpose:
            agreement = agree(inputs, purpose)
            prepared = prepare_buckets(agreement) if sends_buckets(agreement) else prepare(agreement)
        handle = _start(prepared)
        reserve_until_waited(handle, (), [item.device_out for item in agreement.inputs.items])
        return handle


def _start(prepared: Prepared | PreparedBuckets) -> Handle:
    if isinstance(prepared, PreparedBuckets):
        return start_lossless(prepared)
    return start_recovery(prepared) if prepared.lost else start_plain(prepared)
