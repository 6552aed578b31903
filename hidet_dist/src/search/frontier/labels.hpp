// The labels of a node. See frontier.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hidet_dist::frontier {

// Labels by the combination of the values of the bucket's neighbours, and then by their excess.
struct Labels {
  size_t width = 0;    // columns of bytes
  size_t behinds = 0;  // nodes behind
  std::vector<int32_t> starts;  // the number of the first label of each combination, and the number of all labels
  std::vector<double> excess;   // the sum above the least of the combination
  std::vector<double> paid;     // the priced bytes in the sum
  std::vector<double> held;     // the bytes at points, line by line
  std::vector<int32_t> value;   // of the bucket's variable
  std::vector<int32_t> behind;  // for each node behind, the number of the label that a label extends; line by line

  size_t size() const { return excess.size(); }
  static size_t line_bytes(size_t width, size_t behinds) {
    return (2 + width) * sizeof(double) + (1 + behinds) * sizeof(int32_t);
  }
  size_t nbytes() const { return starts.size() * sizeof(int32_t) + size() * line_bytes(width, behinds); }

  void add(const Labels &other, size_t label) {
    excess.push_back(other.excess[label]);
    paid.push_back(other.paid[label]);
    value.push_back(other.value[label]);
    const auto line = [label](const auto &from, size_t columns, auto &to) {
      const auto begin = from.begin() + static_cast<std::ptrdiff_t>(label * columns);
      to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(columns));
    };
    line(other.held, width, held);
    line(other.behind, behinds, behind);
  }
  void clear() {
    for (std::vector<double> *each : {&excess, &paid, &held}) each->clear();
    for (std::vector<int32_t> *each : {&value, &behind}) each->clear();
  }
  void shrink() {
    for (std::vector<double> *each : {&excess, &paid, &held}) each->shrink_to_fit();
    for (std::vector<int32_t> *each : {&value, &behind}) each->shrink_to_fit();
  }
};

}  // namespace hidet_dist::frontier
