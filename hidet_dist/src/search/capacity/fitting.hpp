// What is left of a problem once choices and conversions that fit nowhere are gone. See capacity.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

#include "hidet_dist/search/capacity.h"

namespace hidet_dist::capacity {

// No plan fits.
struct Exceeded : std::exception {};
// The callback said that the time is over.
struct Stopped : std::exception {};

struct Interval {
  int64_t first, last;   // points
  const int64_t *bytes;  // by choice
};

struct Input {
  size_t producer;
  int64_t first, last;                  // points
  const int64_t *produced, *consumed;   // by choice
  size_t rows, columns;                 // specs that may be produced, and required
  const int64_t *held, *working;        // by conversion; may be null
  int64_t most;                         // bytes of any conversion
};

struct Entity {
  size_t choices;
  const int64_t *resident;  // by choice
  std::vector<Interval> intervals;
  size_t begin, end;  // inputs
  std::vector<size_t> readers;
};

// Around an entity: what a producer's specs and conversions hold above the least, by spec, required spec and point.
struct Part {
  size_t input;
  std::vector<int64_t> specs;           // that the producer's choices left can make
  std::vector<int64_t> transient, sum;  // bytes: [spec][required][point]; `sum` has the resident ones, too
  std::vector<int64_t> least_transient, least_sum;  // over the specs: [required][point]
  std::vector<uint8_t> allowed;         // [spec][required]
  bool alone;                           // whether the producer makes no other input of the entity
};

}  // namespace hidet_dist::capacity

struct hidet_dist_fitting {
  hidet_dist_fitting(const hidet_dist_capacity_problem &problem, const uint8_t *kept, int64_t budget, int64_t least,
                     int64_t most, int64_t rounds, hidet_dist_elimination_stop stop);

  std::vector<std::vector<size_t>> kept;      // by entity
  std::vector<std::vector<uint8_t>> allowed;  // by input: the conversions left; empty if all are
  std::vector<size_t> first_choice;           // by entity, and the end: of all choices
  int64_t least_resident = 0, most_resident = 0;

 private:
  using Bytes = std::vector<int64_t>;
  using Input = hidet_dist::capacity::Input;
  using Part = hidet_dist::capacity::Part;

  void read(const hidet_dist_capacity_problem &problem, const uint8_t *given);
  void propagate(int64_t rounds, hidet_dist_elimination_stop stop);
  void find_room();
  void add_least(size_t entity, int64_t sign);
  void visit(size_t entity, std::vector<uint8_t> &waiting);
  void find_points(size_t entity);
  void keep_tight(size_t entity);
  void add_extra(size_t entity, Bytes &resident, Bytes &transient) const;
  void find_columns(size_t entity, const Input &input);
  void find_part(size_t number, size_t entity, Part &part);
  void drop_conversions(size_t entity, const Part &part, std::vector<uint8_t> &waiting);
  void keep(size_t entity, const std::vector<uint8_t> &good);
  void wake(size_t entity, std::vector<uint8_t> &waiting) const;

  const int64_t budget_, given_least_, given_most_;
  std::vector<hidet_dist::capacity::Entity> entities_;
  std::vector<Input> inputs_;
  // What the choices left of each entity hold at most above the least.
  Bytes resident_spread_, transient_spread_;
  // The sum of the least bytes: the resident ones, and by how much the others change at each point.
  int64_t least_sum_ = 0;
  Bytes change_;
  // The room at each point beside the least bytes: for transient ones beside the least resident ones, and for both.
  Bytes transient_room_, room_;
  int64_t resident_room_ = 0;

  // Of the entity at hand: points, the room there, and the bytes of its choices, alone and with the least around.
  Bytes points_, transient_at_, room_at_;
  Bytes resident_, own_, transient_sum_, whole_sum_;  // by choice; then by point
  std::vector<uint8_t> good_;                         // by choice
  std::vector<Part> parts_;
  // Of an input: the distinct specs that the entity's choices left require, and that of each choice.
  Bytes required_;
  std::vector<size_t> column_;
  Bytes producer_resident_, producer_transient_;
};
