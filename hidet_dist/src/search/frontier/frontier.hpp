// All labels of a network. See frontier.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../elimination/network.hpp"
#include "labels.hpp"
#include "point_bytes.hpp"
#include "step.hpp"

struct hidet_dist_frontier {
  hidet_dist_frontier(const hidet_dist_network &network, const hidet_dist_frontier_bytes &bytes,
                      const hidet_dist_frontier_limits &limits, hidet_dist_elimination_stop stop);

  void values(size_t number, int64_t *values) const;

  double below;
  std::vector<double> sums, paid;  // of whole assignments

 private:
  using Behinds = std::vector<size_t>;

  void add_node(hidet_dist::frontier::Node node, Behinds behind, hidet_dist::frontier::NodeBytes bytes);
  void add_bucket(size_t number);
  void add_roots();
  hidet_dist::frontier::Part part(const hidet_dist_tables &tables, int64_t table,
                                  const hidet_dist::elimination::Variables &variables, size_t scope) const;
  hidet_dist::frontier::NodeBytes add_bytes(hidet_dist::frontier::Node &node, const std::vector<size_t> &factors,
                                            const Behinds &behind) const;
  void reserve(size_t nbytes) const;
  void check() const;

  const hidet_dist_network &network_;
  const hidet_dist_frontier_bytes bytes_;
  const hidet_dist_frontier_limits limits_;
  const hidet_dist_elimination_stop stop_;
  const hidet_dist::frontier::PointBytes points_;
  // By node: the buckets, then the assignments of more and more of those without neighbours.
  std::vector<hidet_dist::frontier::Labels> labels_;
  std::vector<hidet_dist::frontier::NodeBytes> nodes_;
  std::vector<Behinds> behind_;
  std::vector<size_t> place_;  // of a variable in the scope at hand
  size_t nbytes_ = 0;
};
