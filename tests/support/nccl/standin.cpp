// A stand-in for libnccl on host memory: the C API of nccl.h, over sockets between processes of one machine.
//
// It reproduces the behaviour of NCCL 2.22 and later that callers depend on: a thread connects and launches each group of
// a non-blocking communicator, which rejects calls meanwhile; two ranks connect only when both are in a group with each
// other; messages between two ranks match by order; groups must be ended; a rejected call breaks the communicator; an
// abort or a destruction waits for the kernels of all communicators of the process, and an abort like ncclCommFinalize for
// all graphs that captured this one; peers that die. There are no streams: all bytes of a group have moved when its state
// is success. With NCCL_STANDIN_HEADER defined, it compiles against the real nccl.h, so the compiler checks every
// signature.
#include "messages.h"

namespace {

thread_local int depth = 0;
thread_local ncclResult_t group_error = ncclSuccess;
thread_local ncclComm* group_comm = nullptr;
thread_local std::vector<Op> group_ops;
thread_local std::vector<Collective> group_collectives;
std::vector<ncclComm*> comms;
std::mutex comms_lock;
std::atomic<int> captured{0};  // number of graphs that captured communicators

void launch(ncclComm* comm, std::vector<Op> ops, std::vector<Collective> collectives) {
  comm->runs = true;
  ncclResult_t result = move(comm, ops);
  for (const Collective& one : collectives)
    if (result == ncclSuccess) result = collect(comm, one);
  comm->runs = false;
  comm->state = result;
}

bool any_other_runs(ncclComm* comm) {
  std::lock_guard<std::mutex> guard(comms_lock);
  for (ncclComm* other : comms)
    if (other != comm && other->runs) return true;
  return false;
}

ncclResult_t reject(ncclComm* comm, ncclResult_t result, const std::string& text) {
  comm->state = result;
  return group_error = fail(result, text);
}

ncclResult_t enqueue(ncclComm* comm) {
  if (depth == 0) return fail(ncclInvalidUsage, "not in a group");
  ncclResult_t state = static_cast<ncclResult_t>(comm->state.load());
  if (state == ncclInProgress)
    return reject(comm, ncclInvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
  if (state != ncclSuccess) return group_error = state;
  group_comm = comm;
  return ncclSuccess;
}

ncclResult_t message(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm* comm, bool is_send) {
  ncclResult_t result = enqueue(comm);
  if (result != ncclSuccess) return result;
  if (peer < 0 || peer >= comm->size || type != ncclUint8) return reject(comm, ncclInvalidArgument, "invalid rank or type");
  group_ops.push_back({static_cast<char*>(const_cast<void*>(data)), count, peer, is_send});
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = 22705;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  static const char* texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                "NCCL operation in progress"};
  return texts[result];
}

const char* ncclGetLastError(ncclComm_t) {
  std::lock_guard<std::mutex> guard(last_error_lock);
  return last_error.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  const char* parent = getenv("NCCL_STANDIN_FOLDER");
  std::snprintf(id->internal, sizeof id->internal, "%s/XXXXXX", parent ? parent : "/tmp");
  return mkdtemp(id->internal) ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config == nullptr || config->magic != 0xcafebeef) return fail(ncclInvalidArgument, "no NCCL_CONFIG_INITIALIZER");
  if (config->blocking != 0 || rank < 0 || rank >= size) return fail(ncclInvalidArgument, "invalid configuration or rank");
  ncclComm* comm = *out = new ncclComm();
  comm->rank = rank, comm->size = size, comm->folder = id.internal;
  comm->sockets.assign(size, -1), comm->waiting.assign(size, -1);
  comm->listener = socket(AF_UNIX, SOCK_STREAM, 0);
  // Peers connect as soon as the file exists, so it is created only after the socket listens.
  std::string name = address_of(comm->folder, rank).sun_path;
  sockaddr_un address = address_of(comm->folder, size + rank);
  if (bind(comm->listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(comm->listener, 64) != 0 ||
      std::rename(address.sun_path, name.c_str()) != 0) {
    delete comm;
    return fail(ncclSystemError, "cannot listen");
  }
  {
    std::lock_guard<std::mutex> guard(comms_lock);
    comms.push_back(comm);
  }
  comm->job = std::thread([comm] {
    for (int peer = 0; peer < comm->size; ++peer) {
      sockaddr_un other = address_of(comm->folder, peer);
      struct stat found;
      while (stat(other.sun_path, &found) != 0) {
        if (comm->aborted) return;
        nap();
      }
    }
    comm->state = ncclSuccess;
  });
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  if (comm->state == ncclSuccess)
    for (size_t peer = 0; peer < comm->sockets.size(); ++peer) {
      char byte;
      if (comm->sockets[peer] >= 0 && recv(comm->sockets[peer], &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
        comm->state = fail(ncclRemoteError, "rank " + std::to_string(peer) + " closed its connection");
    }
  *result = static_cast<ncclResult_t>(comm->state.load());
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
  return message(data, count, type, peer, comm, true);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
  return message(data, count, type, peer, comm, false);
}

ncclResult_t ncclAllReduce(const void* from, void* into, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t) {
  ncclResult_t result = enqueue(comm);
  if (result != ncclSuccess) return result;
  if (from != into) return reject(comm, ncclInvalidArgument, "only in place");
  group_collectives.push_back({static_cast<char*>(into), count, type, op, 0});
  return ncclSuccess;
}

ncclResult_t ncclBroadcast(const void* from, void* into, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t) {
  ncclResult_t result = enqueue(comm);
  if (result != ncclSuccess) return result;
  if (from != into) return reject(comm, ncclInvalidArgument, "only in place");
  group_collectives.push_back({static_cast<char*>(into), count, type, -1, root});
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--depth > 0) return ncclSuccess;
  ncclComm* comm = group_comm;
  std::vector<Op> ops = std::move(group_ops);
  std::vector<Collective> collectives = std::move(group_collectives);
  ncclResult_t error = group_error;
  group_ops.clear(), group_collectives.clear(), group_comm = nullptr, group_error = ncclSuccess;
  if (error != ncclSuccess) return error;
  if (comm == nullptr) return ncclSuccess;
  std::vector<int> unconnected;
  for (int peer = 0; peer < comm->size; ++peer) {
    bool used = false;
    for (const Op& op : ops) used |= op.peer == peer;
    for (const Collective& one : collectives) {
      int root = one.op < 0 ? one.root : 0;
      used |= comm->rank == root || peer == root;
    }
    if (used && peer != comm->rank && comm->sockets[peer] < 0) unconnected.push_back(peer);
  }
  if (comm->job.joinable()) comm->job.join();
  comm->state = ncclInProgress;
  comm->job = std::thread([comm, unconnected, ops = std::move(ops), collectives = std::move(collectives)]() mutable {
    for (int peer : unconnected)
      if (!connect_pair(comm, peer)) {
        comm->state = fail(ncclRemoteError, "cannot connect to rank " + std::to_string(peer));
        return;
      }
    launch(comm, std::move(ops), std::move(collectives));
  });
  return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm->state == ncclInProgress)
    return fail(ncclInvalidArgument, "the previous operation has not returned ncclSuccess");
  if (comm->state != ncclSuccess) return static_cast<ncclResult_t>(comm->state.load());
  if (comm->job.joinable()) comm->job.join();
  comm->state = ncclInProgress;
  comm->job = std::thread([comm] {
    while (captured > 0) nap();  // even if the communicator is aborted
    uint64_t end = UINT64_MAX;  // so that the peers do not take it for a death
    for (int fd : comm->sockets)
      if (fd >= 0) send(fd, &end, sizeof end, MSG_NOSIGNAL | MSG_DONTWAIT);
    comm->state = ncclSuccess;
  });
  return ncclInProgress;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  for (int fd : comm->sockets)
    if (fd >= 0) shutdown(fd, SHUT_RDWR);
  if (comm->job.joinable()) comm->job.join();
  while (captured > 0 || any_other_runs(comm)) nap();
  return ncclSuccess;  // another thread may still be inside a call, so the memory is not freed
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  while (any_other_runs(comm)) nap();
  {
    std::lock_guard<std::mutex> guard(comms_lock);
    comms.erase(std::remove(comms.begin(), comms.end(), comm), comms.end());
  }
  delete comm;
  return ncclSuccess;
}

// Not part of NCCL: pretend that this many graphs captured communicators.
void standin_set_captured(int number) { captured = number; }

// Not part of NCCL: the number of ranks to which a communicator is connected.
int standin_count_connected(ncclComm_t comm) {
  return std::count_if(comm->sockets.begin(), comm->sockets.end(), [](int fd) { return fd >= 0; });
}

}  // extern "C"
