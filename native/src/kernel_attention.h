#pragma once
// Attention of some query rows over one part of the context: the body that is compiled once per instruction set.
#include "kernel_scores.h"
#include "kernel_softmax.h"
#include "kernel_values.h"

namespace {

using tinykv::kBlock;
using tinykv::kPart;
using tinykv::padded;
using tinykv::Part;
using tinykv::Partial;

// From this many rows on, each block of keys and values is converted to floats once for all of them. It may depend on
// nothing but the row's own step: the two ways round differently.
constexpr int kManyRows = 24;

size_t scratch_floats(int rows, int key_dim, int value_dim) {
  const int larger_dim = key_dim > value_dim ? key_dim : value_dim;
  const size_t few = (size_t)rows * kBlock + affine_floats(larger_dim);
  return rows < kManyRows ? few : few + (size_t)padded(larger_dim) * kBlock;
}

void attend_part(const Part& part, const Partial& partial) {
  const int rows = part.rows, stride = padded(part.value_dim);
  const bool many = rows >= kManyRows;
  float* scores = part.scratch;
  float* affine = scores + (size_t)rows * kBlock;
  float* converted = affine + affine_floats(part.key_dim > part.value_dim ? part.key_dim : part.value_dim);

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
    with_tokens(part.key_format, keys, tokens, part.key_dim, affine, [&](const auto& rows_of_keys) {
      if (many) transpose_keys(rows_of_keys, tokens, part.key_dim, converted);
      else score_few(part.queries, rows, part.key_dim, rows_of_keys, values, tokens, scores);
    });
    if (many) score_columns(part.queries, rows, part.key_dim, converted, tokens, scores);

    // Weights
    for (int r = 0; r < rows; ++r) {
      float* row = scores + r * kBlock;
      const float* bias = part.bias == nullptr ? nullptr : part.bias + (size_t)r * kPart + start;
      const int last = part.last[r] - start;
      mask_row(row, tokens, part.first[r] - start, last < tokens ? last : tokens, bias, part.softcap);
      weigh_row(row, partial.max + r, partial.sum + r, partial.out + (size_t)r * stride, part.value_dim);
    }

    // Weighted values, while the next block's keys are fetched
    with_tokens(part.value_format, values, tokens, part.value_dim, affine, [&](const auto& rows_of_values) {
      if (many) convert_values(rows_of_values, tokens, part.value_dim, converted);
      else add_values_few(scores, rows, rows_of_values, keys + kBlock, tokens, part.value_dim, partial.out);
    });
    if (many) add_values(scores, rows, converted, tokens, part.value_dim, partial.out);
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
