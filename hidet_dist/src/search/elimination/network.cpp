#include "network.hpp"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "../sums.hpp"

namespace {

using hidet_dist::elimination::Bucket;
using hidet_dist::elimination::Factor;
using hidet_dist::elimination::Key;
using hidet_dist::elimination::Left;
using hidet_dist::elimination::Stopped;
using hidet_dist::elimination::Table;
using hidet_dist::elimination::TooWide;
using hidet_dist::elimination::Variable;
using hidet_dist::elimination::Variables;

constexpr size_t kCheckSteps = 256;        // looked up, from one call of the callback to the next
constexpr int64_t kPieceEntries = 1 << 24;  // of a sum of tables, from one call of the callback to the next

constexpr double kInfinite = std::numeric_limits<double>::infinity();

size_t index(Variable v) { return static_cast<size_t>(v); }

void check(hidet_dist_elimination_stop stop) {
  if (stop()) throw Stopped();
}

}  // namespace

hidet_dist_network::hidet_dist_network(hidet_dist_tables &tables, std::vector<int64_t> sizes, std::vector<Factor> all)
    : given(all.size()), tables_(tables), sizes_(std::move(sizes)), of_variable_(sizes_.size()), place_(sizes_.size()) {
  factors_.reserve(given + sizes_.size());
  for (Factor &factor : all) add(std::move(factor));
}

void hidet_dist_network::add(Factor factor) {
  const size_t number = factors_.size();
  if (factor.variables.empty()) constant += tables_.all[static_cast<size_t>(factor.table)].data[0];
  for (const Variable v : factor.variables) of_variable_[index(v)].push_back(number);
  factors_.push_back(std::move(factor));
  gone_.push_back(0);
}

double hidet_dist_network::entries(const Variables &scope) const {
  double entries = 1.0;
  for (const Variable v : scope) entries *= static_cast<double>(sizes_[index(v)]);
  return entries;
}

void hidet_dist_network::begin_scope(const Variables &scope) {
  for (size_t i = 0; i < scope.size(); ++i) place_[index(scope[i])] = static_cast<int32_t>(i);
}

void hidet_dist_network::append_factors(Key &key, const std::vector<size_t> &factors) const {
  for (const size_t f : factors) {
    key.push_back(factors_[f].table);
    for (const Variable v : factors_[f].variables) key.push_back(-1 - place_[index(v)]);
  }
}

// The least sum, over all variables of a scope but those at the places `kept`, of factors and of the table `outside` over
// the first variables of the scope, if it is not -1. The result has its dims in the order of `kept`. Expects begin_scope.
Left hidet_dist_network::least(const std::vector<size_t> &factors, int64_t outside, const Variables &scope,
                               const std::vector<int32_t> &kept, hidet_dist_elimination_stop stop) {
  const size_t dims = scope.size();
  std::vector<int64_t> shape(dims), strides, result_strides(dims), result_shape;
  for (size_t d = 0; d < dims; ++d) shape[d] = sizes_[index(scope[d])];
  std::vector<const double *> data;
  const auto part = [&](int64_t table, const auto &place_of) {
    const Table &own = tables_.all[static_cast<size_t>(table)];
    data.push_back(own.data);
    strides.resize(strides.size() + dims);
    own.write_strides(place_of, strides.data() + (strides.size() - dims));
  };
  for (const size_t f : factors) {
    const Variables &variables = factors_[f].variables;
    part(factors_[f].table, [&](size_t d) { return place_[index(variables[d])]; });
  }
  if (outside >= 0) part(outside, [](size_t d) { return d; });
  int64_t size = 1;
  for (size_t i = kept.size(); i-- > 0;) {
    const auto d = static_cast<size_t>(kept[i]);
    result_strides[d] = size;
    size *= shape[d];
  }
  for (const int32_t d : kept) result_shape.push_back(shape[static_cast<size_t>(d)]);
  double *result = tables_.space(size);
  std::fill(result, result + size, kInfinite);
  int64_t entries = 1;
  for (const int64_t extent : shape) entries *= extent;
  // Pieces of the longest dim, so that the clock is looked at in time.
  const auto cut = static_cast<size_t>(std::max_element(shape.begin(), shape.end()) - shape.begin());
  const int64_t extent = shape[cut];
  const int64_t step = std::max<int64_t>(1, kPieceEntries / (entries / extent));
  for (int64_t begin = 0; begin < extent; begin += step) {
    check(stop);
    std::vector<const double *> at(data);
    shape[cut] = std::min(step, extent - begin);
    for (size_t p = 0; p < at.size(); ++p) at[p] += begin * strides[p * dims + cut];
    hidet_dist::lower_by_sums(static_cast<int32_t>(dims), shape.data(), static_cast<int32_t>(at.size()), at.data(),
                              strides.data(), result_strides.data(), result + begin * result_strides[cut]);
  }
  // Infinite entries are combinations that no plan has; a table of nothing else stays as it is.
  const double lowest = hidet_dist::least_entry(result, size), offset = lowest < kInfinite ? lowest : 0.0;
  hidet_dist::subtract(offset, size, result);
  return {tables_.add(result_shape, result), offset};
}

void hidet_dist_network::eliminate(int64_t length, const int64_t *order, hidet_dist_elimination_stop stop) {
  Key key;
  for (int64_t n = 0; n < length; ++n) {
    if (static_cast<size_t>(n) % kCheckSteps == 0) check(stop);
    const auto v = static_cast<Variable>(order[n]);
    Bucket bucket{v, {}, {}, {}, {-1, 0.0}};
    for (const size_t f : of_variable_[index(v)]) {
      if (gone_[f]) continue;
      gone_[f] = 1;
      bucket.factors.push_back(f);
      for (const Variable u : factors_[f].variables) {
        if (u != v && std::find(bucket.neighbours.begin(), bucket.neighbours.end(), u) == bucket.neighbours.end())
          bucket.neighbours.push_back(u);
      }
    }
    Variables scope(bucket.neighbours);
    scope.push_back(v);
    begin_scope(scope);
    key.clear();
    append_factors(key, bucket.factors);
    key.push_back(sizes_[index(v)]);
    key.push_back(static_cast<int64_t>(scope.size()));
    const auto known = tables_.left.find(key);
    if (known != tables_.left.end()) {
      bucket.left = known->second;
    } else {
      tables_.reserve(entries(bucket.neighbours));
      std::vector<int32_t> kept(bucket.neighbours.size());
      for (size_t i = 0; i < kept.size(); ++i) kept[i] = static_cast<int32_t>(i);
      bucket.left = least(bucket.factors, -1, scope, kept, stop);
      tables_.left.emplace(key, bucket.left);
    }
    constant += bucket.left.offset;
    add({bucket.left.table, bucket.neighbours});
    buckets.push_back(std::move(bucket));
  }
}

void hidet_dist_network::values(int64_t *values) const {
  std::fill(values, values + sizes_.size(), 0);
  std::vector<double> line;
  for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket) {
    const auto size = static_cast<size_t>(sizes_[index(bucket->variable)]);
    line.assign(size, 0.0);
    for (const size_t f : bucket->factors) {
      const Table &table = tables_.all[static_cast<size_t>(factors_[f].table)];
      const Variables &variables = factors_[f].variables;
      int64_t at = 0, step = 0, stride = 1;
      for (size_t d = variables.size(); d-- > 0; stride *= table.shape[d]) {
        if (variables[d] == bucket->variable)
          step = stride;
        else
          at += values[index(variables[d])] * stride;
      }
      for (size_t k = 0; k < size; ++k) line[k] += table.data[static_cast<size_t>(at) + k * static_cast<size_t>(step)];
    }
    values[index(bucket->variable)] = std::min_element(line.begin(), line.end()) - line.begin();
  }
}

void hidet_dist_network::least_over(int64_t count, const int64_t *kept, double *result) const {
  const auto dims = static_cast<size_t>(count);
  std::vector<int64_t> shape(dims), strides, result_strides(dims);
  std::vector<size_t> place(sizes_.size());
  int64_t size = 1;
  for (size_t d = dims; d-- > 0;) {
    shape[d] = sizes_[static_cast<size_t>(kept[d])];
    place[static_cast<size_t>(kept[d])] = d;
    result_strides[d] = size;
    size *= shape[d];
  }
  std::vector<const double *> data;
  for (size_t f = 0; f < factors_.size(); ++f) {
    const Variables &variables = factors_[f].variables;
    if (gone_[f] || variables.empty()) continue;
    const Table &table = tables_.all[static_cast<size_t>(factors_[f].table)];
    data.push_back(table.data);
    strides.resize(strides.size() + dims);
    table.write_strides([&](size_t d) { return place[index(variables[d])]; }, strides.data() + (strides.size() - dims));
  }
  std::fill(result, result + size, kInfinite);
  hidet_dist::lower_by_sums(static_cast<int32_t>(dims), shape.data(), static_cast<int32_t>(data.size()), data.data(),
                            strides.data(), result_strides.data(), result);
}

// The least sum, over all variables of a scope but `left`, of factors and of the table outside. Equal sums are looked up.
Left hidet_dist_network::least_outside(const std::vector<size_t> &factors, const Variables &scope, const Left &outside,
                                       const Variables &left, hidet_dist_elimination_stop stop) {
  begin_scope(scope);
  Key key;
  append_factors(key, factors);
  key.push_back(outside.table);
  std::vector<int32_t> kept;
  for (const Variable v : left) {
    kept.push_back(place_[index(v)]);
    key.push_back(-1 - kept.back());
  }
  for (const Variable v : scope) key.push_back(sizes_[index(v)]);
  key.push_back(-static_cast<int64_t>(scope.size()));  // keys of eliminations end with a positive number
  auto known = tables_.left.find(key);
  if (known == tables_.left.end()) {
    tables_.reserve(entries(left));
    known = tables_.left.emplace(key, least(factors, outside.table, scope, kept, stop)).first;
  }
  return {known->second.table, outside.offset + known->second.offset};
}

void hidet_dist_network::marginals(int64_t count, double work_limit, hidet_dist_elimination_stop stop, double *result) {
  std::vector<size_t> position(sizes_.size());
  for (size_t b = 0; b < buckets.size(); ++b) position[index(buckets[b].variable)] = b;
  // A bucket's message and the table outside give the marginals of its neighbours, mostly from fewer entries than the
  // neighbours' own buckets have: the smallest such table of each variable, its size first.
  std::vector<std::pair<double, const Bucket *>> smallest(sizes_.size(), {kInfinite, nullptr});
  const double one = 0.0;
  const int64_t nothing = tables_.add(0, nullptr, &one);
  for (size_t b = buckets.size(); b-- > 0;) {
    if (b % kCheckSteps == 0) check(stop);
    Bucket &bucket = buckets[b];
    const double own = entries(bucket.neighbours);
    if (own * static_cast<double>(sizes_[index(bucket.variable)]) > work_limit) throw TooWide();
    if (bucket.neighbours.empty()) {
      bucket.outside = {nothing, constant - bucket.left.offset};
    } else {
      // The message of a bucket went to its parent, the neighbour eliminated first; the rest there is outside.
      size_t first = buckets.size();
      for (const Variable u : bucket.neighbours) first = std::min(first, position[index(u)]);
      const Bucket &parent = buckets[first];
      std::vector<size_t> others;
      for (const size_t f : parent.factors) {
        if (f != given + b) others.push_back(f);
      }
      Variables scope(parent.neighbours);
      scope.push_back(parent.variable);
      bucket.outside = least_outside(others, scope, parent.outside, bucket.neighbours, stop);
      bucket.outside.offset -= bucket.left.offset;
    }
    for (const Variable u : bucket.neighbours) {
      if (own < smallest[index(u)].first) smallest[index(u)] = {own, &bucket};
    }
  }
  std::vector<size_t> begin(static_cast<size_t>(count) + 1);
  for (size_t v = 0; v < static_cast<size_t>(count); ++v) begin[v + 1] = begin[v] + static_cast<size_t>(sizes_[v]);
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (b % kCheckSteps == 0) check(stop);
    const Bucket &bucket = buckets[b];
    const size_t v = index(bucket.variable);
    if (v >= static_cast<size_t>(count)) continue;
    double *line = result + begin[v];
    if (sizes_[v] == 1) {
      *line = constant;
      continue;
    }
    Left least;
    if (smallest[v].first < entries(bucket.neighbours) * static_cast<double>(sizes_[v])) {
      const Bucket &behind = *smallest[v].second;
      const auto message = given + static_cast<size_t>(&behind - buckets.data());
      least = least_outside({message}, behind.neighbours, behind.outside, {bucket.variable}, stop);
      least.offset += behind.left.offset;
    } else {
      Variables scope(bucket.neighbours);
      scope.push_back(bucket.variable);
      least = least_outside(bucket.factors, scope, bucket.outside, {bucket.variable}, stop);
    }
    const double *table = tables_.all[static_cast<size_t>(least.table)].data;
    for (size_t k = 0; k < static_cast<size_t>(sizes_[v]); ++k) line[k] = table[k] + least.offset;
  }
}

namespace {

// Runs a function, and turns what it throws into a status.
template <typename Function>
int32_t status_of(const Function &function) {
  try {
    function();
    return HIDET_DIST_ELIMINATED;
  } catch (const Stopped &) {
    return HIDET_DIST_ELIMINATION_STOPPED;
  } catch (const TooWide &) {
    return HIDET_DIST_ELIMINATION_TOO_WIDE;
  } catch (const std::exception &) {
    return HIDET_DIST_ELIMINATION_NO_MEMORY;
  }
}

}  // namespace

extern "C" hidet_dist_network *hidet_dist_network_create(hidet_dist_tables *tables, int64_t count, const int64_t *sizes,
                                                         int64_t factors, const int64_t *factor_table,
                                                         const int64_t *factor_begin, const int64_t *variables) {
  try {
    std::vector<Factor> given(static_cast<size_t>(factors));
    for (size_t f = 0; f < given.size(); ++f) {
      given[f].table = factor_table[f];
      for (int64_t i = factor_begin[f]; i < factor_begin[f + 1]; ++i)
        given[f].variables.push_back(static_cast<Variable>(variables[i]));
    }
    return new hidet_dist_network(*tables, {sizes, sizes + count}, std::move(given));
  } catch (const std::exception &) {
    return nullptr;
  }
}

extern "C" void hidet_dist_network_destroy(hidet_dist_network *network) { delete network; }

extern "C" int32_t hidet_dist_network_order(const hidet_dist_network *network, const uint8_t *kept, int32_t by_table,
                                            double work_limit, hidet_dist_elimination_stop stop, int64_t *order,
                                            int64_t *length, double *work) {
  return status_of([&] {
    const auto chosen = network->order(kept, by_table != 0, work_limit, stop);
    std::copy(chosen.variables.begin(), chosen.variables.end(), order);
    *length = static_cast<int64_t>(chosen.variables.size());
    work[0] = chosen.work;
    work[1] = chosen.largest;
  });
}

extern "C" int32_t hidet_dist_network_eliminate(hidet_dist_network *network, int64_t length, const int64_t *order,
                                                hidet_dist_elimination_stop stop) {
  return status_of([&] { network->eliminate(length, order, stop); });
}

extern "C" double hidet_dist_network_constant(const hidet_dist_network *network) { return network->constant; }

extern "C" int32_t hidet_dist_network_values(const hidet_dist_network *network, int64_t *values) {
  return status_of([&] { network->values(values); });
}

extern "C" int32_t hidet_dist_network_least_over(const hidet_dist_network *network, int64_t count, const int64_t *kept,
                                                 double *result) {
  return status_of([&] { network->least_over(count, kept, result); });
}

extern "C" int32_t hidet_dist_network_marginals(hidet_dist_network *network, int64_t count, double work_limit,
                                                hidet_dist_elimination_stop stop, double *result) {
  return status_of([&] { network->marginals(count, work_limit, stop, result); });
}
