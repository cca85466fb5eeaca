#pragma once
// What attention over pages must give, in double precision.
#include <algorithm>
#include <cmath>

#include "attention_case.h"

namespace test {

// Element `d` of the row in a slot.
inline double element(const char* rows, size_t slot, int dim, int d, const Format& format) {
  const char* row = rows + slot * format.row_bytes(dim);
  if (format.bits == 0) return to_double(row + d * size_of(format.dtype), format.dtype);
  int number = 0;
  for (int bit = 0; bit < format.bits; ++bit) {
    const int at = d * format.bits + bit;
    number |= (row[at / 8] >> (at % 8) & 1) << bit;
  }
  const int groups = dim / format.group_size, group = d / format.group_size;
  const char* affine = row + format.packed_bytes(dim);
  return number * to_double(affine + group * size_of(format.dtype), format.dtype) +
         to_double(affine + (groups + group) * size_of(format.dtype), format.dtype);
}

// One query's output in double precision.
inline std::vector<double> expected(const Attention& a, int row, int head, int token) {
  const Visible seen = visible(a, row, token);
  const int64_t* strides = a.query_strides;
  const int64_t query = row * strides[0] + head * strides[1] + token * strides[2];
  const int place = a.context_lens[row] - a.query_lens[row] + token;
  const bool full = a.opens && place < a.full_until[row];
  std::vector<double> scores, out(a.value_dim, 0);
  std::vector<size_t> slots;
  std::vector<const Store*> stores;
  for (int position = 0; position < a.context_lens[row]; ++position) {
    if (position >= seen.end || (position >= seen.kept && position < seen.begin)) continue;
    const bool own = full || position / a.page_size == place / a.page_size;
    const Store& store = a.opens && own ? a.open : a.closed;
    const size_t page = store.pages_of(row)[position / a.page_size];
    const size_t slot = (page * a.kv_heads + head / a.rows_per_token()) * a.page_size + position % a.page_size;
    double score = 0;
    for (int d = 0; d < a.key_dim; ++d)
      score += to_double(a.queries + (query + d) * size_of(a.dtype), a.dtype) *
               element(store.keys, slot, a.key_dim, d, store.key_format);
    score *= a.scale;
    if (a.softcap != 0) score = a.softcap * std::tanh(score / a.softcap);
    const int64_t at = token * a.mask_strides[2] + position;
    if (a.mask == MaskKind::boolean && !a.mask_data[at]) continue;
    if (a.mask == MaskKind::additive) score += reinterpret_cast<const float*>(a.mask_data)[at];
    scores.push_back(score);
    slots.push_back(slot);
    stores.push_back(&store);
  }
  double highest = a.sinks ? a.sinks[head] : -INFINITY, sum = 0;
  for (double score : scores) highest = std::max(highest, score);
  if (a.sinks) sum = std::exp(a.sinks[head] - highest);
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i] == -INFINITY) continue;
    const double weight = std::exp(scores[i] - highest);
    sum += weight;
    for (int d = 0; d < a.value_dim; ++d)
      out[d] += weight * element(stores[i]->values, slots[i], a.value_dim, d, stores[i]->value_format);
  }
  for (double& x : out) x = sum > 0 ? x / sum : 0;
  return out;
}

inline double largest_error(const Memory& memory) {
  const Attention& a = memory.attention;
  double worst = 0;
  for (int row = 0; row < a.batch; ++row)
    for (int head = 0; head < a.query_heads; ++head)
      for (int token = 0; token < a.query_len; ++token) {
        std::vector<double> right(a.value_dim, 0);
        if (token < a.query_lens[row]) right = expected(a, row, head, token);
        const size_t at = ((size_t(row) * a.query_heads + head) * a.query_len + token) * a.value_dim;
        for (int d = 0; d < a.value_dim; ++d) {
          const double error = std::abs(to_double(a.out + (at + d) * size_of(a.dtype), a.dtype) - right[d]);
          worst = error <= worst ? worst : error;
          if (std::isnan(error)) return error;
        }
      }
  return worst;
}

}  // namespace test
