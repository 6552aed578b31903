#include "step.hpp"

#include <algorithm>
#include <utility>

namespace hidet_dist::frontier {

namespace {

constexpr size_t kCheckLabels = 1 << 12;   // from one check of the memory limit to the next
constexpr size_t kCheckVisits = 1 << 20;  // pairs of labels, from one call of the callback to the next

}  // namespace

Step::Step(const Node &node, const Bounds &bounds, std::function<void(size_t)> reserve, std::function<void()> check)
    : node_(node), byte_bounds_(bounds), reserve_(std::move(reserve)), check_(std::move(check)) {
  const auto size = static_cast<size_t>(node.shape.back());
  place_.resize(node.shape.size() - 1);
  for (std::vector<double> *line : {&inside_, &paid_, &always_}) line->resize(size);
  at_.assign(node.at.size(), std::vector<double>(size));
  first_.resize(node.behind.size());
  last_.resize(node.behind.size());
  chosen_.resize(node.behind.size());
  rest_.resize(node.behind.size() + 1);
  columns_.resize(node.bytes->width);
}

Outcome Step::run(double limit, int64_t joined, int64_t comparisons, Labels &labels) {
  limit_ = limit;
  joined_left_ = joined;
  comparisons_left_ = comparisons;
  counts_only_ = false;
  bounds.clear();
  clear();  // what is left of a run that had too many labels
  bound_.clear();
  int64_t combinations = 1;
  for (size_t d = 0; d + 1 < node_.shape.size(); ++d) combinations *= node_.shape[d];
  labels.clear();
  labels.width = node_.bytes->width;
  labels.behinds = node_.behind.size();
  reserve_(static_cast<size_t>(combinations + 1) * sizeof(int32_t));
  labels.starts.assign(1, 0);
  labels.starts.reserve(static_cast<size_t>(combinations + 1));
  const double offset = node_.offset + node_.outside_offset;
  for (int64_t c = 0; c < combinations; ++c) {
    if (node_.message[c] + node_.outside[c] + offset < limit) {
      begin(c);
      const double outside = node_.outside[c] + node_.outside_offset;
      for (size_t k = 0; k < inside_.size(); ++k) {
        least_ = inside_[k] + outside;
        if (!(least_ < limit)) continue;
        value_ = k;
        bool any = true;
        rest_.back() = 0.0;
        for (size_t n = node_.behind.size(); n-- > 0 && any;) {
          const Behind &behind = node_.behind[n];
          int64_t at = static_cast<int64_t>(k) * behind.strides.back();
          for (size_t d = 0; d < place_.size(); ++d) at += place_[d] * behind.strides[d];
          first_[n] = behind.labels->starts[static_cast<size_t>(at)];
          last_[n] = behind.labels->starts[static_cast<size_t>(at) + 1];
          any = first_[n] < last_[n];
          if (any) rest_[n] = rest_[n + 1] + behind.labels->excess[static_cast<size_t>(first_[n])];
        }
        if (any) join(0, 0.0);
        if (joined_left_ < 0) return Outcome::kTooManyJoined;
      }
      if (!counts_only_) finish(c, labels);
    }
    labels.starts.push_back(static_cast<int32_t>(labels.size()));
  }
  if (!counts_only_) return Outcome::kDone;
  bounds.swap(bound_);
  return Outcome::kTooManyCompared;
}

// Sums the tables that a combination needs, for each value of the variable.
void Step::begin(int64_t combination) {
  for (size_t d = place_.size(); d-- > 0; combination /= node_.shape[d]) place_[d] = combination % node_.shape[d];
  sum(node_.factors, inside_);
  sum(node_.paid, paid_);
  sum(node_.always, always_);
  for (size_t i = 0; i < at_.size(); ++i) sum(node_.at[i], at_[i]);
}

void Step::sum(const std::vector<Part> &parts, std::vector<double> &line) const {
  std::fill(line.begin(), line.end(), 0.0);
  for (const Part &part : parts) {
    const double *data = part.data;
    for (size_t d = 0; d < place_.size(); ++d) data += place_[d] * part.strides[d];
    const int64_t stride = part.strides.back();
    for (size_t k = 0; k < line.size(); ++k) line[k] += data[static_cast<int64_t>(k) * stride];
  }
}

// Extends labels of the nodes behind from `depth` on, as long as sums with their excess are below the limit.
void Step::join(size_t depth, double excess) {
  if (depth == chosen_.size()) {
    add(excess);
    return;
  }
  const std::vector<double> &own = node_.behind[depth].labels->excess;
  for (int32_t i = first_[depth]; i < last_[depth]; ++i) {
    const double more = excess + own[static_cast<size_t>(i)];
    if (!(least_ + (more + rest_[depth + 1]) < limit_) || joined_left_ < 0) break;
    if (++visited_ % kCheckVisits == 0) check_();
    chosen_[depth] = i;
    join(depth + 1, more);
  }
}

// Adds a label, if it can fit.
void Step::add(double excess) {
  --joined_left_;
  const size_t width = columns_.size(), behinds = chosen_.size();
  double paid = paid_[value_];
  for (size_t n = 0; n < behinds; ++n) paid += node_.behind[n].labels->paid[static_cast<size_t>(chosen_[n])];
  if (width > 0) {
    const auto held = [&](size_t n) {
      const Labels &labels = *node_.behind[n].labels;
      return labels.held.data() + static_cast<size_t>(chosen_[n]) * labels.width;
    };
    double always = always_[value_];
    for (size_t n = 0; n < behinds; ++n) always += held(n)[0];
    double most = always + byte_bounds_.floor;
    for (size_t n = 0; n < behinds; ++n) most = std::max(most, held(n)[1] + (always - held(n)[0]));
    size_t column = 2;
    for (size_t i = 0; i < at_.size(); ++i) {
      const Touched &touched = node_.bytes->touched[i];
      double nbytes = always + at_[i][value_];
      for (const Touched::Column &from : touched.columns)
        nbytes += held(from.behind)[from.column] - held(from.behind)[0];
      if (touched.decided) {
        most = std::max(most, nbytes + touched.least);
      } else {
        if (nbytes + touched.least > byte_bounds_.most) return;
        columns_[column++] = nbytes;
      }
    }
    if (most > byte_bounds_.most) return;
    columns_[0] = always;
    columns_[1] = most;
  }
  bound_.push_back(least_ + excess);
  if (counts_only_) return;
  if (bound_.size() % kCheckLabels == 0)
    reserve_((bound_.size() + kCheckLabels) * (Labels::line_bytes(width, behinds) + 3 * sizeof(double)));
  const double cost = inside_[value_] + excess;
  cost_.push_back(cost);
  lines_.push_back(cost - paid);
  lines_.push_back(paid);
  lines_.insert(lines_.end(), columns_.begin(), columns_.end());
  values_.push_back(static_cast<int32_t>(value_));
  behind_.insert(behind_.end(), chosen_.begin(), chosen_.end());
}

// Keeps the labels of a combination that no other one dominates.
void Step::finish(int64_t combination, Labels &labels) {
  const size_t width = columns_.size(), behinds = chosen_.size(), count = cost_.size();
  const double message = node_.message[combination] + node_.offset;
  const double *const bound = bound_.data() + (bound_.size() - count);
  if (!dominance_.select(count, 2 + width, lines_.data(), comparisons_left_, selected_)) {
    counts_only_ = true;
  } else {
    std::stable_sort(selected_.begin(), selected_.end(), [&](int32_t a, int32_t b) {
      return cost_[static_cast<size_t>(a)] < cost_[static_cast<size_t>(b)];
    });
    for (const int32_t selected : selected_) {
      const auto i = static_cast<size_t>(selected);
      const double *line = lines_.data() + i * (2 + width);
      labels.excess.push_back(cost_[i] - message);
      labels.paid.push_back(line[1]);
      labels.held.insert(labels.held.end(), line + 2, line + 2 + width);
      labels.value.push_back(values_[i]);
      labels.behind.insert(labels.behind.end(), behind_.data() + i * behinds, behind_.data() + (i + 1) * behinds);
      bounds.push_back(bound[i]);
    }
  }
  clear();
}

void Step::clear() {
  for (std::vector<double> *each : {&lines_, &cost_}) each->clear();
  for (std::vector<int32_t> *each : {&values_, &behind_}) each->clear();
}

}  // namespace hidet_dist::frontier
