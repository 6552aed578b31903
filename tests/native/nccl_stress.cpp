// Ranks as threads of one process, for sanitizers, with the stand-ins for NCCL and the CUDA driver: every rank makes its
// communicators, does the same random collectives over the groups of a 2 x 2 mesh and checks every element. Then one
// rank does not come any more, and the others abort.
//
// Arguments: the paths of the stand-ins for NCCL and the driver.
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hidet_dist/collectives.h"
#include "hidet_dist/nccl.h"

extern "C" int cuStreamCreate(void **stream, unsigned int flags);
extern "C" int cuStreamQuery(void *stream);

namespace {

constexpr int kRanks = 4;
constexpr int kRounds = 40;
constexpr int kWhole = 3;

std::mutex id_mutex;
std::condition_variable id_made;
std::string unique_id;

thread_local int own_rank = 0;
thread_local void *own_stream = nullptr;
thread_local hidet_dist_nccl *own_transport = nullptr;

void require(bool condition, const char *what) {
  if (condition) return;
  std::fprintf(stderr, "rank %d: %s: %s\n", own_rank, what, hidet_dist_last_error());
  std::abort();
}

void *stream() { return own_stream; }

void await_made() {
  int32_t status = 0;
  while ((status = hidet_dist_nccl_progress(own_transport)) == HIDET_DIST_NCCL_IN_PROGRESS) std::this_thread::yield();
  require(status == HIDET_DIST_OK, "progress");
}

int32_t connect_group(int32_t group) {
  require(hidet_dist_nccl_begin(own_transport, group, nullptr) == HIDET_DIST_OK, "begin");
  await_made();
  return HIDET_DIST_OK;
}

void make_whole() {
  {
    std::unique_lock<std::mutex> lock(id_mutex);
    if (own_rank == 0) {
      std::array<char, HIDET_DIST_NCCL_ID_BYTES> id;
      require(hidet_dist_nccl_unique_id(id.data()) == HIDET_DIST_OK, "unique_id");
      unique_id.assign(id.data(), id.size());
      id_made.notify_all();
    }
    id_made.wait(lock, [] { return !unique_id.empty(); });
  }
  require(hidet_dist_nccl_begin(own_transport, kWhole, unique_id.data()) == HIDET_DIST_OK, "begin");
  await_made();
}

void wait() {
  int32_t status = 0;
  while ((status = hidet_dist_nccl_wait(own_transport, own_stream, 0.01)) == HIDET_DIST_NCCL_IN_PROGRESS) {
  }
  require(status == HIDET_DIST_OK, "wait");
}

int32_t settle() {
  wait();
  return HIDET_DIST_OK;
}

void run_rank(int rank) {
  own_rank = rank;
  require(cuStreamCreate(&own_stream, 1) == 0, "stream");
  const int64_t shape[] = {2, 2};
  own_transport = hidet_dist_nccl_create(shape, 2, rank, rank, stream, connect_group, settle, 2.0);
  require(own_transport != nullptr, "create");
  hidet_dist_transport table;
  hidet_dist_nccl_table(own_transport, &table);
  hidet_dist_communicator *communicator = hidet_dist_communicator_create(&table, shape, 2, rank);
  require(communicator != nullptr, "create");
  hidet_dist_bind(communicator);
  make_whole();
  require(hidet_dist_nccl_warm_up(own_transport, kWhole) == HIDET_DIST_OK, "warm_up");
  std::mt19937 random(7);  // the same on every rank
  std::vector<float> send(4, static_cast<float>(rank));
  std::vector<float> recv(4);
  for (int round = 0; round < kRounds; ++round) {
    const int32_t group = 1 + static_cast<int32_t>(random() % 3);
    const int32_t size = hidet_dist_group_size(group);
    const int32_t group_rank = hidet_dist_group_rank(group);
    const int first = group == kWhole ? 0 : group == 1 ? rank % 2 : rank / 2 * 2;
    const int stride = group == 1 ? 2 : 1;
    const auto of = [&](int32_t other) { return static_cast<float>(first + other * stride); };
    require(hidet_dist_all_reduce(send.data(), recv.data(), 4, HIDET_DIST_F32, HIDET_DIST_MAX, group) == 0, "all_reduce");
    wait();
    require(recv[3] == of(size - 1), "all_reduce's result");
    require(hidet_dist_all_to_all(send.data(), recv.data(), 1, HIDET_DIST_F32, group) == 0, "all_to_all");
    wait();
    for (int32_t other = 0; other < size; ++other) require(recv[static_cast<size_t>(other)] == of(other), "all_to_all's result");
    // Group rank p has 1 + p elements of the gathered ones, and of the scattered ones.
    std::vector<int64_t> sizes;
    for (int32_t p = 0; p < size; ++p) sizes.push_back(1 + p);
    std::vector<float> whole(static_cast<size_t>(size * (size + 1) / 2)), part(static_cast<size_t>(size));
    std::vector<float> sent(whole.size(), static_cast<float>(rank));
    require(hidet_dist_all_gather_parts(sent.data(), whole.data(), sizes.data(), 1, HIDET_DIST_F32, group) == 0,
            "all_gather_parts");
    wait();
    require(whole.front() == of(0) && whole.back() == of(size - 1), "all_gather_parts's result");
    require(hidet_dist_reduce_scatter_parts(sent.data(), part.data(), sizes.data(), 1, HIDET_DIST_F32, HIDET_DIST_MAX,
                                            group) == 0,
            "reduce_scatter_parts");
    wait();
    require(part[0] == of(size - 1), "reduce_scatter_parts's result");
    // Of the two rows of each rank, all want the first.
    std::vector<uint8_t> wanted(static_cast<size_t>(2 * size * size));
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = i % 2 == 0 ? 1 : 0;
    std::vector<float> packed(static_cast<size_t>(size - 1), static_cast<float>(rank)), received(packed.size());
    require(hidet_dist_gather_packed_rows(packed.data(), wanted.data(), received.data(), 2, 1, HIDET_DIST_F32, group) == 0,
            "gather_packed_rows");
    wait();
    require(received.back() == of(group_rank == size - 1 ? size - 2 : size - 1), "gather_packed_rows's result");
    const int32_t from = (group_rank + size - 1) % size;
    require(hidet_dist_send_recv(send.data(), 4, (group_rank + 1) % size, recv.data(), 4, from, HIDET_DIST_F32, group) == 0,
            "send_recv");
    wait();
    require(recv[2] == of(from), "send_recv's result");
  }
  if (rank != kRanks - 1) {
    require(hidet_dist_all_reduce(send.data(), recv.data(), 4, HIDET_DIST_F32, HIDET_DIST_SUM, kWhole) == 0, "all_reduce");
    int32_t status = 0;
    while ((status = hidet_dist_nccl_wait(own_transport, own_stream, 0.1)) == HIDET_DIST_NCCL_IN_PROGRESS) {
      // As the heartbeat's thread would.
      if (rank == 0) std::thread([communicator] { hidet_dist_fail(communicator, "a rank is gone"); }).join();
    }
    require(status == HIDET_DIST_FAILED, "the wait for a rank that does not come");
    require(hidet_dist_nccl_failed_by_peer(own_transport) == (rank == 0 ? 0 : 1), "failed_by_peer");
    require(hidet_dist_all_reduce(send.data(), recv.data(), 4, HIDET_DIST_F32, HIDET_DIST_SUM, kWhole) ==
                HIDET_DIST_FAILED,
            "a collective after a failure");
    while (cuStreamQuery(own_stream) != 0) std::this_thread::yield();  // it reads the buffers until it is aborted
  }
  hidet_dist_nccl_close(own_transport);
  hidet_dist_communicator_destroy(communicator);
  hidet_dist_nccl_destroy(own_transport);
}

}  // namespace

int main(int, char **arguments) {
  require(hidet_dist_nccl_load(arguments[1], arguments[2]) == 23203, "load");
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back(run_rank, rank);
  for (std::thread &rank : ranks) rank.join();
  std::puts("passed");
  std::fflush(stdout);
  std::_Exit(0);  // the threads of the stand-ins' streams go on for ever
}
