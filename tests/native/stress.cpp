// Ranks as threads of one process, which collectives over shared memory and their sanitizers treat like processes:
// every rank does the same random collectives over the groups of a 2 x 2 mesh and checks every element.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "hidet_dist/collectives.h"
#include "hidet_dist/shared_memory.h"

namespace {

constexpr int kRanks = 4;
constexpr int kRounds = 150;

std::mutex segments_mutex;
std::map<std::vector<int>, int> segments;
std::array<int, kRanks> inboxes{-1, -1, -1, -1};
std::condition_variable inbox_made;

thread_local hidet_dist_shm *own_transport = nullptr;
thread_local int own_rank = 0;

// Axis 0 has stride 2, axis 1 has stride 1.
std::vector<int> members(int rank, int group) {
  std::vector<int> ranks;
  for (int other = 0; other < kRanks; ++other) {
    const bool row = (group & 1) || other / 2 == rank / 2;
    const bool column = (group & 2) || other % 2 == rank % 2;
    if (row && column) ranks.push_back(other);
  }
  return ranks;
}

int group_rank_of(const std::vector<int> &ranks, int rank) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank) return static_cast<int>(i);
  }
  std::abort();
}

int32_t connect_group(int32_t group) {
  const std::vector<int> ranks = members(own_rank, group);
  const std::lock_guard<std::mutex> lock(segments_mutex);
  auto found = segments.find(ranks);
  if (found == segments.end()) {
    found = segments.emplace(ranks, hidet_dist_shm_segment(static_cast<int32_t>(ranks.size()))).first;
  }
  return hidet_dist_shm_attach(own_transport, group, found->second, group_rank_of(ranks, own_rank),
                               static_cast<int32_t>(ranks.size()));
}

int32_t connect_peer(int32_t peer) {
  std::unique_lock<std::mutex> lock(segments_mutex);
  inboxes[static_cast<size_t>(own_rank)] = hidet_dist_shm_inbox(own_transport);
  inbox_made.notify_all();
  inbox_made.wait(lock, [&] { return inboxes[static_cast<size_t>(peer)] >= 0; });
  return hidet_dist_shm_attach_peer(own_transport, peer, inboxes[static_cast<size_t>(peer)]);
}

void require(bool condition, const char *what) {
  if (condition) return;
  std::fprintf(stderr, "rank %d: %s: %s\n", own_rank, what, hidet_dist_last_error());
  std::abort();
}

float value(int rank, int64_t i, int round) { return static_cast<float>((rank * 31 + i * 7 + round) % 64); }

void run_rank(int rank) {
  own_rank = rank;
  hidet_dist_transport none{};
  own_transport = hidet_dist_shm_create(&none, connect_group, connect_peer, rank, kRanks, 60.0);
  hidet_dist_transport table;
  hidet_dist_shm_table(own_transport, &table);
  const int64_t shape[] = {2, 2};
  hidet_dist_communicator *communicator = hidet_dist_communicator_create(&table, shape, 2, rank);
  require(communicator != nullptr, "create");
  hidet_dist_bind(communicator);
  std::mt19937 random(7);  // the same on every rank
  for (int round = 0; round < kRounds; ++round) {
    const int group = 1 + static_cast<int>(random() % 3);
    const int64_t count = round % 10 ? 1 + static_cast<int64_t>(random() % 5000) : 70000 + round;
    const std::vector<int> ranks = members(rank, group);
    const auto size = static_cast<int64_t>(ranks.size());
    const int group_rank = group_rank_of(ranks, rank);
    std::vector<float> send(static_cast<size_t>(count * size));
    for (int64_t i = 0; i < count * size; ++i) send[static_cast<size_t>(i)] = value(rank, i, round);
    const auto total = [&](int64_t i) {
      float sum = 0;
      for (const int other : ranks) sum += value(other, i, round);
      return sum;
    };
    std::vector<float> recv(static_cast<size_t>(count * size));
    require(hidet_dist_all_reduce(send.data(), recv.data(), count * size, HIDET_DIST_F32, HIDET_DIST_SUM, group) == 0,
            "all_reduce");
    for (int64_t i = 0; i < count * size; ++i) require(recv[static_cast<size_t>(i)] == total(i), "all_reduce's result");
    std::vector<float> part(static_cast<size_t>(count));
    require(hidet_dist_reduce_scatter(send.data(), part.data(), count, HIDET_DIST_F32, HIDET_DIST_SUM, group) == 0,
            "reduce_scatter");
    for (int64_t i = 0; i < count; ++i) {
      require(part[static_cast<size_t>(i)] == total(group_rank * count + i), "reduce_scatter's result");
    }
    require(hidet_dist_all_gather(send.data(), recv.data(), count, HIDET_DIST_F32, group) == 0, "all_gather");
    for (int64_t i = 0; i < count * size; ++i) {
      const float expected = value(ranks[static_cast<size_t>(i / count)], i % count, round);
      require(recv[static_cast<size_t>(i)] == expected, "all_gather's result");
    }
    require(hidet_dist_all_to_all(send.data(), recv.data(), count, HIDET_DIST_F32, group) == 0, "all_to_all");
    for (int64_t i = 0; i < count * size; ++i) {
      const float expected = value(ranks[static_cast<size_t>(i / count)], group_rank * count + i % count, round);
      require(recv[static_cast<size_t>(i)] == expected, "all_to_all's result");
    }
    // Blocks side by side, in two rows; the last block that is gathered ends sooner.
    const int64_t half = count / 2;
    const hidet_dist_blocks blocks{2, half, half * size}, some{2, half, half * size - half / 2};
    std::vector<float> gathered(static_cast<size_t>(2 * some.whole));
    require(hidet_dist_all_gather_blocks(send.data(), gathered.data(), &some, HIDET_DIST_F32, group) == 0,
            "all_gather_blocks");
    for (int64_t i = 0; i < 2 * some.whole; ++i) {
      const int64_t row = i / some.whole, column = i % some.whole;
      const float expected = value(ranks[static_cast<size_t>(column / half)], row * half + column % half, round);
      require(gathered[static_cast<size_t>(i)] == expected, "all_gather_blocks's result");
    }
    require(hidet_dist_reduce_scatter_blocks(send.data(), part.data(), &blocks, HIDET_DIST_F32, HIDET_DIST_SUM,
                                             group) == 0,
            "reduce_scatter_blocks");
    for (int64_t i = 0; i < 2 * half; ++i) {
      const float expected = total(i / half * blocks.whole + group_rank * half + i % half);
      require(part[static_cast<size_t>(i)] == expected, "reduce_scatter_blocks's result");
    }
    require(hidet_dist_all_to_all_blocks(send.data(), &blocks, gathered.data(), &some, HIDET_DIST_F32, group) == 0,
            "all_to_all_blocks");
    for (int64_t i = 0; i < 2 * some.whole; ++i) {
      const int64_t row = i / some.whole, column = i % some.whole;
      const int64_t there = row * blocks.whole + group_rank * half + column % half;
      const float expected = value(ranks[static_cast<size_t>(column / half)], there, round);
      require(gathered[static_cast<size_t>(i)] == expected, "all_to_all_blocks's result");
    }
    // Parts of unequal size: group rank p has 1 + p units, or none.
    std::vector<int64_t> sizes, begins{0};
    for (int64_t p = 0; p < size; ++p) sizes.push_back(round % 7 == p ? 0 : 1 + p);
    for (const int64_t each : sizes) begins.push_back(begins.back() + each);
    const int64_t unit = 1 + count / (2 * size), own = sizes[static_cast<size_t>(group_rank)], units = begins.back();
    std::vector<float> given(static_cast<size_t>(units * size * unit)), joined(static_cast<size_t>(units * unit));
    std::vector<float> scattered(static_cast<size_t>(size * unit)), exchanged(given.size());
    for (size_t i = 0; i < given.size(); ++i) given[i] = value(rank, static_cast<int64_t>(i), round);
    require(hidet_dist_all_gather_parts(given.data(), joined.data(), sizes.data(), unit, HIDET_DIST_F32, group) == 0,
            "all_gather_parts");
    require(hidet_dist_reduce_scatter_parts(given.data(), scattered.data(), sizes.data(), unit, HIDET_DIST_F32,
                                            HIDET_DIST_SUM, group) == 0,
            "reduce_scatter_parts");
    require(hidet_dist_all_to_all_parts(given.data(), exchanged.data(), sizes.data(), sizes.data(), unit,
                                        HIDET_DIST_F32, group) == 0,
            "all_to_all_parts");
    for (size_t p = 0; p < ranks.size(); ++p) {
      for (int64_t i = 0; i < sizes[p] * unit; ++i) {
        require(joined[static_cast<size_t>(begins[p] * unit + i)] == value(ranks[p], i, round),
                "all_gather_parts's result");
      }
      for (int64_t i = 0; i < sizes[p] * own * unit; ++i) {
        const int64_t there = begins[static_cast<size_t>(group_rank)] * sizes[p] * unit + i;
        require(exchanged[static_cast<size_t>(begins[p] * own * unit + i)] == value(ranks[p], there, round),
                "all_to_all_parts's result");
      }
    }
    for (int64_t i = 0; i < own * unit; ++i) {
      const int64_t there = begins[static_cast<size_t>(group_rank)] * unit + i;
      require(scattered[static_cast<size_t>(i)] == total(there), "reduce_scatter_parts's result");
    }
    // Rows that some ranks want, at random; the mask is the same on all ranks.
    const int64_t rows = 1 + count / 64, row = 64;
    std::vector<uint8_t> wanted(static_cast<size_t>(size * size * rows));
    for (size_t i = 0; i < wanted.size(); ++i) {
      wanted[i] = static_cast<int>(value(group, static_cast<int64_t>(i), round)) % 3 == 0 ? 1 : 0;
    }
    std::vector<float> all(static_cast<size_t>(size * rows * row)), few(static_cast<size_t>(rows * row));
    std::vector<float> sent(all.size());
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = value(rank, static_cast<int64_t>(i), round);
    require(hidet_dist_gather_rows(sent.data(), wanted.data(), all.data(), rows, row, HIDET_DIST_F32, group) == 0,
            "gather_rows");
    require(hidet_dist_reduce_scatter_rows(sent.data(), wanted.data(), few.data(), rows, row, HIDET_DIST_F32, group) ==
                0,
            "reduce_scatter_rows");
    const auto is_wanted = [&](int64_t by, int64_t number) {
      return wanted[static_cast<size_t>(by * size * rows + number)] != 0;
    };
    for (int64_t i = 0; i < size * rows * row; ++i) {
      const int other = ranks[static_cast<size_t>(i / (rows * row))];
      const float expected = is_wanted(group_rank, i / row) ? value(other, i % (rows * row), round) : 0;
      require(all[static_cast<size_t>(i)] == expected, "gather_rows's result");
    }
    for (int64_t i = 0; i < rows * row; ++i) {
      const int64_t there = group_rank * rows * row + i;
      float sum = 0;
      for (int64_t p = 0; p < size; ++p) {
        if (is_wanted(p, there / row)) sum += value(ranks[static_cast<size_t>(p)], there, round);
      }
      require(few[static_cast<size_t>(i)] == sum, "reduce_scatter_rows's result");
    }
    const auto root = static_cast<int32_t>(random() % static_cast<size_t>(size));
    require(hidet_dist_broadcast(send.data(), recv.data(), count, HIDET_DIST_F32, root, group) == 0, "broadcast");
    for (int64_t i = 0; i < count; ++i) {
      const float expected = value(ranks[static_cast<size_t>(root)], i, round);
      require(recv[static_cast<size_t>(i)] == expected, "broadcast's result");
    }
    const auto to = static_cast<int32_t>((group_rank + 1) % size);
    const auto from = static_cast<int32_t>((group_rank + size - 1) % size);
    require(hidet_dist_send_recv(send.data(), count, to, recv.data(), count, from, HIDET_DIST_F32, group) == 0,
            "send_recv");
    for (int64_t i = 0; i < count; ++i) {
      const float expected = value(ranks[static_cast<size_t>(from)], i, round);
      require(recv[static_cast<size_t>(i)] == expected, "send_recv's result");
    }
    // Down a chain.
    if (group_rank > 0) {
      require(hidet_dist_recv(recv.data(), count, HIDET_DIST_F32, group_rank - 1, group) == 0, "recv");
      for (int64_t i = 0; i < count; ++i) require(recv[static_cast<size_t>(i)] == value(ranks[0], i, round), "a chain");
    }
    if (group_rank + 1 < size) {
      const float *passed_on = group_rank == 0 ? send.data() : recv.data();
      require(hidet_dist_send(passed_on, count, HIDET_DIST_F32, group_rank + 1, group) == 0, "send");
    }
  }
  hidet_dist_communicator_destroy(communicator);
  hidet_dist_shm_close(own_transport);
  hidet_dist_shm_destroy(own_transport);
}

}  // namespace

int main() {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back(run_rank, rank);
  for (std::thread &rank : ranks) rank.join();
  for (const auto &[group, descriptor] : segments) close(descriptor);
  std::puts("passed");
  return 0;
}
