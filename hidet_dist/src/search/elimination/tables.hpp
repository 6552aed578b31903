// Tables numbered by content. See elimination.h.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hidet_dist/search/elimination.h"

namespace hidet_dist::elimination {

// A table does not fit the limit of bytes, or a step has too much work.
struct TooWide : std::exception {};
// The callback said that the time is over.
struct Stopped : std::exception {};

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key &key) const;
};

// Memory of tables, which stay until all of them go. A table that turns out to be known leaves its space to the next one.
class Arena {
 public:
  // Returns space for a table. It is taken by `keep`; until then it is that of the next table, too.
  double *space(int64_t entries);
  void keep(const double *data, int64_t entries);

 private:
  struct Free {
    void operator()(double *data) const;
  };
  using Chunk = std::unique_ptr<double[], Free>;

  static Chunk chunk(int64_t bytes);

  std::vector<Chunk> chunks_;
  int64_t bytes_ = 0;       // of all chunks but the spare one
  double *next_ = nullptr;  // free space of a chunk
  int64_t left_ = 0;        // its bytes
  Chunk spare_;             // for a large table
  int64_t spare_bytes_ = 0;
};

struct Table {
  std::vector<int64_t> shape;
  int64_t entries;
  const double *data;

  // Writes the stride of each dim to the place of the dim in a scope.
  template <typename PlaceOf>
  void write_strides(const PlaceOf &place_of, int64_t *strides) const {
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) strides[place_of(d)] = stride;
  }
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
  // Returns space for the entries of a table, which is added next.
  double *space(int64_t entries) { return arena_.space(entries); }
  // Numbers the table in that space by its content.
  int64_t add(const std::vector<int64_t> &shape, const double *space);
  int64_t add(int32_t dims, const int64_t *shape, const double *entries);

  const int64_t byte_limit;
  int64_t nbytes = 0;
  std::vector<hidet_dist::elimination::Table> all;
  // What each step left, by the tables that it took and how it took them.
  std::unordered_map<hidet_dist::elimination::Key, hidet_dist::elimination::Left, hidet_dist::elimination::KeyHash>
      left;

 private:
  int64_t find(uint64_t hash, const int64_t *shape, size_t dims, const double *data, int64_t entries) const;
  int64_t insert(uint64_t hash, std::vector<int64_t> shape, int64_t entries, const double *space);

  hidet_dist::elimination::Arena arena_;
  std::unordered_multimap<uint64_t, int64_t> by_content_;
};
