#include "point_bytes.hpp"

#include <map>

namespace hidet_dist::frontier {

PointBytes::PointBytes(const hidet_dist_frontier_bytes &bytes, size_t factors) : bytes_(bytes), begin_(factors + 1) {
  if (bytes.points == 0) return;
  const int64_t count = bytes.begin[bytes.points];
  for (int64_t i = 0; i < count; ++i) ++begin_[static_cast<size_t>(bytes.factor[i]) + 1];
  for (size_t f = 0; f < factors; ++f) begin_[f + 1] += begin_[f];
  held_.resize(static_cast<size_t>(count));
  std::vector<size_t> next(begin_.begin(), begin_.end() - 1);
  for (int64_t m = 0; m < bytes.points; ++m) {
    for (int64_t i = bytes.begin[m]; i < bytes.begin[m + 1]; ++i)
      held_[next[static_cast<size_t>(bytes.factor[i])]++] = {m, bytes.table[i]};
  }
}

NodeBytes PointBytes::node(const std::vector<size_t> &factors, const std::vector<const NodeBytes *> &behind) const {
  NodeBytes result;
  if (bytes_.points == 0) return result;
  std::map<int64_t, std::pair<Touched, int64_t>> at;  // by point, with the number of decided factors
  for (size_t n = 0; n < behind.size(); ++n) {
    for (size_t i = 0; i < behind[n]->open.size(); ++i) {
      auto &[touched, decided] = at[behind[n]->open[i].point];
      touched.columns.push_back({n, i + 2});
      decided += behind[n]->open[i].factors;
    }
  }
  for (const size_t f : factors) {
    for (size_t i = begin_[f]; i < begin_[f + 1]; ++i) {
      auto &[touched, decided] = at[held_[i].point];
      touched.own.push_back({f, held_[i].table});
      ++decided;
    }
  }
  for (auto &[point, each] : at) {
    auto &[touched, decided] = each;
    touched.least = bytes_.least[point];
    touched.decided = decided == bytes_.begin[point + 1] - bytes_.begin[point];
    if (!touched.decided) result.open.push_back({point, decided});
    result.touched.push_back(std::move(touched));
  }
  result.width = 2 + result.open.size();
  return result;
}

}  // namespace hidet_dist::frontier
