#include "tables.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace hidet_dist::elimination {

namespace {

constexpr int64_t kLine = 64;              // bytes of a cache line
constexpr int64_t kLeastChunk = 64 << 10;  // bytes of the first chunk of memory: stores may be small
constexpr int64_t kMostChunk = 16 << 20;   // bytes; larger tables have chunks of their own

constexpr uint64_t kMix = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio, as in Fibonacci hashing

uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kMix;
  return hash ^ (hash >> 32);
}

// Equal contents are compared in full, so the hash only has to be fast: four lanes that do not wait for each other.
uint64_t content_hash(const int64_t *shape, size_t dims, const double *data, int64_t entries) {
  uint64_t hash = dims;
  for (size_t d = 0; d < dims; ++d) hash = mixed(hash, static_cast<uint64_t>(shape[d]));
  uint64_t lanes[4] = {hash, hash + 1, hash + 2, hash + 3};
  int64_t i = 0;
  for (; i + 4 <= entries; i += 4) {
    uint64_t words[4];
    std::memcpy(words, data + i, sizeof words);
    for (int j = 0; j < 4; ++j) lanes[j] = mixed(lanes[j], words[j]);
  }
  for (; i < entries; ++i) {
    uint64_t word;
    std::memcpy(&word, data + i, sizeof word);
    lanes[0] = mixed(lanes[0], word);
  }
  for (const uint64_t lane : lanes) hash = mixed(hash, lane);
  return hash;
}

int64_t product(const int64_t *shape, size_t dims) {
  int64_t entries = 1;
  for (size_t d = 0; d < dims; ++d) entries *= shape[d];
  return entries;
}

int64_t rounded_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

int64_t bytes_of(int64_t entries) { return rounded_up(entries * static_cast<int64_t>(sizeof(double)), kLine); }

}  // namespace

void Arena::Free::operator()(double *data) const { std::free(data); }

Arena::Chunk Arena::chunk(int64_t bytes) {
  Chunk chunk(static_cast<double *>(std::aligned_alloc(static_cast<size_t>(kLine), static_cast<size_t>(bytes))));
  if (!chunk) throw std::bad_alloc();
  return chunk;
}

double *Arena::space(int64_t entries) {
  const int64_t bytes = bytes_of(entries);
  if (bytes > kMostChunk / 2) {
    if (spare_bytes_ < bytes || spare_bytes_ > 2 * bytes) {
      spare_bytes_ = 0;
      spare_.reset();
      spare_ = chunk(bytes);
      spare_bytes_ = bytes;
    }
    return spare_.get();
  }
  if (left_ < bytes) {
    const int64_t size = std::max(bytes, std::min(kMostChunk, std::max(kLeastChunk, bytes_)));
    chunks_.push_back(chunk(size));
    next_ = chunks_.back().get();
    left_ = size;
    bytes_ += size;
  }
  return next_;
}

void Arena::keep(const double *data, int64_t entries) {
  if (data == spare_.get()) {
    bytes_ += spare_bytes_;
    spare_bytes_ = 0;
    chunks_.push_back(std::move(spare_));
    return;
  }
  const int64_t bytes = bytes_of(entries);
  next_ += bytes / static_cast<int64_t>(sizeof(double));
  left_ -= bytes;
}

size_t KeyHash::operator()(const Key &key) const {
  uint64_t hash = key.size();
  for (const int64_t word : key) hash = mixed(hash, static_cast<uint64_t>(word));
  return hash;
}

}  // namespace hidet_dist::elimination

using hidet_dist::elimination::Table;

void hidet_dist_tables::reserve(double entries) const {
  if (static_cast<double>(nbytes) + sizeof(double) * entries > static_cast<double>(byte_limit))
    throw hidet_dist::elimination::TooWide();
}

int64_t hidet_dist_tables::add(const std::vector<int64_t> &shape, const double *space) {
  const int64_t entries = hidet_dist::elimination::product(shape.data(), shape.size());
  const uint64_t hash = hidet_dist::elimination::content_hash(shape.data(), shape.size(), space, entries);
  const int64_t known = find(hash, shape.data(), shape.size(), space, entries);
  return known >= 0 ? known : insert(hash, shape, entries, space);
}

int64_t hidet_dist_tables::add(int32_t dims, const int64_t *shape, const double *entries) {
  const auto rank = static_cast<size_t>(dims);
  const int64_t count = hidet_dist::elimination::product(shape, rank);
  const uint64_t hash = hidet_dist::elimination::content_hash(shape, rank, entries, count);
  const int64_t known = find(hash, shape, rank, entries, count);
  if (known >= 0) return known;
  double *copy = arena_.space(count);
  std::copy(entries, entries + count, copy);
  return insert(hash, {shape, shape + dims}, count, copy);
}

int64_t hidet_dist_tables::find(uint64_t hash, const int64_t *shape, size_t dims, const double *data,
                                int64_t entries) const {
  const auto range = by_content_.equal_range(hash);
  for (auto each = range.first; each != range.second; ++each) {
    const Table &table = all[static_cast<size_t>(each->second)];
    if (table.shape.size() == dims && std::equal(shape, shape + dims, table.shape.begin()) &&
        std::memcmp(table.data, data, static_cast<size_t>(entries) * sizeof(double)) == 0)
      return each->second;
  }
  return -1;
}

int64_t hidet_dist_tables::insert(uint64_t hash, std::vector<int64_t> shape, int64_t entries, const double *space) {
  const auto number = static_cast<int64_t>(all.size());
  all.push_back({std::move(shape), entries, space});
  arena_.keep(space, entries);
  by_content_.emplace(hash, number);
  nbytes += entries * static_cast<int64_t>(sizeof(double));
  return number;
}

extern "C" hidet_dist_tables *hidet_dist_tables_create(int64_t byte_limit) {
  return new (std::nothrow) hidet_dist_tables(byte_limit);
}

extern "C" void hidet_dist_tables_destroy(hidet_dist_tables *tables) { delete tables; }

extern "C" int64_t hidet_dist_tables_add(hidet_dist_tables *tables, int32_t dims, const int64_t *shape,
                                         const double *entries) {
  try {
    return tables->add(dims, shape, entries);
  } catch (const std::exception &) {
    return -1;
  }
}

extern "C" int64_t hidet_dist_tables_bytes(const hidet_dist_tables *tables) { return tables->nbytes; }

extern "C" int32_t hidet_dist_tables_shape(const hidet_dist_tables *tables, int64_t number, int64_t *shape) {
  const Table &table = tables->all[static_cast<size_t>(number)];
  std::copy(table.shape.begin(), table.shape.end(), shape);
  return static_cast<int32_t>(table.shape.size());
}

extern "C" const double *hidet_dist_tables_entries(const hidet_dist_tables *tables, int64_t number) {
  return tables->all[static_cast<size_t>(number)].data;
}
