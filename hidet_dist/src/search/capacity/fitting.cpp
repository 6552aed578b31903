#include "fitting.hpp"

#include <algorithm>
#include <new>

namespace {

using hidet_dist::capacity::Entity;
using hidet_dist::capacity::Exceeded;
using hidet_dist::capacity::Input;
using hidet_dist::capacity::Interval;
using hidet_dist::capacity::Part;
using hidet_dist::capacity::Stopped;

constexpr size_t kCheckVisits = 64;               // of entities, from one call of the callback to the next
constexpr int64_t kNever = int64_t{1} << 59;      // bytes that fit no room; several of them add up without overflow

size_t index(int64_t number) { return static_cast<size_t>(number); }

int64_t most_of(const int64_t *bytes, size_t count) {
  return bytes == nullptr ? 0 : *std::max_element(bytes, bytes + count);
}

}  // namespace

hidet_dist_fitting::hidet_dist_fitting(const hidet_dist_capacity_problem &problem, const uint8_t *given, int64_t budget,
                                       int64_t least, int64_t most, int64_t rounds, hidet_dist_elimination_stop stop)
    : budget_(budget), given_least_(least), given_most_(most) {
  read(problem, given);
  for (size_t e = 0; e < entities_.size(); ++e) add_least(e, 1);
  propagate(rounds, stop);
}

void hidet_dist_fitting::read(const hidet_dist_capacity_problem &problem, const uint8_t *given) {
  const size_t count = index(problem.entities);
  entities_.resize(count);
  kept.resize(count);
  first_choice.assign(count + 1, 0);
  resident_spread_.resize(count);
  transient_spread_.resize(count);
  change_.assign(index(problem.points) + 1, 0);
  transient_room_.resize(index(problem.points));
  room_.resize(index(problem.points));
  inputs_.reserve(index(problem.input_begin[count]));
  allowed.resize(index(problem.input_begin[count]));
  const auto table = [&](int64_t begin) { return begin < 0 ? nullptr : problem.bytes + begin; };
  for (size_t e = 0; e < count; ++e) {
    Entity &entity = entities_[e];
    entity.choices = index(problem.choices[e]);
    entity.resident = problem.bytes + problem.resident[e];
    first_choice[e + 1] = first_choice[e] + entity.choices;
    for (size_t k = 0; k < entity.choices; ++k) {
      if (given[first_choice[e] + k]) kept[e].push_back(k);
    }
    for (size_t i = index(problem.interval_begin[e]); i < index(problem.interval_begin[e + 1]); ++i) {
      entity.intervals.push_back(
          {problem.interval_first[i], problem.interval_last[i], problem.bytes + problem.interval_bytes[i]});
    }
    entity.begin = index(problem.input_begin[e]);
    entity.end = index(problem.input_begin[e + 1]);
  }
  for (size_t e = 0; e < count; ++e) {
    for (size_t i = entities_[e].begin; i < entities_[e].end; ++i) {
      const size_t rows = index(problem.input_rows[i]), columns = index(problem.input_columns[i]);
      const int64_t *held = table(problem.input_held[i]), *working = table(problem.input_working[i]);
      inputs_.push_back({index(problem.input_producer[i]), problem.input_first[i], problem.input_last[i],
                         problem.specs + problem.input_produced[i], problem.specs + problem.input_consumed[i], rows,
                         columns, held, working, most_of(held, rows * columns) + most_of(working, rows * columns)});
      entities_[inputs_.back().producer].readers.push_back(e);
    }
  }
}

// Adds the least bytes of an entity to the sums, or subtracts them; notes what it holds above them at most.
void hidet_dist_fitting::add_least(size_t e, int64_t sign) {
  const auto extent = [&](const int64_t *bytes) {
    int64_t least = bytes[kept[e].front()], most = least;
    for (const size_t k : kept[e]) {
      least = std::min(least, bytes[k]);
      most = std::max(most, bytes[k]);
    }
    return std::pair(least, most);
  };
  const auto [least, most] = extent(entities_[e].resident);
  least_sum_ += sign * least;
  resident_spread_[e] = most - least;
  transient_spread_[e] = 0;
  for (const Interval &interval : entities_[e].intervals) {
    const auto [low, high] = extent(interval.bytes);
    change_[index(interval.first)] += sign * low;
    change_[index(interval.last) + 1] -= sign * low;
    transient_spread_[e] += high - low;
  }
}

// Finds the room at each point beside the least bytes of all entities.
void hidet_dist_fitting::find_room() {
  int64_t transient = 0, most = 0;
  for (size_t m = 0; m < room_.size(); ++m) {
    transient += change_[m];
    most = m ? std::max(most, transient) : transient;
    room_[m] = budget_ - least_sum_ - transient;
    transient_room_[m] = budget_ - transient;
  }
  least_resident = std::max(least_sum_, given_least_);
  most_resident = std::min(budget_ - most, given_most_);
  if (least_resident > most_resident) throw Exceeded();
  for (int64_t &room : transient_room_) room -= least_resident;
  resident_room_ = most_resident - least_sum_;
}

void hidet_dist_fitting::propagate(int64_t rounds, hidet_dist_elimination_stop stop) {
  std::vector<uint8_t> waiting(entities_.size(), 1);
  size_t visits = 0;
  bool first = true;
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t least = least_resident;
    find_room();
    if (!first && least_resident > least) std::fill(waiting.begin(), waiting.end(), 1);  // less room at all points
    first = false;
    if (std::find(waiting.begin(), waiting.end(), 1) == waiting.end()) break;
    for (size_t e = 0; e < entities_.size(); ++e) {
      if (!waiting[e]) continue;
      if (visits++ % kCheckVisits == 0 && stop()) throw Stopped();
      waiting[e] = 0;
      visit(e, waiting);
    }
  }
  find_room();
}

// Lists the points at which to add up bytes: where intervals begin, and where there is least room in them.
void hidet_dist_fitting::find_points(size_t e) {
  const Entity &entity = entities_[e];
  points_.clear();
  for (size_t i = entity.begin; i < entity.end; ++i) points_.push_back(inputs_[i].first);
  for (const Interval &interval : entity.intervals) {
    const auto begin = transient_room_.begin();
    points_.push_back(interval.first);
    points_.push_back(std::min_element(begin + interval.first, begin + interval.last + 1) - begin);
  }
  if (points_.empty()) points_.push_back(std::min_element(room_.begin(), room_.end()) - room_.begin());
  std::sort(points_.begin(), points_.end());
  points_.erase(std::unique(points_.begin(), points_.end()), points_.end());
}

// Keeps the points at which the most bytes around an entity exceed the room; elsewhere nothing can be removed.
void hidet_dist_fitting::keep_tight(size_t e) {
  const Entity &entity = entities_[e];
  int64_t resident = resident_spread_[e], transient = transient_spread_[e];
  bool settled = resident <= resident_room_;
  for (size_t i = entity.begin; i < entity.end; ++i) {
    resident += resident_spread_[inputs_[i].producer];
    transient += transient_spread_[inputs_[i].producer] + inputs_[i].most;
    settled = settled && allowed[i].empty();
  }
  const auto roomy = [&](int64_t m) {
    return room_[index(m)] >= resident + transient && transient_room_[index(m)] >= transient;
  };
  const auto end = std::remove_if(points_.begin(), points_.end(), roomy);
  // Without points, conversions and resident bytes remain to be looked at, unless there is nothing about them.
  good_.assign(settled && end == points_.begin() ? 0 : kept[e].size(), 1);
  points_.erase(end, points_.end());
  transient_at_.clear();
  room_at_.clear();
  for (const int64_t m : points_) {
    transient_at_.push_back(transient_room_[index(m)]);
    room_at_.push_back(room_[index(m)]);
  }
}

// Computes what each choice left holds above the least: resident bytes, and transient ones at the points.
void hidet_dist_fitting::add_extra(size_t e, Bytes &resident, Bytes &transient) const {
  const Entity &entity = entities_[e];
  const std::vector<size_t> &left = kept[e];
  const size_t count = points_.size();
  resident.resize(left.size());
  transient.assign(left.size() * count, 0);
  const auto least = [&](const int64_t *bytes) {
    int64_t result = bytes[left.front()];
    for (const size_t k : left) result = std::min(result, bytes[k]);
    return result;
  };
  const int64_t own = least(entity.resident);
  for (size_t i = 0; i < left.size(); ++i) resident[i] = entity.resident[left[i]] - own;
  for (const Interval &interval : entity.intervals) {
    const int64_t low = least(interval.bytes);
    for (size_t p = 0; p < count; ++p) {
      if (points_[p] < interval.first || points_[p] > interval.last) continue;
      for (size_t i = 0; i < left.size(); ++i) transient[i * count + p] += interval.bytes[left[i]] - low;
    }
  }
}

// Lists the distinct specs that the choices left of an entity require, and the place of each choice's among them.
void hidet_dist_fitting::find_columns(size_t e, const Input &input) {
  required_.clear();
  for (const size_t k : kept[e]) required_.push_back(input.consumed[k]);
  std::sort(required_.begin(), required_.end());
  required_.erase(std::unique(required_.begin(), required_.end()), required_.end());
  column_.clear();
  for (const size_t k : kept[e]) {
    const auto at = std::lower_bound(required_.begin(), required_.end(), input.consumed[k]);
    column_.push_back(static_cast<size_t>(at - required_.begin()));
  }
}

void hidet_dist_fitting::find_part(size_t number, size_t e, Part &part) {
  const Input &input = inputs_[number];
  const std::vector<size_t> &left = kept[input.producer];
  const size_t count = points_.size(), columns = required_.size();
  part.input = number;
  part.specs.clear();
  for (const size_t k : left) part.specs.push_back(input.produced[k]);
  std::sort(part.specs.begin(), part.specs.end());
  part.specs.erase(std::unique(part.specs.begin(), part.specs.end()), part.specs.end());
  const size_t rows = part.specs.size();
  part.alone = true;
  for (size_t i = entities_[e].begin; i < entities_[e].end; ++i) {
    if (i != number && inputs_[i].producer == input.producer) part.alone = false;
  }
  // The least of the choices that make each spec.
  add_extra(input.producer, producer_resident_, producer_transient_);
  Bytes transient(rows * count, kNever), sum(rows * count, kNever);
  for (size_t i = 0; i < left.size(); ++i) {
    const auto at = std::lower_bound(part.specs.begin(), part.specs.end(), input.produced[left[i]]);
    const auto s = static_cast<size_t>(at - part.specs.begin());
    for (size_t p = 0; p < count; ++p) {
      const int64_t own = producer_transient_[i * count + p];
      transient[s * count + p] = std::min(transient[s * count + p], own);
      sum[s * count + p] = std::min(sum[s * count + p], own + producer_resident_[i]);
    }
  }
  part.transient.resize(rows * columns * count);
  part.sum.resize(rows * columns * count);
  part.allowed.assign(rows * columns, 1);
  part.least_transient.assign(columns * count, kNever);
  part.least_sum.assign(columns * count, kNever);
  for (size_t s = 0; s < rows; ++s) {
    for (size_t r = 0; r < columns; ++r) {
      const size_t conversion = index(part.specs[s]) * input.columns + index(required_[r]);
      const bool possible = allowed[number].empty() || allowed[number][conversion];
      part.allowed[s * columns + r] = possible;
      for (size_t p = 0; p < count; ++p) {
        int64_t converted = possible ? 0 : kNever;
        if (possible && input.held && points_[p] >= input.first && points_[p] <= input.last)
          converted += input.held[conversion];
        if (possible && input.working && points_[p] == input.first) converted += input.working[conversion];
        const size_t at = (s * columns + r) * count + p, least = r * count + p;
        part.transient[at] = converted + transient[s * count + p];
        part.sum[at] = converted + sum[s * count + p];
        part.least_transient[least] = std::min(part.least_transient[least], part.transient[at]);
        part.least_sum[least] = std::min(part.least_sum[least], part.sum[at]);
      }
    }
  }
}

// Removes choices of an entity, of the producers that it reads, and conversions; the neighbours of each wait then.
void hidet_dist_fitting::visit(size_t e, std::vector<uint8_t> &waiting) {
  find_points(e);
  keep_tight(e);
  if (good_.empty()) return;
  const Entity &entity = entities_[e];
  const size_t count = points_.size(), choices = kept[e].size();
  add_extra(e, resident_, own_);
  whole_sum_ = transient_sum_ = own_;
  for (size_t i = 0; i < choices; ++i) {
    for (size_t p = 0; p < count; ++p) whole_sum_[i * count + p] += resident_[i];
    good_[i] = resident_[i] <= resident_room_;
  }
  size_t used = 0;
  for (size_t n = entity.begin; n < entity.end; ++n) {
    if (inputs_[n].producer == e) continue;
    if (used == parts_.size()) parts_.emplace_back();
    Part &part = parts_[used++];
    find_columns(e, inputs_[n]);
    find_part(n, e, part);
    const size_t columns = required_.size();
    for (size_t i = 0; i < choices; ++i) {
      const size_t r = column_[i];
      bool possible = false;
      for (size_t s = 0; s < part.specs.size(); ++s) possible = possible || part.allowed[s * columns + r];
      if (!possible) good_[i] = 0;
      if (!possible || !part.alone) continue;  // bytes of one producer must not count twice
      for (size_t p = 0; p < count; ++p) {
        transient_sum_[i * count + p] += part.least_transient[r * count + p];
        whole_sum_[i * count + p] += part.least_sum[r * count + p];
      }
    }
  }
  for (size_t i = 0; i < choices; ++i) {
    for (size_t p = 0; p < count && good_[i]; ++p) {
      good_[i] = transient_sum_[i * count + p] <= transient_at_[p] && whole_sum_[i * count + p] <= room_at_[p];
    }
  }
  if (std::find(good_.begin(), good_.end(), 1) == good_.end()) throw Exceeded();
  for (size_t n = 0; n < used; ++n) drop_conversions(e, parts_[n], waiting);
  if (std::find(good_.begin(), good_.end(), 0) != good_.end()) {
    keep(e, good_);
    wake(e, waiting);
  }
}

// Allows only conversions that fit beside a choice of their reader and the least around it.
void hidet_dist_fitting::drop_conversions(size_t e, const Part &part, std::vector<uint8_t> &waiting) {
  const Input &input = inputs_[part.input];
  find_columns(e, input);
  const size_t count = points_.size(), columns = required_.size(), rows = part.specs.size();
  std::vector<uint8_t> fits(rows * columns, 0);
  for (size_t i = 0; i < column_.size(); ++i) {
    if (!good_[i]) continue;
    const size_t r = column_[i];
    for (size_t s = 0; s < rows; ++s) {
      if (fits[s * columns + r] || !part.allowed[s * columns + r]) continue;
      bool fit = true;
      for (size_t p = 0; p < count && fit; ++p) {
        const size_t at = (s * columns + r) * count + p, own = i * count + p;
        int64_t transient = own_[own], whole = own_[own] + resident_[i];
        if (part.alone) {
          transient = transient_sum_[own] - part.least_transient[r * count + p];
          whole = whole_sum_[own] - part.least_sum[r * count + p];
        }
        fit = part.transient[at] + transient <= transient_at_[p] && part.sum[at] + whole <= room_at_[p];
      }
      fits[s * columns + r] = fit;
    }
  }
  if (fits == part.allowed) return;
  std::vector<uint8_t> &left = allowed[part.input];
  if (left.empty()) left.assign(input.rows * input.columns, 1);
  for (size_t s = 0; s < rows; ++s) {
    for (size_t r = 0; r < columns; ++r) {
      if (!fits[s * columns + r]) left[index(part.specs[s]) * input.columns + index(required_[r])] = 0;
    }
  }
  std::vector<uint8_t> good;
  for (const size_t k : kept[input.producer]) {
    const uint8_t *line = left.data() + index(input.produced[k]) * input.columns;
    good.push_back(std::any_of(required_.begin(), required_.end(), [&](int64_t d) { return line[index(d)]; }));
  }
  if (std::find(good.begin(), good.end(), 0) != good.end()) keep(input.producer, good);
  wake(input.producer, waiting);
}

// Keeps some of the choices of an entity.
void hidet_dist_fitting::keep(size_t e, const std::vector<uint8_t> &good) {
  std::vector<size_t> left;
  for (size_t i = 0; i < good.size(); ++i) {
    if (good[i]) left.push_back(kept[e][i]);
  }
  if (left.empty()) throw Exceeded();
  add_least(e, -1);
  kept[e] = std::move(left);
  add_least(e, 1);
}

// Makes an entity wait for a visit, and those that it shares tensors with.
void hidet_dist_fitting::wake(size_t e, std::vector<uint8_t> &waiting) const {
  waiting[e] = 1;
  for (const size_t reader : entities_[e].readers) waiting[reader] = 1;
  for (size_t i = entities_[e].begin; i < entities_[e].end; ++i) waiting[inputs_[i].producer] = 1;
}

extern "C" hidet_dist_fitting *hidet_dist_fitting_create(const hidet_dist_capacity_problem *problem,
                                                         const uint8_t *kept, int64_t budget, int64_t least,
                                                         int64_t most, int64_t rounds, hidet_dist_elimination_stop stop,
                                                         int32_t *status) {
  try {
    auto *fitting = new hidet_dist_fitting(*problem, kept, budget, least, most, rounds, stop);
    *status = HIDET_DIST_CAPACITY_FITS;
    return fitting;
  } catch (const Exceeded &) {
    *status = HIDET_DIST_CAPACITY_EXCEEDED;
  } catch (const Stopped &) {
    *status = HIDET_DIST_CAPACITY_STOPPED;
  } catch (const std::exception &) {
    *status = HIDET_DIST_CAPACITY_NO_MEMORY;
  }
  return nullptr;
}

extern "C" void hidet_dist_fitting_destroy(hidet_dist_fitting *fitting) { delete fitting; }

extern "C" void hidet_dist_fitting_kept(const hidet_dist_fitting *fitting, uint8_t *kept) {
  std::fill(kept, kept + fitting->first_choice.back(), uint8_t{0});
  for (size_t e = 0; e < fitting->kept.size(); ++e) {
    for (const size_t k : fitting->kept[e]) kept[fitting->first_choice[e] + k] = 1;
  }
}

extern "C" void hidet_dist_fitting_resident(const hidet_dist_fitting *fitting, int64_t *ends) {
  ends[0] = fitting->least_resident;
  ends[1] = fitting->most_resident;
}

extern "C" const uint8_t *hidet_dist_fitting_allowed(const hidet_dist_fitting *fitting, int64_t input) {
  const std::vector<uint8_t> &allowed = fitting->allowed[index(input)];
  return allowed.empty() ? nullptr : allowed.data();
}
