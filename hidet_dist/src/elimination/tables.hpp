// Tables numbered by content. See elimination.h.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hidet_dist/elimination.h"

namespace hidet_dist::elimination {

// A table does not fit the limit of bytes, or a step has too much work.
struct TooWide : std::exception {};
// The callback said that the time is over.
struct Stopped : std::exception {};

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key &key) const;
};

struct Table {
  std::vector<int64_t> shape;
  int64_t entries;
  std::unique_ptr<double[]> data;
};

// The table that a step of elimination left, and the least entry that was subtracted from it.
struct Left {
  int64_t table;
  double offset;
};

}  // namespace hidet_dist::elimination

struct hidet_dist_tables {
  explicit hidet_dist_tables(int64_t byte_limit) : byte_limit(byte_limit) {}

  // Checks that a table of so many entries fits, before it is made.
  void reserve(double entries) const;
  // Numbers a table by its content.
  int64_t add(const std::vector<int64_t> &shape, std::unique_ptr<double[]> data);
  int64_t add(int32_t dims, const int64_t *shape, const double *entries);

  const int64_t byte_limit;
  int64_t nbytes = 0;
  std::vector<hidet_dist::elimination::Table> all;
  // What each step left, by the tables that it took and how it took them.
  std::unordered_map<hidet_dist::elimination::Key, hidet_dist::elimination::Left, hidet_dist::elimination::KeyHash>
      left;

 private:
  int64_t find(uint64_t hash, const int64_t *shape, size_t dims, const double *data, int64_t entries) const;
  int64_t insert(uint64_t hash, std::vector<int64_t> shape, int64_t entries, std::unique_ptr<double[]> data);

  std::unordered_multimap<uint64_t, int64_t> by_content_;
};
