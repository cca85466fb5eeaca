#pragma once
// How one attention call is cut into pieces of work.
#include <vector>

#include "attention.h"

namespace tinykv {

// What some queries see in one store, in parts of the context.
struct Sight {
  Visible seen;
  int kept_parts = 0;
  int first_part = 0;  // of those after the kept ones
  int parts = 0;

  // The n-th part's place in the context, in multiples of kPart.
  int part(int n) const { return n < kept_parts ? n : first_part + n - kept_parts; }
};

// Some consecutive queries of a row, for the query heads that share one kv head; the parts of the open store follow
// the others.
struct Unit {
  int row;
  int kv_head;
  int first_token;
  int tokens;
  Sight closed;
  Sight open;

  int parts() const { return closed.parts + open.parts; }
  bool is_open(int n) const { return n >= closed.parts; }
  const Sight& sight(int n) const { return is_open(n) ? open : closed; }
  int part(int n) const { return sight(n).part(is_open(n) ? n - closed.parts : n); }
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
