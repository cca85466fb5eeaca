#pragma once
// Attention of some query rows over one part of the context: the body that is compiled once per instruction set.
#include "kernel_scores.h"
#include "kernel_softmax.h"
#include "kernel_values.h"

namespace {

using tinykv::Dtype;
using tinykv::kBlock;
using tinykv::kPart;
using tinykv::padded;
using tinykv::Part;
using tinykv::Partial;

// From this many rows on, each block of keys and values is converted to floats once for all of them. It may depend on
// nothing but the row's own step: the two ways round differently.
constexpr int kManyRows = 24;

template <template <class> class Function, class... Arguments>
TINYKV_INLINE void by_dtype(Dtype dtype, Arguments... arguments) {
  if (dtype == Dtype::float32) Function<float>::call(arguments...);
  else if (dtype == Dtype::bfloat16) Function<Bfloat16>::call(arguments...);
  else Function<Float16>::call(arguments...);
}

#define TINYKV_BY_DTYPE(name, function) \
  template <class T>                    \
  struct name {                         \
    template <class... Arguments>       \
    static void call(Arguments... arguments) { function<T>(arguments...); } \
  };
TINYKV_BY_DTYPE(ScoreFew, score_few)
TINYKV_BY_DTYPE(TransposeKeys, transpose_keys)
TINYKV_BY_DTYPE(AddValuesFew, add_values_few)
TINYKV_BY_DTYPE(ConvertValues, convert_values)
#undef TINYKV_BY_DTYPE

size_t scratch_floats(int rows, int key_dim, int value_dim) {
  const size_t scores = (size_t)rows * kBlock;
  if (rows < kManyRows) return scores;
  const size_t larger_dim = padded(key_dim > value_dim ? key_dim : value_dim);
  return scores + larger_dim * kBlock;
}

void attend_part(const Part& part, const Partial& partial) {
  const int rows = part.rows, stride = padded(part.value_dim);
  const bool many = rows >= kManyRows;
  float* scores = part.scratch;
  float* converted = scores + (size_t)rows * kBlock;

  // Nothing seen yet
  for (int r = 0; r < rows; ++r) {
    partial.max[r] = kMinusInfinity;
    partial.sum[r] = 0;
  }
  __builtin_memset(partial.out, 0, (size_t)rows * stride * sizeof(float));

  // For each block of tokens
  for (int start = 0; start < part.tokens; start += kBlock) {
    const int tokens = part.tokens - start < kBlock ? part.tokens - start : kBlock;
    const char* const* keys = part.keys + start;
    const char* const* values = part.values + start;

    // Scores, while the block's values are fetched
    if (many) {
      by_dtype<TransposeKeys>(part.key_dtype, keys, tokens, part.key_dim, converted);
      score_columns(part.queries, rows, part.key_dim, converted, tokens, scores);
    } else {
      by_dtype<ScoreFew>(part.key_dtype, part.queries, rows, part.key_dim, keys, values, tokens, scores);
    }

    // Weights
    for (int r = 0; r < rows; ++r) {
      float* row = scores + r * kBlock;
      const float* bias = part.bias == nullptr ? nullptr : part.bias + (size_t)r * kPart + start;
      const int last = part.last[r] - start;
      mask_row(row, tokens, part.first[r] - start, last < tokens ? last : tokens, bias, part.softcap);
      weigh_row(row, partial.max + r, partial.sum + r, partial.out + (size_t)r * stride, part.value_dim);
    }

    // Weighted values, while the next block's keys are fetched
    if (many) {
      by_dtype<ConvertValues>(part.value_dtype, values, tokens, part.value_dim, converted);
      add_values(scores, rows, converted, tokens, part.value_dim, partial.out);
    } else {
      const char* const* next = keys + kBlock;
      by_dtype<AddValuesFew>(part.value_dtype, scores, rows, values, next, tokens, part.value_dim, partial.out);
    }
  }
}

void merge(int rows, int value_dim, const Partial& total, const Partial& more) {
  const int stride = padded(value_dim);
  for (int r = 0; r < rows; ++r) {
    const float max_ = total.max[r] > more.max[r] ? total.max[r] : more.max[r];
    if (max_ == kMinusInfinity) continue;
    const float old_factor = exp2(total.max[r] - max_), new_factor = exp2(more.max[r] - max_);
    float* out = total.out + (size_t)r * stride;
    const float* add = more.out + (size_t)r * stride;
    for (int d = 0; d < value_dim; d += kLanes) store(out + d, load(out + d) * old_factor + load(add + d) * new_factor);
    total.sum[r] = total.sum[r] * old_factor + more.sum[r] * new_factor;
    total.max[r] = max_;
  }
}

}  // namespace
