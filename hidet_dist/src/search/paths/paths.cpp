#include "hidet_dist/search/paths.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <queue>
#include <unordered_map>
#include <vector>

namespace {

__extension__ using Ticks = unsigned __int128;

constexpr int kTicksLog2 = 100;           // ticks in a second
constexpr double kMostSeconds = 0x1p26;   // of an edge: two years
constexpr Ticks kMostTicks = ~Ticks{0};   // of a path: the sums of longer ones stay at it
constexpr uint32_t kCommunicates = 1U << 16;  // counts: of edges that communicate above, of all edges below

size_t index(int32_t number) { return static_cast<size_t>(number); }

struct Price {
  Ticks ticks = 0;
  uint32_t counts = 0;

  bool operator<(const Price &other) const {
    return ticks != other.ticks ? ticks < other.ticks : counts < other.counts;
  }

  Price operator+(const Price &other) const {
    return {ticks > kMostTicks - other.ticks ? kMostTicks : ticks + other.ticks, counts + other.counts};
  }
};

struct Edge {
  Price price;
  int32_t after;
};

struct Node {
  Price price;
  int32_t before = -1;  // on the path to it
  int32_t edge = -1;    // of the node before it
  bool found = false;
  bool settled = false;  // no shorter path can be found
};

struct Entry {
  Price price;
  int64_t order;  // of discovery
  int32_t node;

  bool operator<(const Entry &other) const {  // the first one is the greatest
    return other.price < price || (!(price < other.price) && other.order < order);
  }
};

struct Tree {
  std::vector<Node> nodes;
  std::priority_queue<Entry> queue;
  int64_t discovered = 0;

  Node &at(int32_t node) {
    if (index(node) >= nodes.size()) nodes.resize(std::max(index(node) + 1, 2 * nodes.size()));
    return nodes[index(node)];
  }

  bool has(int32_t node) const { return index(node) < nodes.size() && nodes[index(node)].settled; }
};

struct Edges {
  std::vector<Edge> edges;
  bool given = false;
};

}  // namespace

struct hidet_dist_paths {
  std::vector<Edges> nodes;
  std::unordered_map<int32_t, Tree> trees;
  int64_t size = 0;

  Tree &tree(int32_t source) {
    const auto [place, is_new] = trees.try_emplace(source);
    Tree &tree = place->second;
    if (is_new) {
      tree.at(source).found = true;
      tree.queue.push({Price(), tree.discovered++, source});
      ++size;
    }
    return tree;
  }

  int32_t reach(Tree &tree, int32_t target) {
    while (!tree.has(target)) {
      if (tree.queue.empty()) return HIDET_DIST_PATHS_NONE;
      const Entry entry = tree.queue.top();
      if (tree.at(entry.node).settled) {
        tree.queue.pop();
        continue;
      }
      if (index(entry.node) >= nodes.size() || !nodes[index(entry.node)].given) return entry.node;
      tree.queue.pop();
      tree.at(entry.node).settled = true;
      const std::vector<Edge> &edges = nodes[index(entry.node)].edges;
      for (size_t e = 0; e < edges.size(); ++e) {
        Node &after = tree.at(edges[e].after);
        const Price price = entry.price + edges[e].price;
        if (after.found && !(price < after.price)) continue;
        size += !after.found;
        after.price = price;
        after.found = true;
        after.before = entry.node;
        after.edge = static_cast<int32_t>(e);
        tree.queue.push({price, tree.discovered++, edges[e].after});
      }
    }
    return HIDET_DIST_PATHS_REACHED;
  }
};

hidet_dist_paths *hidet_dist_paths_create(void) { return new (std::nothrow) hidet_dist_paths(); }

void hidet_dist_paths_destroy(hidet_dist_paths *paths) { delete paths; }

int32_t hidet_dist_paths_expand(hidet_dist_paths *paths, int32_t node, int64_t count, const int32_t *after,
                                const double *seconds, const uint8_t *communicates) {
  try {
    if (index(node) >= paths->nodes.size()) paths->nodes.resize(std::max(index(node) + 1, 2 * paths->nodes.size()));
    Edges &of_node = paths->nodes[index(node)];
    of_node.edges.reserve(static_cast<size_t>(count));
    for (int64_t e = 0; e < count; ++e) {
      const auto ticks = static_cast<Ticks>(std::ldexp(std::min(seconds[e], kMostSeconds), kTicksLog2));
      of_node.edges.push_back({{ticks, (communicates[e] ? kCommunicates : 0) + 1}, after[e]});
    }
    of_node.given = true;
    paths->size += count;
    return HIDET_DIST_PATHS_REACHED;
  } catch (const std::bad_alloc &) {
    return HIDET_DIST_PATHS_NO_MEMORY;
  }
}

int32_t hidet_dist_paths_reach(hidet_dist_paths *paths, int32_t source, int64_t count, const int32_t *targets) {
  try {
    Tree &tree = paths->tree(source);
    for (int64_t t = 0; t < count; ++t) {
      const int32_t status = paths->reach(tree, targets[t]);
      if (status != HIDET_DIST_PATHS_REACHED) return status;
    }
    return HIDET_DIST_PATHS_REACHED;
  } catch (const std::bad_alloc &) {
    return HIDET_DIST_PATHS_NO_MEMORY;
  }
}

void hidet_dist_paths_seconds(const hidet_dist_paths *paths, int32_t source, int64_t count, const int32_t *targets,
                              double *seconds) {
  const Tree &tree = paths->trees.at(source);
  for (int64_t t = 0; t < count; ++t) {
    seconds[t] = std::ldexp(static_cast<double>(tree.nodes[index(targets[t])].price.ticks), -kTicksLog2);
  }
}

void hidet_dist_paths_communicating(const hidet_dist_paths *paths, int32_t source, int64_t count,
                                    const int32_t *targets, int32_t *edges) {
  const Tree &tree = paths->trees.at(source);
  for (int64_t t = 0; t < count; ++t) {
    edges[t] = static_cast<int32_t>(tree.nodes[index(targets[t])].price.counts / kCommunicates);
  }
}

void hidet_dist_paths_last_edge(const hidet_dist_paths *paths, int32_t source, int32_t target, int32_t *edge) {
  const Node &node = paths->trees.at(source).nodes[index(target)];
  edge[0] = node.before;
  edge[1] = node.edge;
}

int64_t hidet_dist_paths_size(const hidet_dist_paths *paths) { return paths->size; }
