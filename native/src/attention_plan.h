#pragma once
// How one attention call is cut into pieces of work.
#include <vector>

#include "attention.h"

namespace tinykv {

// Some consecutive queries of a row, for the query heads that share one kv head.
struct Unit {
  int row;
  int kv_head;
  int first_token;
  int tokens;
  Visible seen;  // by any of its queries
  int kept_parts;
  int first_part;  // of those after the kept ones
  int parts;

  // The n-th part's place in the context, in multiples of kPart.
  int part(int n) const { return n < kept_parts ? n : first_part + n - kept_parts; }
};

struct Plan {
  std::vector<Unit> units;
  int most_rows = 0;      // query rows of the largest unit
  int parts = 0;          // of all units
  double operations = 0;  // multiplications and additions
};

// The units of a call; rows without queries or context have none. How a row is cut depends on that row alone.
Plan plan(const Attention& attention);

}  // namespace tinykv
