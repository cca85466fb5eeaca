#include "attention_plan.h"

#include <algorithm>
#include <numeric>

namespace tinykv {
namespace {

// Query rows of a unit when there are many queries: a multiple of the kernels' tile of 6 for the usual head counts.
constexpr int kUnitRows = 72;

int parts_up_to(int position) {
  return (position + kPart - 1) / kPart;
}

Sight sight_of(const Attention& attention, bool open, const Unit& unit) {
  const Visible first = visible_in(attention, open, unit.row, unit.first_token);
  const Visible last = visible_in(attention, open, unit.row, unit.first_token + unit.tokens - 1);
  Sight sight;
  sight.seen = {first.kept, first.begin, last.end};
  sight.kept_parts = parts_up_to(first.kept);
  sight.first_part = std::max(first.begin / kPart, sight.kept_parts);
  sight.parts = sight.kept_parts;
  if (first.begin < last.end) sight.parts += std::max(0, parts_up_to(last.end) - sight.first_part);
  return sight;
}

int tokens_of(const Sight& sight) {
  return sight.seen.kept + std::max(0, sight.seen.end - sight.seen.begin);
}

}  // namespace

Plan plan(const Attention& attention) {
  Plan plan;
  const int heads = attention.rows_per_token();
  const int most_tokens = std::max(1, kUnitRows / heads);
  // Long rows first: the threads end together when the last units are small ones.
  std::vector<int> rows_in_turn(attention.batch);
  std::iota(rows_in_turn.begin(), rows_in_turn.end(), 0);
  std::stable_sort(rows_in_turn.begin(), rows_in_turn.end(),
                   [&](int a, int b) { return attention.context_lens[a] > attention.context_lens[b]; });
  for (int row : rows_in_turn) {
    const int queries = attention.query_lens[row];
    // The last queries see most: with them first the threads end together.
    for (int tile = (queries + most_tokens - 1) / most_tokens - 1; tile >= 0; --tile) {
      Unit unit{};
      unit.row = row;
      unit.first_token = tile * most_tokens;
      unit.tokens = std::min(most_tokens, queries - unit.first_token);
      unit.closed = sight_of(attention, false, unit);
      if (attention.opens) unit.open = sight_of(attention, true, unit);
      for (unit.kv_head = 0; unit.kv_head < attention.kv_heads; ++unit.kv_head) plan.units.push_back(unit);

      const int rows = heads * unit.tokens;
      plan.most_rows = std::max(plan.most_rows, rows);
      plan.parts += unit.parts() * attention.kv_heads;
      plan.operations += 2.0 * rows * attention.kv_heads * (tokens_of(unit.closed) + tokens_of(unit.open)) *
                         (attention.key_dim + attention.value_dim);
    }
  }
  return plan;
}

}  // namespace tinykv
