"""Limits on the sizes of chunks and regions, and on the messages that are in flight at once, of all strategies."""

#: Chunk size of transfers with one hop, and of transfers inside a host. A large limit means few messages.
#: But a transfer still has several chunks, so that packing one overlaps with sending another.
UNPACKED_CHUNK_BYTES = 8 * 2**20
#: Chunk size of regions that must be packed. Four such chunks fit the share of a send queue, a quarter of the default
#: staging of 64 MiB. So the window, not the staging, limits the messages in flight.
PACKED_CHUNK_BYTES = 4 * 2**20
#: Largest chunk that is forwarded from host to host. It is small, so that the pipeline fills fast.
TREE_CHUNK_BYTES = 2**20
#: Regions smaller than this share messages if they follow the same tree.
SMALL_REGION_BYTES = 2**16
#: Messages of a transfer with one hop between hosts in flight per sender and receiver.
DIRECT_WINDOW = 4
#: Messages of a schedule between hosts in flight per sender and receiver.
WINDOW = 8
#: Like ``WINDOW``, inside hosts. Concurrent sends of a rank share its links. With more concurrent sends, all of them
#: arrive later.
INSIDE_WINDOW = 4
#: Like ``WINDOW``, for transfers that hosts forward.
TREE_WINDOW = 2
#: The smallest ``staging_bytes`` of a plan.
MIN_STAGING_BYTES = 2**16
#: Packed and staged chunks are at most ``staging_bytes / STAGING_PARTS``. A rank can then stage two sends of a queue,
#: which may use a quarter of the staging, and four receives, which may use half.
STAGING_PARTS = 8
#: Largest size of a chunk of ``multicast`` that needs no packing. On fast links, latencies would dominate the time of
#: smaller chunks.
MAX_MULTICAST_CHUNK_BYTES = 32 * 2**20
#: Smallest chunk of ``multicast`` if the topology gives no latency.
MIN_MULTICAST_CHUNK_BYTES = 2**14
