// The alternation of bounding and searching. Each round lets the bound ascend and the search descend and polish, at the
// same time if there are two threads; neither depends on what the other does in the round, so that the number of threads
// makes no difference to the result, unless seconds are limited. Strategies that the bound rules out are removed, and the
// nodes merged anew. Once the bound of a small problem stalls, branch and bound takes its place.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <ctime>
#include <exception>
#include <future>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "../solvers.hpp"
#include "ascent.hpp"
#include "branching.hpp"
#include "merge.hpp"
#include "problem.hpp"
#include "search.hpp"

namespace hidet_dist::pairwise {

namespace {

constexpr int kFirstPasses = 5;  // before the first descent, forwards and backwards
constexpr int kPassesPerRound = 25;
constexpr int kPartsPerRound = 10;  // of branch and bound
constexpr double kMostRemoved = 0.2;  // of the strategies, until the problem is merged anew
constexpr double kMostToBranch = 3e6;  // entries of matrices of a problem for branch and bound
constexpr double kLeastScale = 1e-3;  // of costs, as a part of that of a forbidden pair

// The seconds since it was made, of the wall or of the process's CPU time.
class Clock {
 public:
  explicit Clock(const hidet_dist_pairwise_options &options)
      : cpu_(options.cpu_time != 0), threads_(static_cast<double>(std::max<std::int64_t>(options.threads, 1))) {}

  double seconds() const {
    if (cpu_) return static_cast<double>(std::clock() - cpu_start_) / CLOCKS_PER_SEC / threads_;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const bool cpu_;
  const double threads_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::clock_t cpu_start_ = std::clock();
};

class Solver {
 public:
  Solver(Problem problem, const hidet_dist_pairwise_options &options, double forbidden,
         hidet_dist_pairwise_progress progress, void *context, const Clock &clock)
      : problem_(std::make_unique<Problem>(std::move(problem))),
        options_(options),
        forbidden_(forbidden),
        progress_(progress),
        context_(context),
        clock_(clock),
        seed_(static_cast<std::uint64_t>(options.seed)),
        bound_(problem_->base_cost) {
    renew({});
  }

  void run() {
    if (problem_->nodes == 0) search_->offer({});
    for (int count = 0; count < kFirstPasses && !over(); ++count) ascent_->step(cutoff());
    do {
      ++rounds_;
      round();
      report();
    } while (!over() && (options_.rounds == 0 || rounds_ < options_.rounds));
  }

  bool has_best() const { return !best_.empty() || search_->has_best(); }
  // Of the nodes as given.
  std::vector<int> best() const { return best_is_there() ? problem_->given_strategies(search_->best()) : best_; }
  double cost() const { return std::min(best_cost_, search_->has_best() ? search_->cost() : best_cost_); }
  double bound() const { return std::min(bound_, cutoff()); }
  std::int64_t rounds() const { return rounds_; }

 private:
  bool best_is_there() const { return search_->has_best() && search_->cost() <= best_cost_; }
  double cutoff() const { return cost(); }

  // Of the thread that searches; the other one follows `stopped_`.
  bool over() {
    if (!stopped_ && options_.seconds > 0 && clock_.seconds() >= options_.seconds) stopped_ = true;
    if (!stopped_ && has_best() && cost() - bound() <= options_.gap * cost()) stopped_ = true;
    return stopped_;
  }

  void report() {
    if (progress_ != nullptr && progress_(context_, clock_.seconds(), has_best() ? cost() : forbidden_, bound()) != 0)
      stopped_ = true;
  }

  // Makes what works on the problem, which may be new.
  void renew(const Duals &duals) {
    search_ = std::make_unique<Search>(
        *problem_, seed_ + static_cast<std::uint64_t>(renewals_++), [this] { return over(); }, [this] { report(); });
    ascent_ = std::make_unique<Ascent>(*problem_, duals, bound_);
  }

  void round() {
    const double known = cutoff();
    const std::vector<double> prices = ascent_->prices();
    const std::vector<int> start =
        branching_ && !branching_->rounded().empty() ? branching_->rounded() : ascent_->bounds().rounded();
    const double scale = bound_ > 0 ? bound_ : kLeastScale * problem_->big;
    const bool at_once = options_.threads > 1;
    const bool timed = at_once && options_.seconds > 0;  // then neither waits for the other
    std::atomic<bool> bounded{false}, searched{false};
    const auto raise_bound = [&] {
      if (branching_) {
        for (int part = 0; (part < kPartsPerRound || (timed && !searched)) && !stopped_; ++part)
          branching_->step(known, [this] { return stopped_.load(); });
      } else {
        for (int pass = 0; (pass < kPassesPerRound || (timed && !searched)) && !stopped_; ++pass) {
          if (ascent_->bound() >= known) break;
          ascent_->step(known);
        }
      }
      bounded = true;
    };
    const auto search = [&] {
      search_->offer(start);
      if (!over()) search_->descend(start, prices, scale);
      if (search_->has_best() && !over()) search_->polish(prices);
      searched = true;  // now the other thread ends its part of the round; until then, polishing goes on
      while (timed && search_->has_best() && !bounded && !over()) search_->polish(prices);
    };
    if (at_once) {
      auto other = std::async(std::launch::async, raise_bound);
      try {
        search();
      } catch (...) {
        stopped_ = true;
        throw;
      }
      other.get();
    } else {
      raise_bound();
      search();
    }
    take_bound(known);
  }

  void take_bound(double known) {
    if (branching_) {
      if (!branching_->best().empty() && branching_->cost() < cost()) {
        best_cost_ = branching_->cost();
        best_ = problem_->given_strategies(branching_->best());
        search_->offer(branching_->best());
      }
      bound_ = std::max(bound_, std::min(known, branching_->done() ? known : branching_->bound()));
      if (branching_->done()) bound_ = std::max(bound_, cost());
      return;
    }
    bound_ = std::max(bound_, ascent_->bound());
    const double removed = ascent_->bounds().removals();
    if (has_best() && removed > kMostRemoved * static_cast<double>(problem_->cost.size())) merge_anew();
    if (has_best() && ascent_->stalled() && static_cast<double>(problem_->entries.size()) <= kMostToBranch)
      branching_ = std::make_unique<Branching>(*problem_, ascent_->duals(), bound_);
  }

  void merge_anew() {
    best_cost_ = cost();
    best_ = best();
    auto made = std::make_unique<Problem>();
    Duals duals = ascent_->duals();
    if (!without(*problem_, ascent_->bounds().removed(), *made, duals)) {  // nothing is as good as the best
      bound_ = best_cost_;
      return;
    }
    const std::vector<int> here = made->assignment_of(best_);
    if (here.empty() && made->nodes > 0) return;  // rounding has ruled it out: leave the problem as it is
    search_.reset();
    ascent_.reset();
    problem_ = std::move(made);
    renew(duals);
    search_->offer(here);
    for (int count = 0; count < kFirstPasses; ++count) ascent_->step(cutoff());
  }

  std::unique_ptr<Problem> problem_;
  const hidet_dist_pairwise_options options_;
  const double forbidden_;
  const hidet_dist_pairwise_progress progress_;
  void *const context_;
  const Clock &clock_;
  const std::uint64_t seed_;
  std::unique_ptr<Search> search_;
  std::unique_ptr<Ascent> ascent_;
  std::unique_ptr<Branching> branching_;
  std::vector<int> best_;  // of the nodes as given, from a problem before or from branch and bound
  double best_cost_ = std::numeric_limits<double>::infinity();
  double bound_;
  std::atomic<bool> stopped_{false};
  std::int64_t rounds_ = 0;
  int renewals_ = 0;
};

}  // namespace

}  // namespace hidet_dist::pairwise

extern "C" int32_t hidet_dist_pairwise_solve(const hidet_dist_pairwise_problem *given,
                                             const hidet_dist_pairwise_options *options,
                                             hidet_dist_pairwise_progress progress, void *context, int32_t *strategies,
                                             hidet_dist_pairwise_result *result) {
  using namespace hidet_dist::pairwise;
  try {
    if (options->seconds <= 0 && options->rounds <= 0)
      throw std::invalid_argument("the options limit neither seconds nor rounds");
    const Clock clock(*options);
    Problem problem;
    *result = {given->forbidden, 0.0, 0.0, 0};
    const ReductionLimits limits{options->entries > 0 ? options->entries : std::numeric_limits<std::int64_t>::max() / 4,
                                 [&] { return options->seconds > 0 && clock.seconds() >= options->seconds; }};
    try {
      if (!reduce(*given, limits, true, problem)) {
        result->seconds = clock.seconds();
        return reduce(*given, limits, false, problem) ? 3 : 2;
      }
    } catch (const OutOfTime &) {
      result->seconds = clock.seconds();
      return 1;
    }

    Solver solver(std::move(problem), *options, given->forbidden, progress, context, clock);
    solver.run();
    result->bound = solver.bound();
    result->rounds = solver.rounds();
    result->seconds = clock.seconds();
    if (!solver.has_best()) return 1;
    result->cost = solver.cost();
    const std::vector<int> best = solver.best();
    std::copy(best.begin(), best.end(), strategies);
    return 0;
  } catch (const TooLarge &error) {
    hidet_dist::set_search_error(error.what());
    return 4;
  } catch (const std::exception &error) {
    hidet_dist::set_search_error(error.what());
    return -1;
  }
}
