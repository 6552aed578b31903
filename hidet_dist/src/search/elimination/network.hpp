// Variables, factors over them, and their elimination. See elimination.h.
#pragma once

#include <cstdint>
#include <vector>

#include "tables.hpp"

namespace hidet_dist::elimination {

using Variable = int32_t;
using Variables = std::vector<Variable>;

// A table with a variable for each of its dims.
struct Factor {
  int64_t table;
  Variables variables;
};

// An eliminated variable, the factors that it occurred in, and the table that was left over its neighbours.
struct Bucket {
  Variable variable;
  std::vector<size_t> factors;
  Variables neighbours;
  Left left;
  Left outside{-1, 0.0};  // the least sum of the factors outside the bucket, over the neighbours
};

struct Order {
  Variables variables;
  double work;     // of all steps; equal ones count once
  double largest;  // of a step
};

}  // namespace hidet_dist::elimination

struct hidet_dist_network {
  hidet_dist_network(hidet_dist_tables &tables, std::vector<int64_t> sizes,
                     std::vector<hidet_dist::elimination::Factor> given);

  hidet_dist::elimination::Order order(const uint8_t *kept, bool by_table, double work_limit,
                                       hidet_dist_elimination_stop stop) const;
  void eliminate(int64_t length, const int64_t *order, hidet_dist_elimination_stop stop);
  void values(int64_t *values) const;
  void least_over(int64_t count, const int64_t *kept, double *result) const;
  void marginals(int64_t count, double work_limit, hidet_dist_elimination_stop stop, double *result);

  const std::vector<int64_t> &sizes() const { return sizes_; }
  const std::vector<hidet_dist::elimination::Factor> &factors() const { return factors_; }
  const hidet_dist_tables &tables() const { return tables_; }

  double constant = 0.0;
  size_t given;  // factors before the elimination
  std::vector<hidet_dist::elimination::Bucket> buckets;

 private:
  using Left = hidet_dist::elimination::Left;
  using Key = hidet_dist::elimination::Key;
  using Variables = hidet_dist::elimination::Variables;

  void add(hidet_dist::elimination::Factor factor);
  void begin_scope(const Variables &scope);
  void append_factors(Key &key, const std::vector<size_t> &factors) const;
  double entries(const Variables &scope) const;
  Left least(const std::vector<size_t> &factors, int64_t outside, const Variables &scope,
             const std::vector<int32_t> &kept, hidet_dist_elimination_stop stop);
  Left least_outside(const std::vector<size_t> &factors, const Variables &scope, const Left &outside,
                     const Variables &left, hidet_dist_elimination_stop stop);

  hidet_dist_tables &tables_;
  std::vector<int64_t> sizes_;
  std::vector<hidet_dist::elimination::Factor> factors_;
  std::vector<std::vector<size_t>> of_variable_;  // factors that may be gone
  std::vector<uint8_t> gone_;                     // by factor
  std::vector<int32_t> place_;                    // of a variable in the scope at hand
};
