// The base classes of native transports: C functions that call virtual ones, and common helpers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "hidet_dist/collectives.h"

namespace hidet_dist {

using Clock = std::chrono::steady_clock;

// Converts seconds of the C interface to a duration of at least 0, short enough that adding it to the clock cannot
// overflow.
std::chrono::nanoseconds from_seconds(double seconds);

// A duration as text, for errors.
std::string in_seconds(std::chrono::nanoseconds time);

// Whether the calling thread's communicator has failed.
bool failed_meanwhile();

// The kinds of collectives of a group, in the order of hidet_dist_collective, with whether they reduce: first those that
// every transport has, then those of rows, for which its exchange of parts of any size is enough. The other forms that
// every transport has follow. Tables of functions and names follow from these lists.
#define HIDET_DIST_KINDS(each)                                                                      \
  each(all_reduce, true) each(all_gather, false) each(reduce_scatter, true) each(all_to_all, false) \
      each(broadcast, false)
#define HIDET_DIST_KINDS_OF_ROWS(each) each(gather_rows, false) each(reduce_scatter_rows, true)
#define HIDET_DIST_FORMS(each) each(all_gather_parts) each(reduce_scatter_parts) each(all_to_all_v)

// The implementation of collectives for one rank. Each function gets checked arguments and returns a hidet_dist_status;
// see hidet_dist_transport, whose functions they are. A new kind of collective is an entry above, a pure virtual
// function here, and a function in each class that is derived from this one.
class Transport {
 public:
  explicit Transport(std::chrono::nanoseconds timeout) : timeout_(timeout) {}
  Transport(const Transport &) = delete;
  Transport &operator=(const Transport &) = delete;
  virtual ~Transport() = default;

  virtual int32_t all_reduce(const void *send, void *recv, int64_t count, int32_t dtype, int32_t reduce_op,
                             int32_t group) = 0;
  virtual int32_t all_gather(const void *send, void *recv, int64_t send_count, int32_t dtype, int32_t group) = 0;
  virtual int32_t reduce_scatter(const void *send, void *recv, int64_t recv_count, int32_t dtype, int32_t reduce_op,
                                 int32_t group) = 0;
  virtual int32_t all_to_all(const void *send, void *recv, int64_t count, int32_t dtype, int32_t group) = 0;
  virtual int32_t broadcast(const void *send, void *recv, int64_t count, int32_t dtype, int32_t root,
                            int32_t group) = 0;
  virtual int32_t send_recv(const void *send, int64_t send_count, int32_t to_rank, void *recv, int64_t recv_count,
                            int32_t from_rank, int32_t dtype) = 0;
  virtual int32_t all_gather_parts(const void *send, void *recv, const int64_t *joined, int64_t unit, int32_t dtype,
                                   int32_t group) = 0;
  virtual int32_t reduce_scatter_parts(const void *send, void *recv, const int64_t *split, int64_t unit, int32_t dtype,
                                       int32_t reduce_op, int32_t group) = 0;
  virtual int32_t all_to_all_v(const void *send, void *recv, const int64_t *counts, int64_t unit, int32_t dtype,
                               int32_t group) = 0;

  // The table to make a communicator with, whose context is this object.
  virtual hidet_dist_transport table();

  // Whether a collective failed because of another rank. From any thread.
  bool failed_by_peer() const { return failed_by_peer_.load(); }

 protected:
  void blame_peer() { failed_by_peer_.store(true); }

  // How long to wait for another rank.
  const std::chrono::nanoseconds timeout_;

 private:
  std::atomic<bool> failed_by_peer_{false};
};

// A transport for buffers in host memory, which accesses blocks that lie side by side, and wanted rows, in place.
class HostTransport : public Transport {
 public:
  using Transport::Transport;

  virtual int32_t all_gather_blocks(const void *send, void *recv, const hidet_dist_blocks *received, int32_t dtype,
                                    int32_t group) = 0;
  virtual int32_t reduce_scatter_blocks(const void *send, void *recv, const hidet_dist_blocks *sent, int32_t dtype,
                                        int32_t reduce_op, int32_t group) = 0;
  virtual int32_t all_to_all_blocks(const void *send, const hidet_dist_blocks *sent, void *recv,
                                    const hidet_dist_blocks *received, int32_t dtype, int32_t group) = 0;
  virtual int32_t gather_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows, int64_t row,
                              int32_t dtype, int32_t group) = 0;
  virtual int32_t reduce_scatter_rows(const void *send, const uint8_t *wanted, void *recv, int64_t rows, int64_t row,
                                      int32_t dtype, int32_t group) = 0;

  hidet_dist_transport table() override;
};

// A transport for buffers on a device, which also implements copies within the rank, and to the host.
class DeviceTransport : public Transport {
 public:
  using Transport::Transport;

  virtual int32_t copy(const void *send, void *recv, int64_t bytes) = 0;
  virtual int32_t read(const void *source, void *target, int64_t bytes) = 0;

  hidet_dist_transport table() override;
};

}  // namespace hidet_dist
