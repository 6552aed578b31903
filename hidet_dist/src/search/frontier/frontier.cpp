#include "frontier.hpp"

#include <algorithm>
#include <exception>
#include <utility>

namespace {

using hidet_dist::elimination::Bucket;
using hidet_dist::elimination::Factor;
using hidet_dist::elimination::Stopped;
using hidet_dist::elimination::Table;
using hidet_dist::elimination::TooWide;
using hidet_dist::elimination::Variables;
using hidet_dist::frontier::Bounds;
using hidet_dist::frontier::Labels;
using hidet_dist::frontier::Node;
using hidet_dist::frontier::NodeBytes;
using hidet_dist::frontier::Outcome;
using hidet_dist::frontier::Part;
using hidet_dist::frontier::Step;
using hidet_dist::frontier::Touched;

constexpr size_t kCheckNodes = 64;  // from one call of the callback to the next

// The element that would be at a place if all were sorted.
double at_place(std::vector<double> &values, int64_t place) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(place);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// Keeps the labels with bounds below a limit.
void drop_beyond(double limit, const std::vector<double> &bounds, Labels &labels) {
  Labels left;
  left.width = labels.width;
  left.behinds = labels.behinds;
  left.starts.assign(1, 0);
  left.starts.reserve(labels.starts.size());
  for (size_t c = 0; c + 1 < labels.starts.size(); ++c) {
    for (auto i = static_cast<size_t>(labels.starts[c]); i < static_cast<size_t>(labels.starts[c + 1]); ++i) {
      if (bounds[i] < limit) left.add(labels, i);
    }
    left.starts.push_back(static_cast<int32_t>(left.size()));
  }
  labels = std::move(left);
}

}  // namespace

hidet_dist_frontier::hidet_dist_frontier(const hidet_dist_network &network, const hidet_dist_frontier_bytes &bytes,
                                         const hidet_dist_frontier_limits &limits, hidet_dist_elimination_stop stop)
    : below(limits.below),
      network_(network),
      bytes_(bytes),
      limits_(limits),
      stop_(stop),
      points_(bytes, network.given),
      place_(network.sizes().size()) {
  for (size_t b = 0; b < network.buckets.size(); ++b) {
    if (b % kCheckNodes == 0) check();
    add_bucket(b);
  }
  add_roots();
}

void hidet_dist_frontier::check() const {
  if (stop_()) throw Stopped();
}

void hidet_dist_frontier::reserve(size_t nbytes) const {
  const hidet_dist_tables &tables = network_.tables();
  if (static_cast<size_t>(tables.nbytes) + nbytes_ + nbytes > static_cast<size_t>(tables.byte_limit)) throw TooWide();
}

// Makes the labels of a node. Lowers the limit where there are too many.
void hidet_dist_frontier::add_node(Node node, Behinds behind, NodeBytes bytes) {
  nodes_.push_back(std::move(bytes));
  node.bytes = &nodes_.back();
  Labels labels;
  Step step(node, Bounds{bytes_.floor, bytes_.most}, [this](size_t nbytes) { reserve(nbytes); }, [this] { check(); });
  for (int64_t halvings = 0;;) {
    const Outcome outcome = step.run(below, limits_.joined, limits_.comparisons, labels);
    if (outcome == Outcome::kDone) break;
    if (outcome == Outcome::kTooManyJoined) {
      if (halvings++ == limits_.halvings) throw TooWide();
      below = (network_.constant + below) / 2;
    } else {
      below = at_place(step.bounds, static_cast<int64_t>(step.bounds.size() / 2));
    }
  }
  if (static_cast<int64_t>(labels.size()) > limits_.left) {
    std::vector<double> bounds(step.bounds);
    below = at_place(bounds, limits_.left);
    drop_beyond(below, step.bounds, labels);
  }
  labels.shrink();
  nbytes_ += labels.nbytes();
  labels_.push_back(std::move(labels));
  behind_.push_back(std::move(behind));
}

// A table over variables of the scope at hand.
Part hidet_dist_frontier::part(const hidet_dist_tables &tables, int64_t table, const Variables &variables,
                               size_t scope) const {
  const Table &own = tables.all[static_cast<size_t>(table)];
  Part part{own.data, std::vector<int64_t>(scope)};
  own.write_strides([&](size_t d) { return place_[static_cast<size_t>(variables[d])]; }, part.strides.data());
  return part;
}

// Adds what factors hold, and the bytes at points.
NodeBytes hidet_dist_frontier::add_bytes(Node &node, const std::vector<size_t> &factors, const Behinds &behind) const {
  std::vector<const NodeBytes *> before;
  for (const size_t n : behind) before.push_back(&nodes_[n]);
  NodeBytes bytes = points_.node(factors, before);
  const auto held = [&](size_t f, int64_t table) {
    return part(*bytes_.tables, table, network_.factors()[f].variables, node.shape.size());
  };
  for (const size_t f : factors) {
    if (bytes_.paid[f] >= 0) node.paid.push_back(held(f, bytes_.paid[f]));
    if (bytes_.points > 0 && bytes_.always[f] >= 0) node.always.push_back(held(f, bytes_.always[f]));
  }
  for (const Touched &touched : bytes.touched) {
    node.at.emplace_back();
    for (const Touched::Own &own : touched.own) node.at.back().push_back(held(own.factor, own.table));
  }
  return bytes;
}

void hidet_dist_frontier::add_bucket(size_t number) {
  const Bucket &bucket = network_.buckets[number];
  const hidet_dist_tables &tables = network_.tables();
  Variables scope(bucket.neighbours);
  scope.push_back(bucket.variable);
  Node node{};
  for (size_t i = 0; i < scope.size(); ++i) {
    const auto v = static_cast<size_t>(scope[i]);
    place_[v] = i;
    node.shape.push_back(network_.sizes()[v]);
  }
  std::vector<size_t> own;
  Behinds behind;
  for (const size_t f : bucket.factors) {
    const Factor &factor = network_.factors()[f];
    node.factors.push_back(part(tables, factor.table, factor.variables, scope.size()));
    if (f < network_.given) {
      own.push_back(f);
    } else {
      behind.push_back(f - network_.given);
      node.behind.push_back({&labels_[behind.back()], node.factors.back().strides});
    }
  }
  node.message = tables.all[static_cast<size_t>(bucket.left.table)].data;
  node.offset = bucket.left.offset;
  node.outside = tables.all[static_cast<size_t>(bucket.outside.table)].data;
  node.outside_offset = bucket.outside.offset;
  NodeBytes bytes = add_bytes(node, own, behind);
  add_node(std::move(node), std::move(behind), std::move(bytes));
}

// Combines the labels of the buckets without neighbours, one after the other.
void hidet_dist_frontier::add_roots() {
  const double nothing = 0.0;
  const auto add = [&](const std::vector<size_t> &own, Behinds behind) {
    Node node{};
    node.shape = {1};
    for (const size_t n : behind) node.behind.push_back({&labels_[n], {0}});
    node.message = node.outside = &nothing;
    node.outside_offset = network_.constant;
    NodeBytes bytes = add_bytes(node, own, behind);
    add_node(std::move(node), std::move(behind), std::move(bytes));
  };
  std::vector<size_t> roots, own;
  for (size_t b = 0; b < network_.buckets.size(); ++b) {
    if (network_.buckets[b].neighbours.empty()) roots.push_back(b);
  }
  for (size_t f = 0; f < network_.given; ++f) {
    if (network_.factors()[f].variables.empty()) own.push_back(f);
  }
  add(own, {});
  for (const size_t root : roots) {
    check();
    add({}, {labels_.size() - 1, root});
  }
  const Labels &whole = labels_.back();
  for (const double excess : whole.excess) sums.push_back(network_.constant + excess);
  paid = whole.paid;
}

void hidet_dist_frontier::values(size_t number, int64_t *values) const {
  std::vector<std::pair<size_t, size_t>> waiting{{labels_.size() - 1, number}};
  while (!waiting.empty()) {
    const auto [node, label] = waiting.back();
    waiting.pop_back();
    const Labels &labels = labels_[node];
    if (node < network_.buckets.size()) values[network_.buckets[node].variable] = labels.value[label];
    for (size_t n = 0; n < labels.behinds; ++n)
      waiting.emplace_back(behind_[node][n], static_cast<size_t>(labels.behind[label * labels.behinds + n]));
  }
}

extern "C" hidet_dist_frontier *hidet_dist_frontier_create(const hidet_dist_network *network,
                                                           const hidet_dist_frontier_bytes *bytes,
                                                           const hidet_dist_frontier_limits *limits,
                                                           hidet_dist_elimination_stop stop, int32_t *status) {
  *status = HIDET_DIST_ELIMINATED;
  try {
    return new hidet_dist_frontier(*network, *bytes, *limits, stop);
  } catch (const Stopped &) {
    *status = HIDET_DIST_ELIMINATION_STOPPED;
  } catch (const TooWide &) {
    *status = HIDET_DIST_ELIMINATION_TOO_WIDE;
  } catch (const std::exception &) {
    *status = HIDET_DIST_ELIMINATION_NO_MEMORY;
  }
  return nullptr;
}

extern "C" void hidet_dist_frontier_destroy(hidet_dist_frontier *frontier) { delete frontier; }

extern "C" double hidet_dist_frontier_below(const hidet_dist_frontier *frontier) { return frontier->below; }

extern "C" int64_t hidet_dist_frontier_count(const hidet_dist_frontier *frontier) {
  return static_cast<int64_t>(frontier->sums.size());
}

extern "C" void hidet_dist_frontier_sums(const hidet_dist_frontier *frontier, double *sums, double *paid) {
  std::copy(frontier->sums.begin(), frontier->sums.end(), sums);
  std::copy(frontier->paid.begin(), frontier->paid.end(), paid);
}

extern "C" void hidet_dist_frontier_values(const hidet_dist_frontier *frontier, int64_t number, int64_t *values) {
  frontier->values(static_cast<size_t>(number), values);
}
