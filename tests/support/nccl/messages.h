// The connections and messages of the stand-in for libnccl: types, sockets between pairs of ranks, matching by order.
#pragma once

#include <climits>
#include <cstddef>

#ifdef NCCL_STANDIN_HEADER
#include "nccl.h"
#else
extern "C" {
typedef struct ncclComm* ncclComm_t;
typedef struct CUstream_st* cudaStream_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef enum { ncclSuccess = 0, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument,
               ncclInvalidUsage, ncclRemoteError, ncclInProgress } ncclResult_t;
typedef enum { ncclSum = 0, ncclProd, ncclMax, ncclMin, ncclAvg } ncclRedOp_t;
typedef enum { ncclInt8 = 0, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32,
               ncclFloat64, ncclBfloat16 } ncclDataType_t;
typedef struct { size_t size; unsigned int magic; unsigned int version; int blocking; int cgaClusterSize; int minCTAs;
                 int maxCTAs; const char* netName; } ncclConfig_t;
}
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

namespace {

struct Op {
  char* data;
  size_t nbytes;
  int peer;
  bool is_send;
  size_t done = 0;  // bytes moved so far of the size header and the data
  uint64_t size = 0;
};

struct Collective {
  char* data;
  size_t count;
  int type, op, root;  // op -1 is a broadcast
};

}  // namespace

struct ncclComm {
  int rank, size;
  std::string folder;
  int listener = -1;
  std::vector<int> sockets, waiting;  // by peer; waiting: connected, but not accepted yet
  std::atomic<int> state{ncclInProgress};
  std::atomic<bool> aborted{false};
  std::atomic<bool> runs{false};  // a kernel
  std::thread job;

  ~ncclComm() {
    if (job.joinable()) job.join();
    for (int fd : sockets)
      if (fd >= 0) close(fd);
    for (int fd : waiting)
      if (fd >= 0) close(fd);
    if (listener >= 0) close(listener);
  }
};

namespace {

std::string last_error;
std::mutex last_error_lock;

ncclResult_t fail(ncclResult_t result, const std::string& text) {
  std::lock_guard<std::mutex> guard(last_error_lock);
  last_error = text;
  return result;
}

sockaddr_un address_of(const std::string& folder, int rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "%s/%d", folder.c_str(), rank);
  return address;
}

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

bool take_waiting(ncclComm* comm) {
  pollfd one{comm->listener, POLLIN, 0};
  if (poll(&one, 1, 10) <= 0) return false;
  int fd = accept(comm->listener, nullptr, nullptr);
  int peer = -1;
  if (fd < 0 || recv(fd, &peer, sizeof peer, MSG_WAITALL) != sizeof peer) return false;
  comm->waiting[peer] = fd;
  return true;
}

// The higher rank connects. The lower rank accepts only when it is in a group with the higher one.
bool connect_pair(ncclComm* comm, int peer) {
  if (comm->rank < peer) {
    while (comm->waiting[peer] < 0) {
      if (comm->aborted) return false;
      take_waiting(comm);
    }
    comm->sockets[peer] = comm->waiting[peer];
    comm->waiting[peer] = -1;
    char answer = 1;
    return send(comm->sockets[peer], &answer, 1, MSG_NOSIGNAL) == 1;
  }
  sockaddr_un address = address_of(comm->folder, peer);
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    close(fd);
    return false;
  }
  send(fd, &comm->rank, sizeof comm->rank, MSG_NOSIGNAL);
  pollfd one{fd, POLLIN, 0};
  char answer = 0;
  while (poll(&one, 1, 10) == 0)
    if (comm->aborted) {
      close(fd);
      return false;
    }
  comm->sockets[peer] = fd;
  return recv(fd, &answer, 1, 0) == 1;
}

// Progresses one operation; returns -1 if the connection has closed.
int advance(ncclComm* comm, Op& op) {
  int fd = comm->sockets[op.peer];
  size_t header = sizeof op.size;
  char* at = op.done < header ? reinterpret_cast<char*>(&op.size) + op.done : op.data + (op.done - header);
  size_t left = op.done < header ? header - op.done : op.nbytes - (op.done - header);
  ssize_t moved = op.is_send ? send(fd, at, left, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(fd, at, left, MSG_DONTWAIT);
  if (moved < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
  if (moved == 0 && left > 0) return -1;
  op.done += moved;
  return 1;
}

ncclResult_t move(ncclComm* comm, std::vector<Op>& ops) {
  std::map<std::pair<int, bool>, std::deque<Op*>> queues;  // messages between two ranks match by order
  for (Op& op : ops) {
    op.size = op.is_send ? op.nbytes : 0;
    queues[{op.peer, op.is_send}].push_back(&op);
  }
  while (!queues.empty()) {
    if (comm->aborted) return ncclRemoteError;
    bool moved = false;
    for (auto it = queues.begin(); it != queues.end();) {
      Op* op = it->second.front();
      int result = advance(comm, *op);
      if (result < 0) return fail(ncclRemoteError, "rank " + std::to_string(op->peer) + " closed its connection");
      moved |= result > 0;
      if (!op->is_send && op->done >= sizeof op->size && op->size != op->nbytes)
        return fail(ncclInvalidUsage, "a message has another size than its receive");
      if (op->done == sizeof op->size + op->nbytes) it->second.pop_front();
      it = it->second.empty() ? queues.erase(it) : std::next(it);
    }
    if (!moved) nap();
  }
  return ncclSuccess;
}

template <typename T>
void reduce(char* into, const char* from, size_t count, int op) {
  T* a = reinterpret_cast<T*>(into);
  const T* b = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) a[i] = op == ncclSum ? a[i] + b[i] : op == ncclMax ? (a[i] < b[i] ? b[i] : a[i]) : a[i];
}

ncclResult_t collect(ncclComm* comm, const Collective& one) {
  size_t itemsize = one.type == ncclFloat64 || one.type == ncclInt64 ? 8 : one.type == ncclFloat32 ? 4 : 1;
  size_t nbytes = one.count * itemsize;
  int root = one.op < 0 ? one.root : 0;
  std::vector<Op> gather, spread;
  std::vector<std::vector<char>> parts(comm->size);
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank || (comm->rank != root && peer != root)) continue;
    parts[peer].resize(nbytes);
    if (comm->rank == root) {
      gather.push_back({parts[peer].data(), nbytes, peer, false});
      spread.push_back({one.data, nbytes, peer, true});
    } else {
      gather.push_back({one.data, nbytes, peer, true});
      spread.push_back({one.data, nbytes, peer, false});
    }
  }
  if (one.op >= 0) {
    ncclResult_t result = move(comm, gather);
    if (result != ncclSuccess) return result;
    for (const Op& op : gather)
      if (!op.is_send) {
        if (one.type == ncclFloat64) reduce<double>(one.data, op.data, one.count, one.op);
        else if (one.type == ncclFloat32) reduce<float>(one.data, op.data, one.count, one.op);
        else if (one.type == ncclInt64) reduce<int64_t>(one.data, op.data, one.count, one.op);
        else return fail(ncclInvalidArgument, "this type is not added here");
      }
  }
  return move(comm, spread);
}

}  // namespace
