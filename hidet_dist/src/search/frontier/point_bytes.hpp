// The bytes of labels at chosen points. See frontier.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hidet_dist/search/frontier.h"

namespace hidet_dist::frontier {

// A point of whose factors a node decides some, itself or by the labels that it extends.
struct Touched {
  struct Column {
    size_t behind;  // the place of a node among those behind
    size_t column;  // of its labels
  };
  struct Own {
    size_t factor;  // that the node itself decides
    int64_t table;
  };
  std::vector<Column> columns;
  std::vector<Own> own;
  double least;
  bool decided;  // all factors are: the point is not open any more
};

// What the columns of a node's labels are made of: 0, the bytes always held; 1, the most at any decided point; then those
// at each open point.
struct NodeBytes {
  struct Open {
    int64_t point;
    int64_t factors;  // that are decided
  };
  std::vector<Touched> touched;  // by point
  std::vector<Open> open;        // by point
  size_t width = 0;              // columns
};

class PointBytes {
 public:
  explicit PointBytes(const hidet_dist_frontier_bytes &bytes, size_t factors);

  // A node that decides `factors` and joins labels of the nodes `behind` it.
  NodeBytes node(const std::vector<size_t> &factors, const std::vector<const NodeBytes *> &behind) const;

 private:
  struct Held {
    int64_t point, table;
  };

  const hidet_dist_frontier_bytes &bytes_;
  std::vector<size_t> begin_;  // by factor
  std::vector<Held> held_;     // by factor and point
};

}  // namespace hidet_dist::frontier
