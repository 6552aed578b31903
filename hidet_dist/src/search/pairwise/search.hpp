// The search for an assignment. A descent solves random induced forests over nearly all nodes exactly, for costs with
// priced memory; where memory does not fit, its prices rise until it does. A polish improves the best assignment known,
// by forests of few nodes and trades that keep within the limit.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "forest.hpp"
#include "memory.hpp"
#include "problem.hpp"
#include "trade.hpp"

namespace hidet_dist::pairwise {

class Search {
 public:
  // `over` says when to stop, `improved` is called at better assignments.
  Search(const Problem &problem, std::uint64_t seed, std::function<bool()> over, std::function<void()> improved);

  // `scale` is the order of magnitude of costs.
  void descend(std::vector<int> assignment, const std::vector<double> &prices, double scale);
  void polish(const std::vector<double> &prices);

  // Keeps an assignment if it is allowed, fits and is better than the best one.
  void offer(const std::vector<int> &assignment);

  bool has_best() const { return has_best_; }
  const std::vector<int> &best() const { return best_; }
  double cost() const { return best_cost_; }

 private:
  static constexpr int kFirstForests = 40;  // of a descent, until an assignment is known

  void sum_prices(double scale, const std::vector<double> &prices, const std::vector<double> &more);
  double priced(double change, const std::vector<int> &assignment) const;
  void take(std::vector<int> &assignment) const;
  bool is_forbidden(int edge, const std::vector<int> &assignment) const;
  bool repair(std::vector<int> &assignment);
  int forest_size();
  void change_bytes(Memory &memory, const std::vector<int> &assignment, bool back) const;

  const Problem &problem_;
  const std::function<bool()> over_;
  const std::function<void()> improved_;
  std::mt19937_64 random_;
  Forest forest_;
  Trade trade_;
  std::vector<double> price_sums_;
  int most_forests_ = kFirstForests;
  std::vector<int> best_;
  double best_cost_ = 0;
  bool has_best_ = false;
};

}  // namespace hidet_dist::pairwise
