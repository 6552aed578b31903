// The labels of one node, made of those of the nodes behind it. See frontier.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "dominance.hpp"
#include "labels.hpp"
#include "point_bytes.hpp"

namespace hidet_dist::frontier {

// A table over some of the variables of a scope.
struct Part {
  const double *data;
  std::vector<int64_t> strides;  // by place in the scope; 0 for variables that the table is not over
};

struct Behind {
  const Labels *labels;
  std::vector<int64_t> strides;  // of the combinations of its labels, by place in the scope
};

struct Bounds {
  double floor;  // bytes at points at which no factor holds any
  double most;   // bytes at any point
};

// A node: a bucket with the neighbours and, as the last one, the variable as its scope.
struct Node {
  std::vector<int64_t> shape;  // of the scope
  std::vector<Part> factors;   // whose sum is the least sum behind the bucket
  std::vector<Part> paid, always;
  std::vector<std::vector<Part>> at;  // by touched point
  std::vector<Behind> behind;
  const double *message;  // over the neighbours: the least of the sum over the variable, less an offset
  double offset;
  const double *outside;  // over the neighbours: the least sum of all else, less an offset
  double outside_offset;
  const NodeBytes *bytes;
};

enum class Outcome { kDone, kTooManyJoined, kTooManyCompared };

class Step {
 public:
  Step(const Node &node, const Bounds &bounds, std::function<void(size_t)> reserve, std::function<void()> check);

  // Makes the labels of which sums below `limit` may be made. `joined` and `comparisons` are the most labels before those
  // are dropped that others dominate, and the most pairs of them to compare. After too many comparisons, `bounds` are
  // those of all labels before; else, those of the labels.
  Outcome run(double limit, int64_t joined, int64_t comparisons, Labels &labels);

  std::vector<double> bounds;

 private:
  void begin(int64_t combination);
  void sum(const std::vector<Part> &parts, std::vector<double> &line) const;
  void join(size_t depth, double excess);
  void add(double excess);
  void finish(int64_t combination, Labels &labels);
  void clear();

  const Node &node_;
  const Bounds byte_bounds_;
  const std::function<void(size_t)> reserve_;
  const std::function<void()> check_;
  Dominance dominance_;

  double limit_ = 0.0;
  int64_t joined_left_ = 0, comparisons_left_ = 0;
  size_t visited_ = 0;
  bool counts_only_ = false;  // after too many comparisons

  // Of the combination at hand.
  std::vector<int64_t> place_;  // the values of the neighbours
  std::vector<double> inside_, paid_, always_;
  std::vector<std::vector<double>> at_;

  // Of the value of the variable at hand.
  size_t value_ = 0;
  double least_ = 0.0;
  std::vector<int32_t> first_, last_;  // the labels of each node behind
  std::vector<double> rest_;           // the least excess of the nodes from there on
  std::vector<int32_t> chosen_;

  // Labels of the combination before those are dropped that others dominate: seconds, priced bytes and bytes at points.
  std::vector<double> lines_, cost_, bound_;
  std::vector<int32_t> values_, behind_;
  std::vector<double> columns_;
  std::vector<int32_t> selected_;
};

}  // namespace hidet_dist::frontier
