// Branch and bound, for problems that are small enough: the open part of least bound is bounded better, by messages and
// prices, loses the strategies that cannot pay, is merged, and is divided by the strategies of one of its nodes, into
// those of few bytes and those of many where memory is what binds.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "problem.hpp"

namespace hidet_dist::pairwise {

class Branching {
 public:
  // Assignments are of the nodes of `problem`. Parts start from the duals of the part that they were divided from.
  Branching(const Problem &problem, Duals duals, double bound);

  // Treats one open part, for assignments that cost less than `cutoff`, until `stop` says so. From any thread; the other
  // functions only while no thread does.
  void step(double cutoff, const std::function<bool()> &stop);

  bool done() const { return open_.empty(); }
  // The least bound of the open parts, if there are any.
  double bound() const { return open_.front().bound; }

  // The best assignment found; empty if there is none.
  const std::vector<int> &best() const { return best_; }
  double cost() const { return best_cost_; }

  // The rounding of the last part treated, an assignment that may not be allowed or fit; empty if there is none.
  const std::vector<int> &rounded() const { return rounded_; }

 private:
  struct Part {
    double bound;
    std::shared_ptr<const Problem> problem;
    std::shared_ptr<const Duals> duals;
    std::vector<char> removed;  // strategies of the problem that the part does without

    bool operator<(const Part &other) const { return bound > other.bound; }  // the least is the first of the heap
  };

  void treat(Part part, double cutoff, const std::function<bool()> &stop);
  void push(Part part);
  Part pop();

  std::mutex mutex_;
  std::vector<Part> open_;  // a heap
  double stored_ = 0;  // bytes of open parts, about
  std::vector<int> best_, rounded_;
  double best_cost_ = 0;
};

}  // namespace hidet_dist::pairwise
