#pragma once
// One part of one unit, made ready for a kernel.
#include <vector>

#include "attention_plan.h"

namespace tinykv {

// A unit's n-th part; none without a unit.
struct NextPart {
  const Unit* unit;
  int n;
};

// A thread's working memory, kept from call to call.
class PartWorker {
 public:
  // Converts the unit's queries; attend() is for this unit from then on.
  void open(const Attention& attention, const Unit& unit);

  // Attention of the open unit over its n-th part. The beginning of `next`, which this thread is likely to come to, is
  // fetched meanwhile.
  void attend(const Attention& attention, const Unit& unit, int n, const Partial& partial, const NextPart& next);

  // A partial of this worker's own.
  Partial own(int which);

 private:
  int rows_ = 0;
  int value_stride_ = 0;
  std::vector<float> queries_;
  std::vector<float> scratch_;
  std::vector<float> partials_[2];
  std::vector<float> bias_;
  std::vector<int> first_;
  std::vector<int> last_;
  const char* keys_[kPart + kBlock];
  const char* values_[kPart + kBlock];

  int list_tokens(const Attention& attention, const Unit& unit, bool open, int begin, int end, int count);
  void limit_rows(const Attention& attention, const Unit& unit, bool open, int begin, int tokens);
  void read_mask(const Attention& attention, const Unit& unit, int begin, int end, int column);
};

// Floats of a partial of `rows` rows, and its pieces in a block of that size.
size_t partial_floats(int rows, int value_dim);
Partial partial_in(float* block, int rows, int value_dim);

}  // namespace tinykv
